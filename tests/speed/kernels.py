"""`kernels` and `memory`: local lookup and fused update in one process, beside plain torch.

`kernels` compares their time with FBGEMM, with plain torch and with the bytes that must move. The
floor is the time that memory needs: the bytes that must move, over the bandwidth of a plain copy in
the same rounds.

    forward     output twice (a write fetches the cache line first) + each distinct row once + ids
    backward    gradient of the output once + each distinct row twice
                + its optimiser state, a cache line, twice + ids

A lookup reads rows at random, and no processor does so at the speed of a copy. So there is a second
floor of the forward (`gather_ratio`): torch's own `embedding_bag` over the same rows in the same
order, all tables in one call, without a check of ids, grouping or gradient.

recapp runs the whole lookup and update of training on one rank: id checks, grouping, lookup, and
backward with the update inside. Grouping counts as forward in recapp; FBGEMM sorts in backward.
Plain torch is an `nn.EmbeddingBag` per table with sparse gradients and `torch.optim.Adagrad`.
recapp and the gather run a second time on rows in pages of 4 KB (`small_pages_ratio` is the time on
these pages over the time on large pages).

`memory` measures the memory that one backward and its update need in addition to the table, and
compares it with `nn.EmbeddingBag` with dense and with sparse gradients. A dense gradient is as
large as the table, even if the batch touches few rows. A sparse gradient holds a row for every id
before equal rows are added. recapp updates a row while it sums the row's gradients, so only
messages need further vectors of a row's width. The table is the largest of `tables`. Every method
updates by plain gradient descent, which keeps no optimiser state. The peak is the growth of the
process from before the backward to its highest point during backward and update. Each round takes
another batch. Buffers for reuse stay allocated after the first round, so they count in that round.

B samples of a batch, K columns of the pooled output, N ids, M bags, L ids of the batch.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from recapp.benchmarks.session import LEARNING_RATE
from recapp.benchmarks.steps import workload_of
from recapp.benchmarks.timing import Measured, Steps, compared, in_turn, ratio, spread
from recapp.benchmarks.workloads import WORKLOADS, Workload
from recapp.console import progress
from recapp.engine.row_store import FloatStore
from recapp.engine.sharded_collection import ShardedEmbeddingBagCollection
from recapp.kernels import row_memory
from recapp.optim.rules import sgd
from recapp.processes.process_memory import (
    forget_peak_resident,
    peak_resident_bytes,
    settled_bytes,
)
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor

from .lab import Lab
from .rivals import beside

CACHE_LINE = 64
COPIED_BYTES = 1 << 27  # several times the largest caches


Pool = Callable[[KeyedJaggedTensor], Tensor]
"""Returns the pooled vectors of a batch, [B, K]."""


def training(
    pool: Pool,
    batches: Sequence[KeyedJaggedTensor],
    gradient_BK: Tensor,
    update: Callable[[], None] = lambda: None,
) -> Steps:
    """Return a contender whose step has the parts `forward` and `backward`, which includes the
    update.

    Args:
        pool: The forward.
        batches: The batches, which steps take in turn.
        gradient_BK: The gradient of the pooled vectors.
        update: The update after the backward; a sharded collection needs none.
    """
    pooled: list[Tensor] = []

    def forward(number: int) -> None:
        pooled.append(pool(batches[number % len(batches)]))

    def backward(_: int) -> None:
        torch.autograd.backward(pooled.pop(), gradient_BK)
        update()

    return Steps({"forward": forward, "backward": backward})


def pool_of(collection: ShardedEmbeddingBagCollection) -> Pool:
    """Return the forward of a sharded collection."""

    def pool(batch: KeyedJaggedTensor) -> Tensor:
        pooled_BK: Tensor = collection(batch).values()
        return pooled_BK

    return pool


class PlainTorch:
    """An `nn.EmbeddingBag` for each table, with an optimiser of torch.

    Args:
        workload: The tables and the shape of a batch.
        sparse: Whether a gradient is a sparse tensor of the ids' rows; else it is as large as the
            table.
        optimizer: The class of the optimiser.
    """

    def __init__(
        self,
        workload: Workload,
        sparse: bool,
        optimizer: Callable[..., torch.optim.Optimizer],
    ) -> None:
        self.bags = nn.ModuleList(
            [
                nn.EmbeddingBag(rows, dim, mode="sum", sparse=sparse, include_last_offset=True)
                for rows, dim in zip(workload.rows_F, workload.dim_F, strict=True)
            ]
        )
        self.offsets = [
            torch.arange(0, workload.batch_size * bag + 1, bag) for bag in workload.bag_F
        ]
        self.optimizer = optimizer(self.bags.parameters(), lr=LEARNING_RATE)

    def __call__(self, batch: KeyedJaggedTensor) -> Tensor:
        """Return the pooled vectors of a batch, [B, K]."""
        ids = torch.split(batch.values(), batch.length_per_key())
        pooled: list[Tensor] = [
            bag(i, o) for bag, i, o in zip(self.bags, ids, self.offsets, strict=True)
        ]
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled, 1)

    def update(self) -> None:
        """Update the whole tables, or only the rows of sparse gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass(frozen=True)
class Floor:
    """The bytes that a step must move, and its floating-point operations, by direction."""

    forward: int
    backward: int
    forward_flops: int
    backward_flops: int


def floor_of(workload: Workload, features: KeyedJaggedTensor) -> Floor:
    """Return the lowest cost of a batch of a workload.

    Args:
        workload: The tables, all of the same width.
        features: The batch.
    """
    row = 4 * workload.dim_F[0]
    distinct = sum(
        len(torch.unique(ids)) for ids in torch.split(features.values(), features.length_per_key())
    )
    output = 4 * workload.batch_size * workload.width
    ids = 8 * workload.ids
    summed = workload.ids * workload.dim_F[0]
    return Floor(
        2 * output + distinct * row + ids,
        output + 2 * distinct * row + 2 * distinct * CACHE_LINE + ids,
        summed,
        summed + 6 * distinct * workload.dim_F[0],
    )


def gather(
    collection: ShardedEmbeddingBagCollection, batches: Sequence[KeyedJaggedTensor]
) -> Steps:
    """Return a contender that only reads rows: torch's `embedding_bag` over the rows of all ids.

    Args:
        collection: The tables, on one rank.
        batches: The batches, which steps take in turn.
    """
    store = collection.shared.state.stores[0]
    assert isinstance(store, FloatStore)
    weights = store.weights
    bags = [_rows_and_bags(collection, batch) for batch in batches]

    def read(rows_and_bags: tuple[Tensor, Tensor]) -> None:
        row_N, start_M = rows_and_bags
        nn.functional.embedding_bag(row_N, weights, start_M, mode="sum")

    return Steps({"step": in_turn(read, bags)}, inside=torch.no_grad)


def _rows_and_bags(
    collection: ShardedEmbeddingBagCollection, batch: KeyedJaggedTensor
) -> tuple[Tensor, Tensor]:
    """Return the row of each id in the store, [N], and the first id of each bag, [M]."""
    with torch.no_grad():
        requests = collection.shared.input_dist(batch)
        requests.finish()
    (asked,) = requests.asked
    links = asked.combine_links
    assert links.offsets_M1 is not None
    found = links.index_N.long(), links.offsets_M1[:-1].long()
    requests.release()
    return found


def part(measured: Measured, name: str) -> Measured:
    """Return the times of one part as the times of whole steps."""
    return Measured({"step": measured.rounds[name]})


def copy() -> Steps:
    """Return a contender that copies memory: it reads and writes each byte."""
    source = torch.zeros(COPIED_BYTES // 4)
    target = torch.zeros(COPIED_BYTES // 4)
    return Steps({"step": lambda number: target.copy_(source)})


def at_bandwidth(copy: Measured, moved: int) -> Measured:
    """Return the time of moving some bytes at the speed of a measured copy, round by round.

    Args:
        copy: The times of `copy()`.
        moved: The number of bytes to read or write.
    """
    return Measured(
        {
            "step": [
                [ms * moved / (2 * COPIED_BYTES) for ms in steps] for steps in copy.rounds["step"]
            ]
        }
    )


def measure_kernels(session: Lab) -> None:
    """Measure every workload at every number of threads."""
    for name in session.settings.workload:
        _measure(session, WORKLOADS[name])


def _measure(session: Lab, workload: Workload) -> None:
    batches = session.batches(workload)
    large_pages = session.whole(workload.tables(), batches, session.comm)
    with patch.object(row_memory, "HUGE_FROM_BYTES", sys.maxsize):
        on_small_pages = session.whole(workload.tables(), batches, session.comm)
    plain = PlainTorch(workload, True, torch.optim.Adagrad)
    gradient_BK = torch.randn(workload.batch_size, workload.width)
    contenders = {
        "recapp": training(pool_of(large_pages), batches, gradient_BK),
        "small pages": training(pool_of(on_small_pages), batches, gradient_BK),
        "gather": gather(large_pages, batches),
        "gather, small pages": gather(on_small_pages, batches),
        "torch": training(plain, batches, gradient_BK, plain.update),
        "copy": copy(),
    }
    floor = floor_of(workload, batches[0])
    specs = session.specs("kernels", workload)
    for threads, measured in session.by_threads(workload.name, contenders, specs):
        session.add(_row(workload, threads, floor, measured))


def _row(
    workload: Workload, threads: int, floor: Floor, measured: dict[str, Measured]
) -> dict[str, Any]:
    own = measured["recapp"]
    copied = measured["copy"]
    small = measured["small pages"]
    gathered = measured["gather"]
    others = {
        **beside("fbgemm", measured),
        "torch": measured["torch"],
        "floor": at_bandwidth(copied, floor.forward + floor.backward),
        "small_pages": small,
    }
    forward = part(own, "forward")
    return {
        "workload": workload.name,
        "threads": threads,
        **compared(own, others),
        **spread(own, "forward", "forward_"),
        **spread(own, "backward", "backward_"),
        **ratio("forward_floor", at_bandwidth(copied, floor.forward), forward),
        **ratio("backward_floor", at_bandwidth(copied, floor.backward), part(own, "backward")),
        **spread(gathered, prefix="gather_"),
        **ratio("gather", gathered, forward),
        **ratio("forward_small_pages", small, own, "forward"),
        **ratio("backward_small_pages", small, own, "backward"),
        **ratio("gather_small_pages", measured["gather, small pages"], gathered),
        "forward_bytes": floor.forward,
        "backward_bytes": floor.backward,
        "forward_flops": floor.forward_flops,
        "backward_flops": floor.backward_flops,
        "copy_gb_per_s": 2 * COPIED_BYTES / copied.median() / 1e6,
    }


def measure_memory(session: Lab) -> None:
    """Measure every method at every batch size with every kind of ids."""
    settings = session.settings
    torch.set_num_threads(settings.threads[0])
    tables = session.listed_tables()
    largest = workload_of([max(tables, key=lambda t: t.num_embeddings * t.embedding_dim)])
    for ids, batch_size in product(settings.ids, settings.batch_size):
        workload = largest.of_shape(batch_size, settings.bag, ids)
        batches = session.batches(workload)
        with progress(f"{ids} ids, batch {batch_size}, methods", len(METHODS)) as advance:
            for name, method in METHODS.items():
                measured = _peak(method(session, workload, batches), settings.rounds)
                session.add(_memory_row(name, workload, ids, measured))
                advance(1)


def _recapp(session: Lab, workload: Workload, batches: list[KeyedJaggedTensor]) -> Steps:
    """Return steps of recapp's tables, whose backward updates the rows."""
    collection = session.whole(workload.tables(), batches[:1], session.comm, sgd(LEARNING_RATE))
    return training(pool_of(collection), batches, _gradient(workload))


def _plain(
    sparse: bool, session: Lab, workload: Workload, batches: list[KeyedJaggedTensor]
) -> Steps:
    """Return steps of `nn.EmbeddingBag` with `torch.optim.SGD`."""
    tables = PlainTorch(workload, sparse, torch.optim.SGD)
    return training(tables, batches, _gradient(workload), tables.update)


def _gradient(workload: Workload) -> Tensor:
    return torch.ones(workload.batch_size, workload.width)


METHODS: dict[str, Callable[[Lab, Workload, list[KeyedJaggedTensor]], Steps]] = {
    "recapp": _recapp,
    "sparse gradient": partial(_plain, True),
    "dense gradient": partial(_plain, False),
}


def _peak(method: Steps, rounds: int) -> dict[str, Any]:
    """Return the highest peak over all rounds in bytes, and the time of backward and update."""
    peaks = []
    measured = Measured()
    backward = Steps({"step": method.parts["backward"]})
    for number in range(rounds):
        method.parts["forward"](number)
        before = settled_bytes()
        forget_peak_resident()
        measured.add(backward.run(1))
        peaks.append(max(0, (peak_resident_bytes() or 0) - before))
    return {"peak_bytes": max(peaks), **compared(measured, {})}


def _memory_row(
    name: str, workload: Workload, ids: str, measured: dict[str, Any]
) -> dict[str, Any]:
    rows = workload.rows_F[0]
    dim = workload.dim_F[0]
    touched = max(len(torch.unique(ids_L)) for ids_L in workload.draw(0))
    return {
        "way": name,
        "rows": rows,
        "dim": dim,
        "ids": ids,
        "batch_size": workload.batch_size,
        "bag": workload.bag_F[0],
        "table_bytes": 4 * rows * dim,
        "touched_rows": touched,
        "touched_bytes": 4 * touched * dim,
        **measured,
    }
