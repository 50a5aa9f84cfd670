"""`kernels`: compare local lookup and fused update in one process with FBGEMM, with plain torch and
with the bytes that must move.

The floor is the time that memory needs: the bytes that must move, over the bandwidth of a plain
copy in the same rounds.

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

B samples of a batch, K columns of the pooled output, N ids, M bags.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recapp.benchmarks.plain_torch import PlainTorch, pool_of, training
from recapp.benchmarks.session import Session
from recapp.benchmarks.timing import Measured, Steps, beside, compared, in_turn, ratio, spread
from recapp.benchmarks.workloads import WORKLOADS, Workload
from recapp.engine.row_store import FloatStore
from recapp.engine.sharded_collection import ShardedEmbeddingBagCollection
from recapp.kernels.row_memory import small_pages
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor

CACHE_LINE = 64
COPIED_BYTES = 1 << 27  # several times the largest caches


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


def run(session: Session) -> None:
    """Measure every workload at every number of threads."""
    for name in session.settings.workload:
        _measure(session, WORKLOADS[name])


def _measure(session: Session, workload: Workload) -> None:
    batches = session.batches(workload)
    large_pages = session.whole(workload.tables(), batches, session.comm)
    with small_pages():
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
    for threads, measured in session.by_threads(workload.name, contenders, "fbgemm", specs):
        session.add(_record(workload, threads, floor, measured))


def _record(
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
    forward = own.part("forward")
    return {
        "workload": workload.name,
        "threads": threads,
        **compared(own, others),
        **spread(own, "forward", "forward_"),
        **spread(own, "backward", "backward_"),
        **ratio("forward_floor", at_bandwidth(copied, floor.forward), forward),
        **ratio("backward_floor", at_bandwidth(copied, floor.backward), own.part("backward")),
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
