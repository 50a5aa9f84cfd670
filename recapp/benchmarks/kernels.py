"""`kernels`: local lookup and fused update in one process, against FBGEMM, plain torch and the
bytes that must move.

The floor is what memory allows: the bytes that have to cross it, over the bandwidth of a plain copy
measured in the same rounds.

    forward     output twice (a write fetches the cache line first) + each distinct row once + ids
    backward    gradient of the output once + each distinct row twice
                + its optimiser state, a cache line, twice + ids

Rows are read at random, which no processor does at the speed of a copy. So there is a second floor
of the forward (`gather_ratio`): torch's own `embedding_bag` over the same rows in the same order,
all tables in one call, with no check of ids, no grouping and no gradient.

recapp runs what training runs on one rank: id checks, grouping, lookup, and backward with the
update inside. Grouping counts as forward there; FBGEMM sorts in backward. Plain torch is an
`nn.EmbeddingBag` per table with sparse gradients and `torch.optim.Adagrad`. recapp and the gather
run a second time on rows that lie in pages of 4 KB (`small_pages_ratio`: how many times as long).

B samples of a batch, K columns of the pooled output, N ids, M bags.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recapp.benchmarks.rivals import rivals
from recapp.benchmarks.session import Session
from recapp.benchmarks.setup import make_collection, make_plan
from recapp.benchmarks.timing import Contender, Measured, Times, ratio, spread, time_steps
from recapp.benchmarks.workloads import WORKLOADS, Workload
from recapp.engine.row_store import FloatStore
from recapp.engine.sharded_embedding_bag import ShardedEmbeddingBagCollection
from recapp.kernels.row_memory import small_pages
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor

CACHE_LINE = 64
COPIED_BYTES = 1 << 27  # several times the largest caches
WHOLE = {"rules": [{"type": "table_wise"}]}


@dataclass(frozen=True)
class Floor:
    """The bytes that a step must move, and the floating-point operations that it does on them."""

    forward: int
    backward: int
    forward_flops: int
    backward_flops: int


def floor_of(workload: Workload, features: KeyedJaggedTensor) -> Floor:
    """Return what a batch of a workload costs at least.

    Args:
        workload: The tables; all have the columns of the first.
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


class Lookup:
    """recapp as a contender: forward, and backward with its fused update.

    Args:
        collection: The tables, on one rank.
        batches: The batches, which steps take in turn.
        width: The columns of the pooled output.
        threads: The threads of torch and of the kernels.
    """

    def __init__(
        self,
        collection: ShardedEmbeddingBagCollection,
        batches: list[KeyedJaggedTensor],
        width: int,
        threads: int,
    ) -> None:
        self.collection = collection
        self.batches = batches
        self.threads = threads
        self.number = 0
        self.gradient_BK = torch.randn(batches[0].stride(), width)
        self.pooled_BK = torch.empty(0)

    def run(self, steps: int) -> Times:
        """Time so many steps, with forward and backward as parts of their own."""
        torch.set_num_threads(self.threads)
        return time_steps([("forward", self._forward), ("backward", self._backward)], steps)

    def _forward(self) -> None:
        self.pooled_BK = self.collection(self.batches[self.number % len(self.batches)]).values()
        self.number += 1

    def _backward(self) -> None:
        torch.autograd.backward(self.pooled_BK, self.gradient_BK)
        self.pooled_BK = torch.empty(0)


class PlainTorch:
    """Plain torch as a contender: an `nn.EmbeddingBag` per table, sparse gradients, and
    `torch.optim.Adagrad`, which has a state per weight, because torch has no row-wise Adagrad.

    Args:
        workload: The tables and the shape of a batch.
        batches: The batches, which steps take in turn.
        threads: The threads of torch.
    """

    def __init__(self, workload: Workload, batches: list[KeyedJaggedTensor], threads: int) -> None:
        self.bags = nn.ModuleList(
            [
                nn.EmbeddingBag(rows, dim, mode="sum", sparse=True, include_last_offset=True)
                for rows, dim in zip(workload.rows_F, workload.dim_F, strict=True)
            ]
        )
        self.optimizer = torch.optim.Adagrad(self.bags.parameters(), lr=0.01)
        self.offsets = [
            torch.arange(0, workload.batch_size * bag + 1, bag) for bag in workload.bag_F
        ]
        self.batches = batches
        self.threads = threads
        self.number = 0
        self.gradient_BK = torch.randn(workload.batch_size, workload.width)
        self.pooled_BK = torch.empty(0)

    def run(self, steps: int) -> Times:
        """Time so many steps, with forward and backward as parts of their own."""
        torch.set_num_threads(self.threads)
        return time_steps([("forward", self._forward), ("backward", self._backward)], steps)

    def _forward(self) -> None:
        batch = self.batches[self.number % len(self.batches)]
        ids = torch.split(batch.values(), batch.length_per_key())
        self.number += 1
        pooled: list[Tensor] = [
            bag(i, o) for bag, i, o in zip(self.bags, ids, self.offsets, strict=True)
        ]
        self.pooled_BK = torch.cat(pooled, 1)

    def _backward(self) -> None:
        torch.autograd.backward(self.pooled_BK, self.gradient_BK)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Gather:
    """Reading rows at random as a contender: torch's `embedding_bag` over the rows of all ids.

    Args:
        collection: The tables, on one rank.
        batches: The batches, which steps take in turn.
        threads: The threads of torch.
    """

    def __init__(
        self,
        collection: ShardedEmbeddingBagCollection,
        batches: list[KeyedJaggedTensor],
        threads: int,
    ) -> None:
        store = collection.shared.store(0)
        assert isinstance(store, FloatStore)
        self.weights = store.weights
        self.bags = [_rows_and_bags(collection, batch) for batch in batches]
        self.threads = threads
        self.number = 0

    def run(self, steps: int) -> Times:
        """Time so many passes over a batch's rows."""
        torch.set_num_threads(self.threads)
        with torch.no_grad():
            return time_steps([("step", self._step)], steps)

    def _step(self) -> None:
        row_N, start_M = self.bags[self.number % len(self.bags)]
        nn.functional.embedding_bag(row_N, self.weights, start_M, mode="sum")
        self.number += 1


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


class Copy:
    """A plain copy of memory as a contender; each byte is read and written.

    Args:
        threads: The threads of torch.
    """

    def __init__(self, threads: int) -> None:
        self.source = torch.zeros(COPIED_BYTES // 4)
        self.target = torch.zeros(COPIED_BYTES // 4)
        self.threads = threads

    def run(self, steps: int) -> Times:
        """Time so many copies."""
        torch.set_num_threads(self.threads)
        return time_steps([("step", lambda: self.target.copy_(self.source))], steps)


def at_bandwidth(copy: Measured, moved: int) -> Measured:
    """Return how long so many bytes take at the speed of a measured copy, round by round.

    Args:
        copy: The times of `Copy`.
        moved: The bytes that are read or written.
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
    for name in session.settings["workload"]:
        _measure(session, WORKLOADS[name])


def _measure(session: Session, workload: Workload) -> None:
    settings = session.settings
    comm = session.comm
    tables = workload.tables()
    batches = session.batches(workload)
    plan = make_plan("table_wise", WHOLE, tables, comm, batches)
    collection = make_collection(tables, plan, comm, settings["backend"])
    with small_pages():
        on_small_pages = make_collection(tables, plan, comm, settings["backend"])
    floor = floor_of(workload, batches[0])
    most = max(settings["threads"])
    with rivals(
        "fbgemm",
        settings["torchrec_python"],
        session.specs("kernels", workload),
        session.folder,
        comm,
        most,
    ) as others:
        for threads in settings["threads"]:
            contenders: dict[str, Contender] = {
                "recapp": Lookup(collection, batches, workload.width, threads),
                "small pages": Lookup(on_small_pages, batches, workload.width, threads),
                "gather": Gather(collection, batches, threads),
                "gather, small pages": Gather(on_small_pages, batches, threads),
                **others,
                "torch": PlainTorch(workload, batches, threads),
                "copy": Copy(threads),
            }
            for other in others.values():
                other.threads = threads
            measured = session.measure(
                f"{workload.name}, {threads} thread{'s' if threads > 1 else ''}", contenders
            )
            session.add(_record(workload, threads, floor, measured))


def _record(
    workload: Workload, threads: int, floor: Floor, measured: dict[str, Measured]
) -> dict[str, Any]:
    own = measured["recapp"]
    copy = measured["copy"]
    forward, backward = (Measured({"step": own.rounds[part]}) for part in ("forward", "backward"))
    small = measured["small pages"]
    gather = measured["gather"]
    return {
        "workload": workload.name,
        "threads": threads,
        **spread(own),
        **spread(own, "forward", "forward_"),
        **spread(own, "backward", "backward_"),
        **ratio("fbgemm", measured.get("fbgemm"), own),
        **ratio("fbgemm_tuned", measured.get("fbgemm_tuned"), own),
        **ratio("torch", measured["torch"], own),
        **ratio("floor", at_bandwidth(copy, floor.forward + floor.backward), own),
        **ratio("forward_floor", at_bandwidth(copy, floor.forward), forward),
        **ratio("backward_floor", at_bandwidth(copy, floor.backward), backward),
        **spread(gather, prefix="gather_"),
        **ratio("gather", gather, forward),
        **ratio("small_pages", small, own),
        **ratio("forward_small_pages", small, own, "forward"),
        **ratio("backward_small_pages", small, own, "backward"),
        **ratio("gather_small_pages", measured["gather, small pages"], gather),
        "forward_bytes": floor.forward,
        "backward_bytes": floor.backward,
        "forward_flops": floor.forward_flops,
        "backward_flops": floor.backward_flops,
        "copy_gb_per_s": 2 * COPIED_BYTES / copy.median() / 1e6,
        "rounds": len(own.rounds["step"]),
    }
