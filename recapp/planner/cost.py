"""Price a plan: counted work times measured costs of hardware. Prices depend on rectangles and
modes, never on the name of a sharding type.

    table, sharding, id statistics -> TableWork: the work of each rank for its own batch, and
                                      of the owner of each piece for all (`pricing.py`)
    all works of a plan            -> seconds per phase and rank, bytes between ranks
    step = sum over phases of the slowest rank's time: ranks meet at every message

Every rank is home to a batch of B samples. So the work at home (route, link, combine, spread) is
the same on all ranks, and only the owners' part depends on the ranks of the pieces. One step has
four messages: header (latency only), ids, vectors and gradients; strips of a row that exchange row
statistics need one more. The terms follow TorchRec's estimator (`planner/estimator`), which omits
latency, input exchange, touched rows of replicas, skew and repeated ids.

Shapes: W ranks, P phases, n ids of a rank's batch, U distinct rows among them, rho the share of
requests for a piece's rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from recapp.planner.problem import PlanningProblem
from recapp.sharding.sharding_plan import Mode

PHASES = ("input", "lookup", "output", "dense", "gradients", "update")
MESSAGES = ("ids", "vectors", "gradients")
PHASE_OF_MESSAGE = {"ids": "input", "vectors": "output", "gradients": "gradients"}
ID_BYTES = 4
STATISTIC_BYTES = 8
VECTOR_PASSES = 3  # training reads twice and writes gradients; serving reads once
HEADER_BYTES = 64  # from each rank to each other rank, with the counts of a batch
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TableWork:
    """The cost of one table under one sharding, with its M rectangles in order.

    Args:
        home: Seconds of each rank's kernels for its own batch, by phase, [P].
        rank_M: The owner of each rectangle; for replicas, every rank.
        seconds_PM: Seconds of the owners' kernels, for all ranks' requests, by phase.
        asked_3M: Bytes that one home exchanges with the owner, by message.
        bytes_M: Bytes of weights and optimiser state.
        everywhere: Bytes that each rank sends to each other rank, by message, [3]; zero except for
            replicas.
        statistics_rows: The row statistics that strips exchange: rows times statistics of a row.
        kinds: The width and mode of each strip, with the number of the table's rule; strips of all
            tables with an equal kind share kernel calls.
    """

    home: Floats
    rank_M: npt.NDArray[np.int64]
    seconds_PM: Floats
    asked_3M: Floats
    bytes_M: Floats
    everywhere: Floats
    statistics_rows: float
    kinds: frozenset[tuple[int, Mode, int]]

    @property
    def mode(self) -> Mode:
        """Return the mode of the table, which all its strips share."""
        return next(iter(self.kinds))[1]


@dataclass(frozen=True)
class PlanCost:
    """The price of a plan.

    Args:
        seconds_PW: Seconds of each phase on each rank, messages included.
        asked_3W: Bytes that one home exchanges with each owner in a step, by message.
        each: Further bytes that every rank sends to each other rank, by message, independent of
            requests.
        bytes_W: Bytes of weights and optimiser state on each rank.
    """

    seconds_PW: Floats
    asked_3W: Floats
    each: float
    bytes_W: Floats

    @property
    def step_seconds(self) -> float:
        """Return the seconds of a step: ranks meet in each phase, so the slowest rank sets its
        time.
        """
        return float(self.seconds_PW.max(1).sum())

    @cached_property
    def bytes_WW(self) -> Floats:
        """Return the bytes from rank to rank in a step, [W, W]: ids and gradients go to owners,
        vectors come back; no rank sends to itself.
        """
        ids, vectors, gradients = self.asked_3W
        bytes_WW: Floats = (ids + gradients)[None] + vectors[:, None] + self.each
        np.fill_diagonal(bytes_WW, 0.0)
        return bytes_WW

    @property
    def sent_bytes(self) -> float:
        """Return the bytes that all ranks together send in a step."""
        W = self.asked_3W.shape[1]
        return float((W - 1) * (self.asked_3W.sum() + W * self.each))


def cost_of(works: Sequence[TableWork], problem: PlanningProblem) -> PlanCost:
    """Price all tables of a plan together."""
    W = problem.topology.world_size
    phase = {p: i for i, p in enumerate(PHASES)}
    seconds = np.zeros((len(PHASES), W))
    bytes_W = np.zeros(W)
    asked_3W = np.zeros((3, W))
    everywhere = sum((w.everywhere for w in works), np.zeros(3))
    if works:
        rank_M = np.concatenate([w.rank_M for w in works])
        seconds = sum((w.home for w in works), np.zeros(len(PHASES)))[:, None] + by_rank(
            rank_M, [w.seconds_PM for w in works], W
        )
        bytes_W = by_rank(rank_M, [w.bytes_M[None] for w in works], W)[0]
        asked_3W = by_rank(rank_M, [w.asked_3M for w in works], W)
    kinds = len(set().union(*(w.kinds for w in works))) if works else 0
    for at, duration in _calls(problem, kinds):
        seconds[phase[at]] += duration
    statistics_bytes = STATISTIC_BYTES * sum(w.statistics_rows for w in works) / W
    if W > 1:
        nothing = np.zeros(W)
        seconds[phase["input"]] += message_seconds(nothing, HEADER_BYTES, problem)
        for m, message in enumerate(MESSAGES):
            if message != "gradients" or problem.rule is not None:
                seconds[phase[PHASE_OF_MESSAGE[message]]] += message_seconds(
                    asked_3W[m], float(everywhere[m]), problem
                )
        if statistics_bytes:
            seconds[phase["update"]] += message_seconds(nothing, statistics_bytes, problem)
    seconds[phase["dense"]] += _dense_seconds(problem)
    beside = float(everywhere.sum()) + HEADER_BYTES + statistics_bytes
    return PlanCost(seconds, asked_3W, beside if W > 1 else 0.0, bytes_W)


_CALLS = {
    "route": "input",
    "link": "input",
    "serve": "input",
    "answer": "lookup",
    "combine": "lookup",
    "spread": "gradients",
    "group": "gradients",
    "update": "update",
}


def _calls(problem: PlanningProblem, kinds: int) -> list[tuple[str, float]]:
    """Return the phase and the seconds of each kernel's empty calls, for a number of kinds. A
    step that is recorded as a whole is one call of all kernels.
    """
    if problem.recorded == "step":
        return [("input", (problem.hardware.graph_us or 0.0) * 1e-6)]
    kernels = problem.hardware.kernels
    alone = problem.topology.world_size == 1
    return [
        (at, float(kernels[name].seconds(kinds, 0, 0)))
        for name, at in _CALLS.items()
        if not alone or name in ("route", "link", "combine", "update")
    ]


@dataclass(frozen=True)
class Fixed:
    """The costs that search and bound add to the work of the tables.

    Args:
        seconds: Seconds of every plan: dense part, header, fixed costs of the kernels.
        latency_23: Seconds of each empty message, within a host and between hosts, [2, 3].
        kind_seconds: Seconds of kernel calls that each kind adds.
        statistics_seconds: Seconds of the message of row statistics, if a table needs it.
        statistics_row_seconds: Seconds of each row in that message; a lower bound.
    """

    seconds: float
    latency_23: Floats
    kind_seconds: float
    statistics_seconds: float
    statistics_row_seconds: float


def fixed_of(problem: PlanningProblem) -> Fixed:
    """Return the costs that all plans for a problem share."""
    one, two = (sum(duration for _, duration in _calls(problem, kinds)) for kinds in (1, 2))
    topology = problem.topology
    links = problem.hardware.all_to_all
    messages = len(MESSAGES)
    W = topology.world_size
    L = topology.ranks_per_host
    H = topology.hosts
    near, far = (
        float(links[p].seconds(n, 0)) if n > 1 else 0.0 for p, n in (("host", L), ("network", H))
    )
    latency = np.repeat([[near], [far]], messages, 1)
    if problem.rule is None:
        latency[:, MESSAGES.index("gradients")] = 0.0
    header = message_seconds(np.zeros(W), HEADER_BYTES, problem) if W > 1 else 0.0
    # the slope of the link with the larger latency
    slope = problem.seconds_per_byte[int(H > 1 and far >= near)]
    return Fixed(
        _dense_seconds(problem) + header + (2 * one - two),
        latency,
        two - one,
        max(near, far),
        STATISTIC_BYTES / W * slope,
    )


def by_rank(rank_M: npt.NDArray[np.int64], values_KM: Sequence[Floats], world: int) -> Floats:
    """Sum the values of rectangles by rank, [K, W]; a rank may own several rectangles."""
    return np.stack([np.bincount(rank_M, of_M, world) for of_M in np.concatenate(values_KM, 1)])


def message_seconds(asked_W: Floats, each: float, problem: PlanningProblem) -> float:
    """Return the seconds of one all-to-all: the bytes of the busiest rank within its host and
    between hosts, which travel at the same time.

    Args:
        asked_W: Bytes that every rank exchanges with each owner, in one direction.
        each: Further bytes that every rank sends to each other rank.
        problem: The ranks and their links.
    """
    topology = problem.topology
    links = problem.hardware.all_to_all
    W = topology.world_size
    L = topology.ranks_per_host
    H = topology.hosts
    of_host_W = np.repeat(asked_W.reshape(H, L).sum(1), L)
    most = asked_W.max()
    near = max((of_host_W - asked_W).max(), most * (L - 1)) + each * (L - 1)
    far = max((asked_W.sum() - of_host_W).max(), most * (W - L)) + each * (W - L)
    return max(
        float(links["host"].seconds(L, near)) if L > 1 else 0.0,
        float(links["network"].seconds(H, far)) if H > 1 else 0.0,
    )


def _dense_seconds(problem: PlanningProblem) -> float:
    """Return the seconds of the dense part: its products and the vectors that it reads; in training
    also its calls, the overhead of Python, and the part of the all-reduce of its gradients that
    does not overlap with the backward of the tables.
    """
    topology = problem.topology
    hardware = problem.hardware
    dense = problem.dense
    share = 1 if problem.rule is not None else 1 / 3  # forward is a third of training
    products = dense.flops / hardware.flops_per_s
    vector_seconds = (
        VECTOR_PASSES * dense.vector_bytes / (hardware.kernels["combine"].gb_per_s * 1e9)
    )
    duration = share * (products + vector_seconds) * problem.batch_per_rank
    if problem.rule is not None:
        duration += (hardware.step_overhead_us + problem.dense_us) * 1e-6
    if topology.world_size > 1 and problem.rule is not None and dense.bytes:
        link, ranks = (
            ("network", topology.hosts) if topology.hosts > 1 else ("host", topology.world_size)
        )
        duration += hardware.all_reduce[link].seconds(ranks, dense.bytes) * (1.0 - hardware.overlap)
    return duration
