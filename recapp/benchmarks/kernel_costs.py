"""The costs of the engine's own kernels on this machine: time the parts of engine steps, and fit
lines to the times.

The peer of a rank is its own mirror image here: the rank's messages come back as if the peer had
sent them. So a rank does all the work of a step on several ranks, on any machine, without waiting
for another rank. All ranks of the machine do so at once, because they share memory.

In training, a part of the dense work runs between a batch's lookup and its update, and the rest
before the next lookup, so rows and messages have left the caches. Here steps take several batches
in turn for that reason, and write to other memory before each half of a step.

    mark               kernel      counts
    route, counts      route       ids of the batch, for each strip
    place, link        link        ids of the batch, for each strip
    serve              serve       rows that this rank is asked for
    answer             answer      rows read for any rank, and bytes
    combine            combine     vectors read, and bytes
    spread             spread      gradients read, and bytes
    group              group       rows that this rank is asked for
    update             update      distinct rows, and bytes

The fit is by least squares with coefficients that are not negative:

    seconds ~ step * 1 + call * calls + item * items + byte * bytes

A time that falls as the number of bytes grows is chance, so such a coefficient is 0. There are at
most four coefficients, so the fit tries every subset of them. It minimises the error of the ratio:
a time twice as long is as bad as one half as long, and a message of 4 KB matters as much as one of
4 MB.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recapp.benchmarks.session import rule
from recapp.benchmarks.workloads import Workload
from recapp.engine.requests import Requests
from recapp.engine.sharded_collection import ShardedEmbeddingBagCollection, shard_bags
from recapp.engine.sharded_tables import ShardedTables
from recapp.engine.state import EngineObserver
from recapp.planner.hardware import KERNELS, WITHOUT_BYTES, Work
from recapp.planner.plan_rules import plan_by_rules
from recapp.planner.planner_settings import PlanRule
from recapp.planner.problem import Topology
from recapp.reporting.phases import PhaseClock
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.transport.communicator import Comm, Span

LEAST_SECONDS = 1e-9  # below the resolution of any clock
PASSES = 12  # weights depend on the fit and the fit on the weights: it converges in a few passes


def typical(seconds: Sequence[float]) -> float:
    """Return the lower quartile of the seconds of some rounds.

    Other programs on the machine can only make a round slower, so fast rounds are more reliable.
    """
    return float(np.quantile(seconds, 0.25))


def fit(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], float]:
    """Return a coefficient of at least 0 for each count, and the median relative error of the fit.

    Args:
        counts: The counts of each sample, the same number for all samples.
        seconds: The time of each sample.
    """
    measured = np.maximum(np.asarray(seconds, np.float64), LEAST_SECONDS)
    counted = np.asarray(counts, np.float64)
    weight = measured**-2
    for _ in range(PASSES):
        scale = np.sqrt(weight)
        solution = _not_negative(counted * scale[:, None], measured * scale)
        fitted = np.maximum(counted @ solution, LEAST_SECONDS)
        # With these weights, the squared differences have the same gradient as the squared
        # logarithms of the ratio, so the same coefficients minimise both.
        close = np.abs(fitted / measured - 1) < 1e-6
        difference = np.where(close, 1e-6 * measured, fitted - measured)
        weight = np.log1p(difference / measured) / (difference * fitted)
    return solution.tolist(), float(np.median(np.abs(fitted / measured - 1)))


def _not_negative(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solve least squares for every subset of columns, and return the best solution without a
    negative coefficient.
    """
    size = np.maximum(np.abs(matrix).max(0), np.finfo(float).tiny)
    best = np.zeros(matrix.shape[1])
    least = float((target**2).sum())
    for n in range(1, matrix.shape[1] + 1):
        for columns in map(list, combinations(range(matrix.shape[1]), n)):
            solution = (
                np.linalg.lstsq(matrix[:, columns] / size[columns], target, rcond=None)[0]
                / size[columns]
            )
            left = float(((matrix[:, columns] @ solution - target) ** 2).sum())
            if (solution >= 0).all() and left < least * (1 - 1e-9):
                least = left
                best = np.zeros(matrix.shape[1])
                best[columns] = solution
    return best


PARTS = {"route": ("route", "counts"), "link": ("place", "link")} | {
    kernel: (kernel,) for kernel in KERNELS[2:]
}
ROWS = (203931, 71328, 18598, 7012, 1245, 49, 14092, 4)  # tables as different as Criteo's
WIDTHS = (16, 64, 128)
BATCHES = 6  # steps take these in turn
WARM = 1  # first steps of a turn, which are not timed
STEPS = 4  # timed steps of a turn
# Memory written before an update: as much as a dense part writes forward and backward for a
# thousand samples, gradients included.
OTHER_BYTES = 1 << 26
OTHER_PART = 4  # a lookup follows a write of a quarter of it, for loss, optimiser and loader
MOST_GB_PER_S = 1e6  # stands for bytes that add no cost to their items; no memory is as fast


@dataclass(frozen=True)
class Case:
    """Tables of some widths under one mode, and batches of several sizes.

    Args:
        widths: The numbers of columns, which the tables take in turn.
        type: The sharding type of all tables.
        mode: The mode of all tables.
        shapes: The batch size and the ids of a bag, for each size of batch.
        rows: The rows of each table.
    """

    widths: tuple[int, ...]
    type: str
    mode: str
    shapes: tuple[tuple[int, int], ...]
    rows: tuple[int, ...] = ROWS

    def workload(self, batch_size: int, bag: int) -> Workload:
        """Return the tables of this case with batches of one shape.

        Args:
            batch_size: The samples of a batch.
            bag: The ids of a bag.
        """
        widths = tuple(self.widths[i % len(self.widths)] for i in range(len(self.rows)))
        return Workload("calibrate", batch_size, self.rows, widths, (bag,) * len(self.rows))


CASES = (
    *(
        Case((width,), "row_wise", "unique", ((32, 1), (512, 1), (4096, 1), (256, 10)))
        for width in WIDTHS
    ),
    *(Case((width,), "row_wise", "pooled", ((32, 10), (512, 10))) for width in WIDTHS),
    Case((64,), "data_parallel", "unique", ((512, 1), (4096, 1))),
    Case(WIDTHS, "row_wise", "unique", ((32, 1), (512, 1), (2048, 1))),
    Case(WIDTHS[:2], "row_wise", "pooled", ((32, 10),)),
)


@dataclass(frozen=True)
class KernelTime:
    """The work of one kernel in one step, and its time.

    Args:
        widths: The columns of the case's tables.
        calls: The number of groups with work.
        items: The items, as `recapp/planner/hardware.py` counts them.
        bytes: The bytes, as `recapp/planner/hardware.py` counts them.
        seconds: The time of all calls.
    """

    widths: tuple[int, ...]
    calls: float
    items: float
    bytes: float
    seconds: float


class Mirror(Comm):
    """A Comm of two ranks without a peer: it returns a message of this rank as the peer's."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(None, device)
        self.rank = 0
        self.world = 2
        self.transport = "none"

    def swap(
        self, buffer: torch.Tensor, send_W: Sequence[Span], recv_W: Sequence[Span]
    ) -> Callable[[], None]:
        """Copy the message to the peer into the buffer's part for the message from the peer.

        Args:
            buffer: The flat buffer of both messages.
            send_W: Begin and end of the message to each rank.
            recv_W: Begin and end of the message from each rank.

        Returns:
            A function that does nothing, because the messages are there.
        """
        buffer[slice(*recv_W[1])] = buffer[slice(*send_W[1])]
        return lambda: None

    def barrier(self) -> None:
        """Return at once: there is no peer to wait for."""

    def all_gather(self, value: Any) -> list[Any]:
        """Return this rank's value for both ranks."""
        return [value, value]


class KernelSteps:
    """Steps of a collection on batches of one shape, timed kernel by kernel.

    Args:
        collection: A collection that is sharded over a `Mirror`.
        widths: The columns of its tables.
        workload: The shape of the batches.
        seed: The seed of the ids.
    """

    def __init__(
        self,
        collection: ShardedEmbeddingBagCollection,
        widths: tuple[int, ...],
        workload: Workload,
        seed: int,
    ) -> None:
        self.collection = collection
        self.widths = widths
        self.seconds = dict[str, list[float]]()
        self.done = 0
        device = collection.shared.comm.device
        self.batches = [b.to(device) for b in workload.features_of(workload.draw(seed, BATCHES))]
        self.gradient_BK = torch.randn(workload.batch_size, workload.width, device=device)
        self.other = torch.zeros(OTHER_BYTES // 4, device=device)
        counted = [_counts(collection, batch) for batch in self.batches]
        self.counts = {
            k: [sum(c[k][i] for c in counted) / len(counted) for i in range(3)] for k in KERNELS
        }

    def run(self, steps: int) -> None:
        """Run steps and keep the median seconds of each kernel.

        Args:
            steps: The timed steps; one step runs before them untimed.
        """
        clock = PhaseClock()
        wait = synchroniser(self.collection.shared.comm.device)

        def ends(part: str) -> None:
            wait()
            clock(part)

        state = self.collection.shared.state
        observer = state.observer
        state.observer = EngineObserver(ends=ends)
        for i in range(WARM + steps):
            self.other[: len(self.other) // OTHER_PART] += 1
            wait()
            clock.start()
            pooled_BK = self.collection(self.batches[(self.done + i) % BATCHES]).values()
            self.other += 1
            pooled_BK.backward(self.gradient_BK)
            clock.end("rest")
        self.done += WARM + steps
        state.observer = observer
        parts = clock.parts_ms(WARM)
        for kernel, marks in PARTS.items():
            self.seconds.setdefault(kernel, []).append(sum(parts.get(m, 0.0) for m in marks) / 1e3)

    def samples(self) -> dict[str, KernelTime]:
        """Return a sample of each kernel, with its typical seconds over all turns."""
        return {
            k: KernelTime(
                self.widths, self.counts[k][0], self.counts[k][1], self.counts[k][2], typical(times)
            )
            for k, times in self.seconds.items()
        }


def synchroniser(device: torch.device) -> Callable[[], None]:
    """Return a function that waits until the device has finished its work.

    A CPU computes before a call returns, so its function does nothing.
    """
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def _counts(
    c: ShardedEmbeddingBagCollection, features: KeyedJaggedTensor
) -> dict[str, tuple[int, int, int]]:
    """Return calls, items and bytes of every kernel in a step on one batch."""
    shared = c.shared
    q = shared.input_dist(features)
    q.finish()
    parts = [_group_counts(shared, q, g) for g in range(len(shared.stores))]
    q.release()
    return {
        kernel: (
            len([1 for part in parts if part[kernel][0]]),
            sum(part[kernel][0] for part in parts),
            sum(part[kernel][1] for part in parts),
        )
        for kernel in KERNELS
    }


def _group_counts(shared: ShardedTables, q: Requests, g: int) -> dict[str, tuple[int, int]]:
    """Return items and bytes of every kernel for one group of tables."""
    asked = q.asked[g]
    served = q.served[g]
    store = shared.state.stores[g]
    served.group(store)
    number = shared.dtype.itemsize
    width = store.width
    stored = store.nbytes.rows // max(1, store.rows)  # of a row
    touched = len(served.row_U)
    reads = len(asked.combine_links.index_N)
    pairs = asked.bags.pairs
    rows, vectors = (int(q.in_WG3[:, g, i].sum()) for i in (0, 1))
    written = asked.gradient_links.bags * (shared.comm.world if asked.everywhere else 1)
    gradients = len(served.gradient_links.index_N)
    state = store.nbytes.state // max(1, store.rows)  # of a row
    answers = (0, 0) if asked.everywhere else (rows, rows * stored + vectors * width * number)
    return {
        "route": (pairs, 0),
        "link": (pairs, 0),
        "serve": (rows, 0),
        "group": (rows, 0),
        "answer": answers,
        "combine": (reads, (reads + asked.combine_links.bags) * width * number),
        "spread": (reads, (reads + written) * width * number),
        "update": (touched, gradients * width * number + 2 * touched * (stored + state)),
    }


def measure_kernels(
    comm: Comm,
    device: torch.device,
    backend: str,
    *,
    cases: Sequence[Case] = CASES,
    rounds: int = 5,
    steps: int = STEPS,
) -> dict[str, list[KernelTime]]:
    """Return samples of every kernel. Every rank calls this function.

    The seconds of a sample are the median over the steps of a turn, then `typical` over the rounds,
    then the median over the ranks.

    Args:
        comm: The ranks, which only meet at barriers while steps run.
        device: The device of the kernels.
        backend: The backend of local kernels.
        cases: The tables and batches.
        rounds: The number of rounds; each case and shape has one turn in each round.
        steps: The timed steps of a turn.
    """
    turns = [turn for case in cases for turn in _steps(case, device, backend, comm.rank)]
    for _ in range(rounds):
        for turn in turns:
            comm.barrier()
            turn.run(steps)
    of_ranks = comm.all_gather([turn.samples() for turn in turns])
    medians: dict[str, list[KernelTime]] = {k: [] for k in KERNELS}
    for of_turn in zip(*of_ranks, strict=True):
        for k, times in medians.items():
            middle = {
                part: statistics.median(getattr(of_rank[k], part) for of_rank in of_turn)
                for part in ("items", "bytes", "seconds")
            }
            if of_turn[0][k].calls:
                times.append(replace(of_turn[0][k], **middle))
    return medians


def _steps(case: Case, device: torch.device, backend: str, rank: int) -> list[KernelSteps]:
    tables = case.workload(1, 1).tables()
    plan = plan_by_rules(
        tables, Topology(2), [PlanRule(case.type)], name="calibrate", mode=case.mode
    )
    collection = shard_bags(tables, plan, Mirror(device), rule(), backend=backend)
    return [
        KernelSteps(collection, case.widths, case.workload(*shape), rank) for shape in case.shapes
    ]


def fit_kernels(
    samples: Mapping[str, Sequence[KernelTime]],
) -> tuple[dict[str, Work], dict[str, float]]:
    """Return the `Work` of each kernel, and the median relative error of the line fitted to it."""
    works = {}
    errors = {}
    for kernel in KERNELS:
        measured = samples[kernel]
        whole = kernel in WITHOUT_BYTES
        counts = [
            [1, s.calls, s.items] if whole else [1, s.calls, s.items, s.bytes] for s in measured
        ]
        (step, call, item, *byte), errors[kernel] = fit(counts, [s.seconds for s in measured])
        rate = math.inf if whole else min(MOST_GB_PER_S, 1e-9 / max(byte[0], 1e-30))
        works[kernel] = Work(call * 1e6, item * 1e9, rate, step * 1e6)
    return works, errors
