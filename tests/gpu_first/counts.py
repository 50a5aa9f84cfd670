"""What a training step of sharded tables gives a GPU to do, counted without one.

Counted are lookup, backward and update of three tables (row-wise Adagrad, one id a bag, Triton's
kernels): the dense part, its optimiser and the loss are not in it. Of two ranks, one is counted:
the `Mirror` returns its own messages as its peer's. A single rank has its tables whole, two have
them by rows (mode `unique`).
"""

from contextlib import nullcontext
from unittest import mock

import torch

from recapp.benchmarks.kernel_costs import Mirror
from recapp.benchmarks.session import rule
from recapp.engine.sharded_collection import shard_bags
from recapp.sharding.sharding_plan import ShardingPlan, tile
from recapp.sharding.sharding_types import CandidateRanks
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import EmbeddingBagConfig
from recapp.transport import step_messages
from recapp.transport.communicator import Comm, GpuSideStream

from .recorder import Recorder

WIDTHS = {1: (8, 8, 8), 2: (8, 8, 16), 3: (8, 16, 32)}
"""The columns of each table, by the number of groups."""
ROWS = (64, 40, 8)  # even, so that both ranks of the mirror have rows of the same numbers
SAMPLES = 300  # more than a long bag of any table may have entries: its sums are launches, too


class NoStream:
    """A stream without work."""

    def wait_stream(self, other):
        """Wait for nothing."""

    def wait_event(self, event):
        """Wait for nothing."""

    def record_event(self):
        """Return no event."""


def counted_rows():
    """Return a row of counts for each number of ranks and of groups."""
    return [
        {"mode": "eager", "ranks": ranks, "groups": groups, **record(ranks, groups).counts()}
        for ranks in (1, 2)
        for groups in WIDTHS
    ]


def record(ranks, groups, seed=1, samples=SAMPLES):
    """Return the record of a training step.

    Args:
        ranks: One or two ranks.
        groups: The number of groups.
        seed: The seed of the ids.
        samples: The samples of the batch.
    """
    collection = sharded(ranks, groups)
    train(collection, batch_of(0, samples))  # what later steps use again
    return recorded(collection, batch_of(seed, samples))[0]


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


def train(collection, batch, gradient_BK=None):
    """Look up a batch, update the rows, and return the vectors.

    Args:
        collection: The sharded tables.
        batch: The batch.
        gradient_BK: The gradient of the vectors; None: ones.
    """
    vectors_BK = collection(batch).values()
    if gradient_BK is None:
        gradient_BK = torch.ones_like(vectors_BK)
    torch.autograd.backward(vectors_BK, gradient_BK)
    return vectors_BK


def recorded(collection, batch):
    """Return the record of a training step of a batch, and the vectors."""
    comm = collection.shared.comm
    gradient_BK = torch.ones(batch.stride(), sum(x.dim for x in collection.lookups))
    recorder = Recorder()
    with (
        recorder.recording(comm if comm.world > 1 else None),
        _counts_on_host() if comm.world == 1 else nullcontext(),
    ):
        vectors_BK = train(collection, batch, gradient_BK)
    return recorder, vectors_BK


def _counts_on_host():
    """Return a context in which counts stay on the host, as those of a single rank do."""
    return mock.patch.multiple(
        step_messages,
        to_device=lambda numbers, device: torch.from_numpy(numbers),
        to_host=lambda tensor: tensor,
    )
