"""Recorded steps whose lookups need the host: on several ranks, and with tables that grow. There is
no CUDA graph here: a recorder notes the work between lookup and update, and does it again.
"""

import pytest
import torch
import torch.distributed as dist
from engine.engine_cases import make_plan, same_bits
from gpu_first.recorder import counted

from recapp.data_parallel import wrap_dense
from recapp.engine.sharded_collection import shard_model, sharded_tables
from recapp.errors import IdError, TrainingError
from recapp.graphs.recorded_batch import WARM_UP
from recapp.graphs.several_ranks import OfRanks
from recapp.graphs.step_graph import StepGraph
from recapp.optim.optimizer import hybrid
from recapp.optim.rules import rowwise_adagrad
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection, EmbeddingCollection
from recapp.tables.config import EmbeddingBagConfig, EmbeddingConfig
from recapp.transport.communicator import Comm

SKETCHED = {"seen": 2, "counter": "sketch"}  # the host decides on new keys
ROWS = {"a": 23, "b": 9, "c": 40}
B = 6


class Model(torch.nn.Module):
    """Its vectors come behind its numbers. Where it weighs ids, it looks up other ones than those
    of the batch.
    """

    def __init__(self, weighs=False, **of_table):
        super().__init__()
        torch.manual_seed(1)
        self.weighs = weighs
        self.tables = [
            EmbeddingBagConfig(
                **{"num_embeddings": n, "embedding_dim": 4 + 4 * (f == "c"), "name": f} | of_table,
                feature_names=[f],
            )
            for f, n in ROWS.items()
        ]
        self.bags = EmbeddingBagCollection(self.tables, seed=2, is_weighted=weighs or None)
        self.bottom = torch.nn.Linear(3, 4)
        self.top = torch.nn.Linear(20, 1)

    def forward(self, batch):
        ids = batch.sparse
        if self.weighs:
            ids = ids.with_weights(torch.arange(len(ids.values())) / 8)
        return self.top(self.bags(ids).prepend(self.bottom(batch.dense_BI))).squeeze(1)


class WithSequences(Model):
    """A model that also reads the vectors of two features one by one, and adds them up."""

    def __init__(self, need_indices=False):
        super().__init__()
        tables = [EmbeddingConfig(ROWS[f], 4, f"s{f}", feature_names=[f]) for f in "ac"]
        self.sequences = EmbeddingCollection(tables, need_indices=need_indices, seed=3)
        self.tables = [*self.tables, *tables]

    def forward(self, batch):
        logits_B = super().forward(batch)
        for jagged in self.sequences(batch.sparse).values():
            ids = len(jagged.values())
            bag_L = torch.repeat_interleave(jagged.lengths().long(), output_size=ids)
            logits_B = logits_B.index_add(0, bag_L, jagged.values().square().sum(1))
        return logits_B


def loss(model, batch):
    return torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels_B)


def batch_of(seed, rank, infinite=False, bad=False, varies=False, per_feature=None):
    """Ranks have batches of different sizes; where these vary, each step has another. Features have
    any number of ids, or all as many.
    """
    drawn = torch.Generator().manual_seed(10 * seed + rank)
    samples = B + 2 * rank + (seed * (rank + 1) % 3 if varies else 0)
    per_F = [per_feature or torch.randint(0, 9, (), generator=drawn).item() for _ in ROWS]
    ids = [
        torch.randint(rows, (n,), generator=drawn)
        for rows, n in zip(ROWS.values(), per_F, strict=True)
    ]
    bags = [
        torch.randint(samples, (n,), generator=drawn).bincount(minlength=samples) for n in per_F
    ]
    ids = torch.cat(ids)
    if bad and rank:
        ids[0] = 99
    features = KeyedJaggedTensor(list(ROWS), ids, lengths=torch.cat(bags))
    numbers = torch.randn(samples, 3, generator=drawn)
    if infinite and rank:
        numbers[0, 0] = torch.inf
    return Batch(numbers, features, (torch.rand(samples, generator=drawn) < 0.4).float())


class Trained:
    """A model and its steps: recorded, or those of a loop without `StepGraph`. The average over
    several ranks is that of the loop, or DDP's.
    """

    def __init__(self, comm, plan, steps, ddp=None, model=Model, **of_model):
        self.comm = comm
        self.model = model(**of_model)
        plan = make_plan(plan, self.model.tables, comm.world, column_width=4)
        self.model.bags.leave_room(4)
        shard_model(self.model, plan, comm, rowwise_adagrad(0.125), "triton")
        self.tables = sharded_tables(self.model)
        dense = torch.optim.Adam(self.model.parameters(), 2**-7, fused=True)
        self.optimizer = hybrid(dense, self.tables)
        self.captures = self.replays = 0
        ranks = OfRanks(self.share, self.average) if comm.world > 1 and ddp is None else None
        if ddp is not None:
            self.average = self.share = None
            settings = {"broadcast_buffers": False, "gradient_as_bucket_view": True} | ddp
            self.model = wrap_dense(self.model, comm, process_group=comm.group, **settings)
        if steps != "loop":
            self.step = StepGraph(self.model, loss, self.optimizer, self.capture, ranks=ranks)
        else:
            self.step = self.plain_step

    def share(self):
        rows_W = self.tables[0].header.rows_W
        return rows_W[self.comm.rank] * self.comm.world / sum(rows_W)

    def average(self, tensors):
        for tensor in tensors if self.comm.world > 1 else ():
            dist.all_reduce(tensor, group=self.comm.group)
            tensor /= self.comm.world

    def capture(self, step):
        return counted(self, step, [self.step._verdict.stopped])

    def plain_step(self, batch):
        self.optimizer.zero_grad()
        value = loss(self.model, batch)
        (value * self.share() if self.comm.world > 1 and self.share else value).backward()
        if self.average:
            self.average([p.grad for p in self.model.parameters()])
        self.optimizer.step()
        return value.detach()

    def train(self, seeds, **faults):
        for seed in seeds:
            yield self.step(batch_of(seed, self.comm.rank, **faults)).clone()

    def weights(self):
        data = [b.data for t in self.tables for store in t.stores for b in store.blocks()]
        rows = [x if isinstance(x, torch.Tensor) else x.memory[x.slots] for x in data]
        return [x.detach().clone() for x in (*self.model.parameters(), *rows)]


def compare(comm, plan, ddp=None, **of_table):
    """Train with recorded steps, and in an ordinary loop."""
    seeds = range(WARM_UP + 4)
    recorded, loop = (Trained(comm, plan, steps, ddp, **of_table) for steps in ("recorded", "loop"))
    values = [[*way.train(seeds), *way.weights()] for way in (recorded, loop)]
    recorded.step.finish()
    assert (recorded.captures, recorded.replays) == (1, len(seeds) - WARM_UP - 1)
    assert all(map(same_bits, *values))


def reads_sequences(comm, plan, ddp):
    """Train a model that reads vectors one by one. A batch of the last rank has fewer ids."""
    numbers = [7] * (WARM_UP + 2) + [7 - 2 * comm.rank, 7, 7]
    recorded, loop = (
        Trained(comm, plan, steps, ddp, WithSequences) for steps in ("recorded", "loop")
    )
    values = []
    for way in (recorded, loop):
        steps = [way.train([seed], per_feature=n) for seed, n in enumerate(numbers)]
        values.append([*(x for step in steps for x in step), *way.weights()])
    recorded.step.finish()
    assert all(map(same_bits, *values))
    assert recorded.replays == len(numbers) - WARM_UP - 1 - comm.rank


def reads_rows(comm):
    trained = Trained(comm, "table_wise", "recorded", {}, WithSequences, need_indices=True)
    assert ("whose rows the model reads" in trained.step.why_not) == (comm.world > 1)


def does_not_fit(comm):
    """Train with batches of which those of one rank, and then of both, are of other forms."""
    recorded, loop = (Trained(comm, "row_wise", steps, {}) for steps in ("recorded", "loop"))
    forms = [False] * (WARM_UP + 1) + [False, comm.rank == 1, comm.rank == 0, True, False]
    values = []
    for way in (recorded, loop):
        steps = [way.train([3 * seed + 1], varies=varies) for seed, varies in enumerate(forms)]
        values.append([*(x for step in steps for x in step), *way.weights()])
    recorded.step.finish()
    assert recorded.replays == 3
    assert all(map(same_bits, *values))


def is_launched(comm, settings):
    """Train a model whose DDP does more than to average gradients."""
    trained, loop = (Trained(comm, "row_wise", s, settings) for s in ("recorded", "loop"))
    values = [[*way.train(range(2)), *way.weights()] for way in (trained, loop)]
    assert all(map(same_bits, *values))
    assert trained.step.why_not.startswith("no DDP as that of DistributedModelParallel")


def stops(comm, fault):
    """Train until a fault on the last rank, and on for some steps: no weight changes."""
    trained = Trained(comm, "row_wise", "recorded", {} if fault == "infinite" else None)
    list(trained.train(range(WARM_UP + 3)))
    before = trained.weights()
    kind = IdError if fault == "bad" else TrainingError
    text = "which is outside its" if fault == "bad" else f"step {WARM_UP + 4}: the loss is not"
    with pytest.raises(kind, match=text):
        list(trained.train([50], **{fault: True}))
        list(trained.train(range(60, 64)))
    assert all(map(same_bits, before, trained.weights()))


def looks_up_other_ids(comm):
    """Train a model that weighs ids itself: its lookups are its own, and its steps are launched."""
    model = {"weighs": True, "num_embeddings": "dynamic", "dynamic": SKETCHED}
    trained, loop = (Trained(comm, "table_wise", s, **model) for s in ("recorded", "loop"))
    seeds = range(WARM_UP + 3)
    values = [[*way.train(seeds, varies=True), *way.weights()] for way in (trained, loop)]
    assert all(map(same_bits, *values))
    assert "other ids" in trained.step.why_not and not trained.captures


def test_recorded_steps_of_tables_that_need_the_host_have_the_bits_of_a_loop(interpreted):
    compare(Comm(), "table_wise", num_embeddings="dynamic", dynamic=SKETCHED)


def dropping(comm, plan):
    """Compare steps whose tables refuse some ids."""
    compare(comm, plan, num_embeddings=20, id_rule="drop")


@pytest.mark.full
@pytest.mark.parametrize(
    ("plan", "train"), [("row_wise", compare), ("column_wise", compare), ("row_wise", dropping)]
)
def test_recorded_steps_of_several_ranks_have_the_bits_of_a_loop(interpreted, ranks, plan, train):
    ranks.run(train, 2, plan)


def test_a_rank_whose_batch_does_not_fit_is_launched_beside_the_others(interpreted, ranks):
    ranks.run(does_not_fit, 2)


@pytest.mark.full
@pytest.mark.parametrize("settings", [{"find_unused_parameters": True}, {"static_graph": True}])
def test_steps_of_a_ddp_that_does_more_are_launched(interpreted, ranks, settings):
    ranks.run(is_launched, 2, settings)


@pytest.mark.parametrize("fault", ["bad", pytest.param("infinite", marks=pytest.mark.full)])
def test_a_fault_of_one_rank_stops_all(interpreted, ranks, fault):
    ranks.run(stops, 2, fault)


@pytest.mark.parametrize(
    ("plan", "ddp"), [("table_wise", {}), pytest.param("row_wise", None, marks=pytest.mark.full)]
)
def test_recorded_steps_read_vectors_one_by_one(interpreted, ranks, plan, ddp):
    ranks.run(reads_sequences, 2, plan, ddp)


@pytest.mark.full
def test_rows_of_ids_are_not_recorded_where_lookups_are_cut(interpreted, ranks):
    ranks.run(reads_rows, 2)
    reads_rows(Comm())


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2])
def test_lookups_of_other_ids_are_those_of_the_model(interpreted, ranks, world):
    ranks.run(looks_up_other_ids, world)
