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


def record(ranks, groups):
    """Return the record of a training step.

    Args:
        ranks: One or two ranks.
        groups: The number of groups.
    """
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
    collection = shard_bags(tables, plan, comm, rule(), backend="triton")
    gradient = torch.ones(SAMPLES, sum(WIDTHS[groups]))

    def step(batch):
        torch.autograd.backward(collection(batch).values(), gradient)

    for _ in range(2):  # two batches have the memory that later ones use again
        step(batch_of(0))
    recorder = Recorder()
    batch = batch_of(1)
    with (
        recorder.recording(comm if ranks > 1 else None),
        _counts_on_host() if ranks == 1 else nullcontext(),
    ):
        step(batch)
    return recorder


def batch_of(seed):
    """Return a batch of one id a bag."""
    drawn = torch.Generator().manual_seed(seed)
    ids = [torch.randint(rows, (SAMPLES,), generator=drawn) for rows in ROWS]
    lengths = torch.ones(len(ROWS) * SAMPLES, dtype=torch.int64)
    return KeyedJaggedTensor([f"f{k}" for k in range(len(ROWS))], torch.cat(ids), lengths=lengths)


def _counts_on_host():
    """Return a context in which counts stay on the host, as those of a single rank do."""
    return mock.patch.multiple(
        step_messages,
        to_device=lambda numbers, device: torch.from_numpy(numbers),
        to_host=lambda tensor: tensor,
    )
