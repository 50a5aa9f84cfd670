"""TorchRec's train pipelines train what a plain loop trains, to the last bit."""

import pytest
import torch
from engine.engine_cases import make_tables

from recapp.compat.torchrec.batches import (
    RandomRecDataset,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from recapp.compat.torchrec.models import DLRM, DLRMTrain
from recapp.engine.sharded_collection import sharded_tables
from recapp.engine.sharded_state import gathered_state_dict
from recapp.parallel import DistributedModelParallel, EmbeddingBagCollectionSharder
from recapp.tables.collections import EmbeddingBagCollection

pytestmark = pytest.mark.usefixtures("reference_kernels")


def model_of(comm):
    torch.manual_seed(5)
    tables = make_tables(dims=(4, 4, 4))
    dlrm = DLRM(EmbeddingBagCollection(tables, device="meta", seed=1), 2, [4], [3, 1])
    fused = {"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.1}
    sharder = EmbeddingBagCollectionSharder(fused)
    return DistributedModelParallel(DLRMTrain(dlrm), comm.group, sharders=[sharder])


def batches_of(comm, count=6):
    keys = ["a", "shared", "b", "c"]
    return RandomRecDataset(
        keys, 5, 7, ids_per_feature=2, num_dense=2, manual_seed=comm.rank, num_batches=count
    )


def trained(comm, pipeline_class):
    """Losses and whole weights after some steps, and how many exchanges were started ahead."""
    model = model_of(comm)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    started = 0
    losses = []
    if pipeline_class is None:
        for batch in batches_of(comm):
            optimizer.zero_grad()
            loss, _ = model(batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, gathered_state_dict(model), started
    pipeline = pipeline_class(model, optimizer, torch.device("cpu"))
    batches = iter(batches_of(comm))
    while True:
        try:
            loss, logits, labels = pipeline.progress(batches)
        except StopIteration:
            break
        losses.append(loss.item())
        assert len(logits) == len(labels) == 5
        started += sharded_tables(model)[0].waiting_ahead
    return losses, gathered_state_dict(model), started


def compared(comm):
    plain = trained(comm, None)
    for kind in (TrainPipelineBase, TrainPipelineSparseDist):
        losses, state, started = trained(comm, kind)
        assert losses == plain[0] and len(losses) == 6
        assert started == (5 if kind is TrainPipelineSparseDist else 0)
        assert bool(state) == (comm.rank == 0)
        assert all(torch.equal(value, plain[1][name]) for name, value in state.items())


@pytest.mark.parametrize("world", [1, 2])
def test_every_pipeline_is_the_plain_loop(ranks, world):
    ranks.run(compared, world)


def evaluated(comm):
    """Evaluation between two batches of training changes nothing of it."""
    once = trained(comm, TrainPipelineSparseDist)[0]
    model = model_of(comm)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    train = iter(batches_of(comm))
    losses = [pipeline.progress(train)[0].item() for _ in range(3)]
    model.eval()
    before = gathered_state_dict(model)
    with torch.no_grad():
        held = iter(batches_of(comm, 2))
        assert [len(pipeline.progress(held)[1]) for _ in range(2)] == [5, 5]
        with pytest.raises(StopIteration):
            pipeline.progress(held)
    after = gathered_state_dict(model)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    return once, losses


def test_a_model_in_eval_mode_is_only_called(ranks):
    for once, losses in ranks.run(evaluated, 2):
        assert losses == once[:3]


def test_another_forward_is_called_instead_of_the_model():
    weight = torch.nn.Parameter(torch.ones(1))
    model = torch.nn.Linear(1, 1)
    pipeline = TrainPipelineBase(
        model,
        torch.optim.SGD([weight], 0.5),
        torch.device("cpu"),
        custom_model_fwd=lambda batch: ((weight * batch).sum(), "output"),
    )
    assert pipeline.progress(iter([torch.tensor([3.0])])) == "output"
    assert weight.item() == 1 - 0.5 * 3


class OfTensors(TrainPipelineSparseDist[torch.Tensor, list[torch.Tensor]]):
    """A pipeline whose types are named, as programs write it."""


def test_the_types_of_a_pipeline_may_be_named():
    assert issubclass(OfTensors, TrainPipelineBase) and OfTensors.depth == 1
