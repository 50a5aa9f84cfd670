"""What a training step of sharded tables gives a GPU to do, counted without one.

    tables    lookup, backward and update of three tables: row-wise Adagrad, one id a bag
    model     the same in a DLRM, with its dense part, loss and fused Adam

Of two ranks, one is counted: the `Mirror` returns its own messages as its peer's. A single rank has
its tables whole, two have them by rows (mode `unique`). Kernels are Triton's.
"""

from contextlib import contextmanager, nullcontext
from unittest import mock

import torch

from recapp.benchmarks.kernel_costs import Mirror
from recapp.benchmarks.session import rule
from recapp.engine.sharded_collection import shard_bags, sharded_tables
from recapp.engine.step_graph import WARM_UP, StepGraph
from recapp.models.published_dlrm import DLRM
from recapp.optim.optimizer import hybrid
from recapp.sharding.sharding_plan import ShardingPlan, tile
from recapp.sharding.sharding_types import CandidateRanks
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.tables.config import EmbeddingBagConfig
from recapp.transport import step_messages
from recapp.transport.communicator import Comm, GpuSideStream

from .recorder import Recorder

WIDTHS = {1: (8, 8, 8), 2: (8, 8, 16), 3: (8, 16, 32)}
"""The columns of each table, by the number of groups."""
ROWS = (64, 40, 8)  # even, so that both ranks of the mirror have rows of the same numbers
SAMPLES = 300  # more than a long bag of any table may have entries: its sums are launches, too
NUMBERS = 13  # dense inputs


class NoStream:
    """A stream without work."""

    def wait_stream(self, other):
        """Wait for nothing."""

    def wait_event(self, event):
        """Wait for nothing."""

    def record_event(self):
        """Return no event."""


def counted_rows():
    """Return a row of counts for each part, number of ranks and of groups; of tables on one rank
    also what the host does in a step whose graph it has, the graph as one launch.
    """
    rows = [
        {
            "part": part,
            "mode": "eager",
            "ranks": ranks,
            "groups": groups,
            **record(ranks, groups, part=part).counts(),
        }
        for part, rank_numbers in (("tables", (1, 2)), ("model", (1,)))
        for ranks in rank_numbers
        for groups in WIDTHS
    ]
    of_graph = {"part": "tables", "mode": "recorded", "ranks": 1}
    return rows + [
        {**of_graph, "groups": groups, **record_replay(groups).counts()} for groups in WIDTHS
    ]


def record(ranks, groups, seed=1, samples=SAMPLES, part="tables"):
    """Return the record of a training step.

    Args:
        ranks: One or two ranks.
        groups: The number of groups.
        seed: The seed of the ids.
        samples: The samples of the batch.
        part: What trains, a name of `PARTS`.
    """
    collection = sharded(ranks, groups)
    step = PARTS[part](collection, samples)
    with tf32():
        step(batch_of(0, samples))  # what later steps use again
        return recorded(step, collection, batch_of(seed, samples))[0]


@contextmanager
def tf32():
    """While this lasts products are those of TF32, which the kernels of a dense part want."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def record_replay(groups):
    """Return the record of a step whose graph there is already, on one rank.

    Args:
        groups: The number of groups.
    """
    dense = torch.nn.Linear(1, 1)
    model = torch.nn.ModuleDict({"bags": sharded(1, groups), "dense": dense})
    inner = Recorder()
    outer = Recorder()

    def loss(model, batch):
        return model["bags"](batch.sparse).values().sum() + model["dense"].weight.sum()

    def capture(step):
        with inner.recording(), _counts_on_host():
            return step(), lambda: outer.launch("graph", inner.replay)

    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1, fused=True)
    step = StepGraph(model, loss, optimizer, capture)
    for seed in range(WARM_UP + 1):
        step(samples_of(batch_of(seed)))
    known = [samples_of(batch_of(seed).sync()) for seed in (10, 11, 12)]
    with outer.recording():
        for samples in known:  # the third step reads the verdict on the first
            outer.entries.clear()
            step(samples)
    return outer


def samples_of(features):
    """Return samples with these ids."""
    return Batch(torch.zeros(SAMPLES, 1), features, torch.zeros(SAMPLES))


def sharded(ranks, groups):
    """Return sharded tables on one or two ranks, with streams on which nothing overlaps."""
    comm = Comm() if ranks == 1 else Mirror(torch.device("cpu"))
    comm.side = GpuSideStream(NoStream(), NoStream, lambda stream: nullcontext())
    tables = [
        EmbeddingBagConfig(
            name=f"t{k}", num_embeddings=rows, embedding_dim=width, feature_names=[f"f{k}"]
        )
        for k, (rows, width) in enumerate(zip(ROWS, WIDTHS[groups], strict=True))
    ]
    places = CandidateRanks([*range(ranks)], [[*range(ranks)]])
    kind = "table_wise" if ranks == 1 else "row_wise"
    plan = ShardingPlan({t.name: tile(t, kind, places) for t in tables}, ranks, kind)
    return shard_bags(tables, plan, comm, rule(), backend="triton")


def batch_of(seed, samples=SAMPLES):
    """Return a batch of one id a bag."""
    drawn = torch.Generator().manual_seed(seed)
    ids = [torch.randint(rows, (samples,), generator=drawn) for rows in ROWS]
    lengths = torch.ones(len(ROWS) * samples, dtype=torch.int64)
    return KeyedJaggedTensor([f"f{k}" for k in range(len(ROWS))], torch.cat(ids), lengths=lengths)


def tables_alone(collection, samples):
    """Return a step that looks up a batch, updates the rows, and returns the vectors."""
    gradient_BK = torch.ones(samples, sum(x.dim for x in collection.lookups))

    def step(batch):
        vectors_BK = collection(batch).values()
        torch.autograd.backward(vectors_BK, gradient_BK)
        return vectors_BK

    return step


def whole_model(collection, samples):
    """Return a step that trains a DLRM by fused Adam, and returns the logits."""
    torch.manual_seed(0)
    dlrm = DLRM(collection, NUMBERS, (16, 8), (16, 1))
    adam = torch.optim.Adam([p for p in dlrm.parameters() if p.numel()], fused=True)
    optimizer = hybrid(adam, sharded_tables(dlrm))
    dense_BI = torch.rand(samples, NUMBERS)
    labels_B = torch.arange(samples) % 2.0

    def step(ids):
        optimizer.zero_grad()
        logits_B = dlrm(Batch(dense_BI, ids, labels_B))
        torch.nn.functional.binary_cross_entropy_with_logits(logits_B, labels_B).backward()
        optimizer.step()
        return logits_B

    return step


PARTS = {"tables": tables_alone, "model": whole_model}


def recorded(step, collection, batch):
    """Return the record of a step of a batch, and what the step returns."""
    comm = collection.shared.comm
    recorder = Recorder()
    with (
        recorder.recording(comm if comm.world > 1 else None),
        _counts_on_host() if comm.world == 1 else nullcontext(),
    ):
        result = step(batch)
    return recorder, result


def _counts_on_host():
    """Return a context in which counts stay on the host, as those of a single rank do."""
    return mock.patch.multiple(
        step_messages,
        to_device=lambda numbers, device: torch.from_numpy(numbers),
        to_host=lambda tensor: tensor,
    )
