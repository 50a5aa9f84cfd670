"""Loops of TorchRec's shape whose steps are recorded. As in `test_step_graph.py`, a recorder stands
for a CUDA graph and Triton's interpreter for a GPU.
"""

from unittest import mock

import pytest
import torch
from engine.engine_cases import same_bits
from gpu_first.recorder import captured
from kernels.test_step_graph import B, Model, Trained, batch, loss
from ranks import auto_means

from recapp.compat.torchrec import batches as pipelines
from recapp.compat.torchrec.batches import Batch, TrainPipelineBase, TrainPipelineSparseDist
from recapp.compat.torchrec.keyed import FusedOptimizer
from recapp.compat.torchrec.optimizers import (
    CombinedOptimizer,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
)
from recapp.engine.sharded_collection import sharded_tables
from recapp.errors import IdError
from recapp.graphs.recorded_batch import WARM_UP
from recapp.graphs.step_graph import StepGraph
from recapp.optim.optimizer import hybrid
from recapp.optim.rules import rowwise_adagrad
from recapp.parallel import DistributedModelParallel, EmbeddingBagCollectionSharder
from recapp.sparse.keyed_jagged_tensor import Batch as OurBatch

CPU = torch.device("cpu")


def torchrecs(seed):
    """A batch in TorchRec's class."""
    ours = batch(seed)
    return Batch(ours.dense_BI, ours.sparse, ours.labels_B)


def piped(monkeypatch, kind, graph):
    """A model, and a pipeline that trains it."""
    trained = Trained(lr=2.0**-10)  # the device reads rates in fp32
    monkeypatch.setattr(
        pipelines, "StepGraph", lambda *given, **named: StepGraph(*given, trained.capture, **named)
    )

    def forward(samples):
        logits_B = trained.model.top(
            torch.cat([samples.dense_features, trained.model.bags(samples.sparse).values()], 1)
        ).squeeze(1)
        value = torch.nn.functional.binary_cross_entropy_with_logits(logits_B, samples.labels)
        return value, (value.detach(), logits_B.detach())

    pipeline = kind(
        trained.model, trained.step.optimizer, CPU, custom_model_fwd=forward, graph=graph
    )
    trained.step = pipeline._graph or trained.step
    return trained, pipeline


@pytest.mark.parametrize(
    "kind",
    [pytest.param(TrainPipelineBase, marks=pytest.mark.full), TrainPipelineSparseDist],
)
def test_a_pipeline_with_a_graph_trains_as_one_without(interpreted, monkeypatch, kind):
    found = []
    for graph in (True, False):
        trained, pipeline = piped(monkeypatch, kind, graph)
        results = []
        for first, last in ((0, 3), (3, WARM_UP + 3)):  # two epochs
            samples = iter([torchrecs(seed) for seed in range(first, last)])
            with pytest.raises(StopIteration):
                while True:
                    results.append(pipeline.progress(samples))
            trained.model.eval()
            results.append(pipeline.progress(iter([torchrecs(90)])))
            trained.model.train()
        assert len(trained.captures) == graph
        found.append([*(x for pair in results for x in pair), *trained.tensors()])
    assert all(map(same_bits, *found))


def pipes(comm):
    """Train on several ranks by pipelines that exchange ids ahead, with and without graphs."""
    found = []
    captures = []

    def capture(step):
        value, recorder = captured(step, [pipeline._graph._verdict.stopped])
        captures.append(recorder)
        return value, recorder.replay

    def step_graph(*given, **named):
        return StepGraph(*given, capture, **named)

    for graph in (True, False):
        with auto_means("triton"):
            model = DistributedModelParallel(
                Model(),
                comm.group,
                sharders=[EmbeddingBagCollectionSharder(rule=rowwise_adagrad())],
            )

        def forward(samples, model=model):
            ours = OurBatch(samples.dense_features, samples.sparse, samples.labels)
            value = loss(model, ours)
            return value, value.detach()

        tables = sharded_tables(model)
        dense = torch.optim.Adam(model.parameters(), 2.0**-10, fused=True)
        with (
            mock.patch.object(pipelines, "StepGraph", step_graph),
            mock.patch.object(tables[0], "look_ahead", wraps=tables[0].look_ahead) as ahead,
        ):
            pipeline = TrainPipelineSparseDist(
                model, hybrid(dense, tables), CPU, custom_model_fwd=forward, graph=graph
            )
            samples = iter([torchrecs(10 * seed + comm.rank) for seed in range(WARM_UP + 3)])
            found.append([pipeline.progress(samples) for _ in range(WARM_UP + 3)])
        assert ahead.call_count == WARM_UP + 3
        rows = [b.data for t in tables for store in t.stores for b in store.blocks()]
        found[-1] += [*(p.detach() for p in model.parameters()), *rows]
    assert len(captures) == 1
    assert all(map(same_bits, *found))


@pytest.mark.full
def test_a_pipeline_of_several_ranks_trains_as_one_without_a_graph(interpreted, ranks):
    ranks.run(pipes, 2)


def test_the_end_of_the_batches_raises_the_last_error(interpreted, monkeypatch):
    _, pipeline = piped(monkeypatch, TrainPipelineBase, True)
    bad = torchrecs(0)
    bad.sparse.values()[B + 2] = 9
    samples = iter([bad])
    pipeline.progress(samples)
    with pytest.raises(IdError, match=r"feature b has the id 9 \(step 1\)"):
        pipeline.progress(samples)


@pytest.mark.full
def test_a_batch_whose_tensors_are_not_known_is_launched(interpreted, monkeypatch, capsys):
    class Other:
        def __init__(self, samples):
            self.__dict__ = {**vars(samples), "sparse": samples.sparse}

        def to(self, device, non_blocking):
            return self

    trained, pipeline = piped(monkeypatch, TrainPipelineBase, True)
    known = loss(trained.model, batch(1)).detach()
    assert same_bits(pipeline.progress(iter([Other(torchrecs(1))]))[0], known)
    assert "steps of a Other without sparse, each, tensors are launched" in capsys.readouterr().err


def torchrecs_optimizer(trained, dense):
    tables = FusedOptimizer({"bags": trained.model.bags})
    return CombinedOptimizer([tables, ("dense", OptimizerWrapper(dense))])


@pytest.mark.full
def test_torchrecs_optimisers_that_only_call_others_are_recorded(interpreted):
    found = []
    for wrapped in (True, False):
        trained = Trained(lr=2.0**-10)
        if wrapped:
            named = dict(trained.model.named_parameters())
            dense = KeyedOptimizerWrapper(
                named, lambda p: torch.optim.Adam(p, 2.0**-10, fused=True)
            )
            trained.dense = dense.optimizer
            optimizer = torchrecs_optimizer(trained, dense)
            trained.step = StepGraph(trained.model, loss, optimizer, trained.capture)
            trained.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        found.append(trained.train([batch(seed) for seed in range(WARM_UP + 3)]))
        assert trained.replays == 2
    assert all(map(same_bits, *found))


@pytest.mark.parametrize("kind", ["WarmupOptimizer", "GradientClippingOptimizer"])
def test_torchrecs_optimisers_that_do_more_are_not_recorded(interpreted, kind):
    trained = Trained()
    named = dict(trained.model.named_parameters())
    dense = KeyedOptimizerWrapper(named, lambda p: torch.optim.Adam(p, fused=True))
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=10)]
    more = WarmupOptimizer(dense, stages) if kind[0] == "W" else GradientClippingOptimizer(dense)
    step = StepGraph(trained.model, loss, torchrecs_optimizer(trained, more), trained.capture)
    assert step.why_not.startswith(f"{kind} cannot be stopped by the device: make a torch.optim")
