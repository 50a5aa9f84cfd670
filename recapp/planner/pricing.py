"""Count the work of each cut of a table, and price it; all cuts of all tables at once. Predict the
bytes that the exchange keeps, and that tables leave free.

    cuts (table, mode, rectangles)
        -> Prices: arrays over all rectangles of all cuts, one after the other
        -> TableWork of each cut

A thousand tables have six thousand cuts with half a million rectangles. The price of a rectangle is
a dozen products. So arrays over all rectangles hold the prices; a loop over cuts would spend its
time in numpy's calls.

Shapes: J cuts with S strips and M rectangles; W ranks; n ids of a rank's batch, U distinct rows
among them.

The exchange keeps from batch to batch, beside the tables:

    messages     one of vectors (for answers and gradients), one of ids for each batch in
                 flight
    integers     for each batch in flight: offsets of ids, bags and rows (kernels' scratch)
    offsets      of each bag in the output, for each batch size

Batches in flight are the training batch, the batches of the look-ahead, and a validation batch,
which may be the largest. Every buffer keeps the size of the largest batch so far.

The reserve is the memory of a rank that tables leave free. On a CPU it is fixed, because batches
are small beside the memory. On a GPU a step allocates its memory after the tables, so the reserve
must cover a step, with its messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from recapp.optim.named_rules import rule_of
from recapp.optim.rules import FROZEN
from recapp.planner.cost import (
    ID_BYTES,
    MESSAGES,
    PHASES,
    Floats,
    PlanCost,
    TableWork,
    by_rank,
    cost_of,
)
from recapp.planner.problem import NUMBER_BYTES, RESERVE_BYTES, PlanningProblem
from recapp.planner.rank_memory import average_bytes, row_bytes, state_bytes
from recapp.sharding.sharding_plan import Mode, Shard, ShardingPlan, TableSharding, tile
from recapp.sharding.sharding_types import CandidateRanks, Ints
from recapp.tables.collections import compute_dtype
from recapp.tables.config import EmbeddingConfig
from recapp.tables.positions import STRETCHES, RowOrderName

# share of the time to route an id that computes the position of its row (measured)
MIXING = 0.25


class Cut(NamedTuple):
    """The rectangles of a table, strip after strip, and its mode.

    Args:
        table: The table that is cut.
        mode: The mode of the table.
        rank_M: The owner of each rectangle; for replicas, every rank.
        rows_M2: The first row of each rectangle, and the row after its last.
        strips: The number of columns and the number of rectangles of each strip.
        row_order: The order of the table's rows.
    """

    table: EmbeddingConfig
    mode: Mode
    rank_M: Ints
    rows_M2: Ints
    strips: tuple[tuple[int, int], ...]
    row_order: RowOrderName = "natural"


def cut_of(
    table: EmbeddingConfig, cells: Sequence[Shard], mode: Mode, row_order: RowOrderName
) -> Cut:
    """Return the cut of a table into cells.

    Args:
        table: The table that is cut.
        cells: Rectangles that tile the table, ordered by column.
        mode: The mode of the table.
        row_order: The order of the table's rows.
    """
    strips: dict[int, tuple[int, int]] = {}
    for s in cells:
        strips[s.cols.start] = (len(s.cols), strips.get(s.cols.start, (0, 0))[1] + 1)
    return Cut(
        table,
        mode,
        np.array([s.rank for s in cells], np.int64),
        np.array([(s.rows.start, s.rows.stop) for s in cells], np.int64),
        tuple(strips.values()),
        row_order,
    )


def _in_rows(cut: Cut, rows: int) -> Ints:
    """Return the rows of a cut's rectangles, [M, 2]. For a dynamic table, convert its stretches to
    a share of the given number of rows.
    """
    if cut.table.dynamic is None:
        return cut.rows_M2
    rows_M2: Ints = cut.rows_M2 * rows // STRETCHES
    return rows_M2


@dataclass(frozen=True)
class Prices:
    """The costs of cuts: the `TableWork` of all cuts, as arrays.

    Args:
        cuts: The cuts in order.
        first_J: The index of each cut's first rectangle.
        home_JP: `TableWork.home` of each cut.
        seconds_PM: `TableWork.seconds_PM` of the rectangles of all cuts.
        asked_3M: `TableWork.asked_3M` of the rectangles of all cuts.
        bytes_M: `TableWork.bytes_M` of the rectangles of all cuts.
        everywhere_J3: `TableWork.everywhere` of each cut.
        statistics_rows_J: `TableWork.statistics_rows` of each cut.
        rule_J: The number of each cut's rule.
    """

    cuts: Sequence[Cut]
    first_J: Ints
    home_JP: Floats
    seconds_PM: Floats
    asked_3M: Floats
    bytes_M: Floats
    everywhere_J3: Floats
    statistics_rows_J: Floats
    rule_J: Sequence[int]

    def work(self, j: int) -> TableWork:
        """Return the work of one cut."""
        cut = self.cuts[j]
        first = int(self.first_J[j])
        here = slice(first, first + len(cut.rank_M))
        return TableWork(
            self.home_JP[j],
            cut.rank_M,
            self.seconds_PM[:, here],
            self.asked_3M[:, here],
            self.bytes_M[here],
            self.everywhere_J3[j],
            float(self.statistics_rows_J[j]),
            frozenset((width, cut.mode, self.rule_J[j]) for width, _ in cut.strips),
        )


class _CutCounts:
    """The expected counts of a batch, by cut (J), by strip (S) and by rectangle (M)."""

    def __init__(self, cuts: Sequence[Cut], problem: PlanningProblem) -> None:
        self.problem = problem
        batch = problem.batch_per_rank
        world = problem.topology.world_size
        counts: dict[str, tuple[float, ...]] = {}
        for table in {c.table.name: c.table for c in cuts}.values():
            known = problem.statistics_of(table)
            n = batch * known.ids_per_sample
            counts[table.name] = (
                n,
                max(batch * known.bags_per_sample, 1e-9),
                known.distinct_rows(n),
                known.distinct_rows(world * n),
                batch * problem.vectors_per_sample(table),
                table.embedding_dim,
            )
        of_J = np.array([counts[c.table.name] for c in cuts], float).T
        self.n_J, self.bags_J, self.U_J, self.U_of_all_J, self.samples_J, self.dim_J = of_J
        self.pooled_J, self.replicated_J = (
            np.array([c.mode == mode for c in cuts]) for mode in ("pooled", "replicated")
        )
        self.mixed_J = np.array([c.row_order == "mixed" for c in cuts])
        self.strips_J = np.array([len(c.strips) for c in cuts])
        self.cut_S = np.repeat(np.arange(len(cuts)), self.strips_J)
        width_S, count_S = np.array([strip for c in cuts for strip in c.strips]).T
        self.width_S = width_S.astype(float)
        self.first_S = np.cumsum(count_S) - count_S
        cut_M = np.repeat(self.cut_S, count_S)
        rows_M2 = np.concatenate([_in_rows(c, c.table.num_embeddings) for c in cuts])
        self.cut_M = cut_M
        self.rows_M = (rows_M2[:, 1] - rows_M2[:, 0]).astype(float)
        self.width_M = np.repeat(self.width_S, count_S)
        self.share_M = np.concatenate(
            [
                known.shares(_in_rows(c, known.rows), c.row_order)
                for c, known in ((c, problem.statistics_of(c.table)) for c in cuts)
            ]
        )
        self.touched_M = np.minimum(self.U_of_all_J[cut_M] * self.share_M, self.rows_M)
        self.pairs_M = self.bags_J[cut_M] * (
            1.0 - (1.0 - np.minimum(self.share_M, 1.0)) ** (self.n_J / self.bags_J)[cut_M]
        )
        rules = [rule_of(problem.rule, c.table.name) for c in cuts]
        self.means_J = np.array([rule.means if rule else 0 for rule in rules])
        self.trained_J = np.array([rule is not None and rule != FROZEN for rule in rules])
        itemsize = compute_dtype(problem.tables).itemsize
        bytes_S4 = np.array(
            [
                (
                    row_bytes(c.table.data_type, width),
                    c.table.bytes_to_find_a_row,
                    state_bytes(rule, width, itemsize),
                    problem.averaged * average_bytes(c.table, width, itemsize),
                )
                for c, rule in zip(cuts, rules, strict=True)
                for width, _ in c.strips
            ]
        )
        bytes_M4 = np.repeat(bytes_S4, count_S, 0)
        self.bytes_M = self.rows_M * bytes_M4.sum(1)
        self.state_bytes_M = bytes_M4[:, 2]
        self.itemsize = itemsize

    def by_cut(self, values_S: Floats) -> Floats:
        """Return the sums over each cut's strips, [J]."""
        sums_J: Floats = np.add.reduceat(values_S, np.cumsum(self.strips_J) - self.strips_J)
        return sums_J


def price_all(cuts: Sequence[Cut], problem: PlanningProblem) -> Prices:
    """Return the prices of all cuts."""
    c = _CutCounts(cuts, problem)
    world = problem.topology.world_size
    seconds_PM, asked_3M = _owners(c)
    everywhere_J3 = np.stack(
        [
            ID_BYTES * c.U_J,
            np.zeros(len(cuts)),
            c.trained_J * c.U_J * c.dim_J * problem.payload_bytes,
        ],
        1,
    )
    return Prices(
        cuts,
        np.cumsum([0, *(len(j.rank_M) for j in cuts[:-1])]),
        _home(c),
        seconds_PM,
        asked_3M,
        c.bytes_M,
        everywhere_J3 * (c.replicated_J & (world > 1))[:, None],
        c.U_of_all_J * (c.strips_J > 1) * c.means_J,
        [problem.rule_numbers.get(cut.table.name, 0) for cut in cuts],
    )


def _home(c: _CutCounts) -> Floats:
    """Return the seconds of the kernels at home, summed over each cut's strips, [J, P]. The kernels
    read a vector for each id; in mode `pooled`, a vector for each bag and owner.
    """
    kernels = c.problem.hardware.kernels
    number_S = NUMBER_BYTES * c.width_S
    n_S = c.n_J[c.cut_S]
    U_S = c.U_J[c.cut_S]
    pooled_S = c.pooled_J[c.cut_S]
    pairs_S = np.add.reduceat(c.pairs_M, c.first_S)
    vectors_S = np.where(pooled_S, pairs_S, n_S)
    phase_seconds = dict.fromkeys(PHASES, np.zeros(len(n_S)))
    phase_seconds["input"] = kernels["route"].seconds(0, n_S) + kernels["link"].seconds(0, n_S)
    phase_seconds["lookup"] = kernels["combine"].seconds(
        0, vectors_S, (vectors_S + c.samples_J[c.cut_S]) * number_S
    )
    if c.problem.rule is not None and c.problem.topology.world_size > 1:
        spread_S = kernels["spread"].seconds(
            0, vectors_S, (vectors_S + np.where(pooled_S, pairs_S, U_S)) * number_S
        )
        phase_seconds["gradients"] = spread_S * c.trained_J[c.cut_S]
    by_phase = {p: c.by_cut(phase_seconds[p]) for p in PHASES}
    mixing_J = MIXING * kernels["route"].seconds(0, c.n_J * c.mixed_J)
    by_phase["input"] = by_phase["input"] + mixing_J
    return np.stack([by_phase[p] for p in PHASES], 1)


def _owners(c: _CutCounts) -> tuple[Floats, Floats]:
    """Return the seconds of the owners' kernels, [P, M], and the bytes that one home exchanges with
    the owners, [3, M]. An owner serves all ranks, including itself; a single rank exchanges
    nothing.
    """
    problem = c.problem
    kernels = c.problem.hardware.kernels
    world = c.problem.topology.world_size
    pooled_M = c.pooled_J[c.cut_M]
    replicated_M = c.replicated_J[c.cut_M]
    number_M = NUMBER_BYTES * c.width_M
    rows_M = np.where(pooled_M, c.n_J[c.cut_M], c.U_J[c.cut_M]) * c.share_M  # requests of one home
    vectors_M = np.where(pooled_M, c.pairs_M, rows_M)
    phase_seconds = dict.fromkeys(PHASES, np.zeros(len(number_M)))
    if world > 1:
        phase_seconds["input"] = kernels["serve"].seconds(0, world * rows_M)
        phase_seconds["lookup"] = (
            kernels["answer"].seconds(0, world * rows_M, world * (rows_M + vectors_M) * number_M)
            * ~replicated_M
        )
    if problem.rule is not None:
        trained_M = c.trained_J[c.cut_M]
        gradient_rows_M = trained_M * (world * rows_M if world > 1 else c.n_J[c.cut_M])
        touched_M = trained_M * c.touched_M
        if world > 1:
            phase_seconds["gradients"] = kernels["group"].seconds(0, gradient_rows_M)
        moved_M = gradient_rows_M * number_M + 2 * touched_M * (number_M + c.state_bytes_M)
        if problem.average_every is not None:  # each update of the average reads and writes it all
            passes_M = c.rows_M * (number_M + 2 * c.itemsize * c.width_M)
            moved_M = moved_M + passes_M / problem.average_every
        phase_seconds["update"] = kernels["update"].seconds(0, touched_M, moved_M)
    asked_3M = np.zeros((len(MESSAGES), len(number_M)))
    if world > 1:
        message_M = vectors_M * c.width_M * problem.payload_bytes * ~replicated_M
        asked_3M[0] = (
            rows_M * ID_BYTES + np.where(pooled_M, vectors_M * ID_BYTES, 0.0)
        ) * ~replicated_M
        asked_3M[1] = message_M
        asked_3M[2] = message_M * c.trained_J[c.cut_M]
    return np.stack([phase_seconds[p] for p in PHASES]), asked_3M


def work_of(table: EmbeddingConfig, sharding: TableSharding, problem: PlanningProblem) -> TableWork:
    """Count and price the work of a table; `auto` takes `unique` or `pooled`, whichever exchanges
    fewer bytes.
    """
    cells = sharding.cells(table, problem.topology.world_size)
    modes: tuple[Mode, ...] = (sharding.mode,)
    if sharding.mode == "auto":
        modes = ("unique",) if table.name in problem.unsummed else ("unique", "pooled")
    order = sharding.row_order
    prices = price_all([cut_of(table, cells, mode, order) for mode in modes], problem)
    return min(
        (prices.work(j) for j in range(len(modes))), key=lambda work: float(work.asked_3M.sum())
    )


def plan_cost(plan: ShardingPlan, problem: PlanningProblem) -> PlanCost:
    """Return the price of a given plan for the problem's tables."""
    return cost_of([work_of(t, plan.tables[t.name], problem) for t in problem.tables], problem)


# ---- the memory beside the tables

BUFFER_SLACK = 1.2  # buffers grow by more than the request, to grow less often
HOME_INTEGERS = {"unique": 9, "replicated": 9, "pooled": 3}  # for each id at its home, by mode
ANSWER_INTEGERS = 2  # for each row that a rank requests from its owner
UPDATE_INTEGERS = 5  # in addition, for the update of such a row
ID_TYPE_BYTES = 8  # ids of a batch are int64
DENSE_COPIES = 5  # weights, gradients, all-reduce buckets, two states of the optimiser
# The CUDA context, kernels and libraries' work spaces (about .5 GB), NCCL's channels (.5 to 1 GB at
# 8 ranks) and the allocator's fragmentation. Assumed, not measured.
RUNTIME_BYTES = 1_500_000_000


def buffer_bytes(plan: ShardingPlan, problem: PlanningProblem) -> Floats:
    """Predict the bytes that each rank keeps for its exchange, [W]; 0 for a single rank.

    Args:
        plan: Any plan of the problem's tables.
        problem: Tables, batch sizes of training and validation, look-ahead and id statistics.
    """
    world = problem.topology.world_size
    if world == 1 or not problem.tables:
        return np.zeros(world)
    vectors, in_flight, offsets = _of_batch(
        plan, problem, problem.batch_per_rank, updates=problem.rule is not None
    )
    in_flight = (1 + problem.look_ahead) * in_flight
    if problem.val_batch_per_rank:
        val = _of_batch(plan, problem, problem.val_batch_per_rank, updates=False)
        vectors = np.maximum(vectors, val[0])
        in_flight = in_flight + val[1]
        offsets += val[2] if problem.val_batch_per_rank != problem.batch_per_rank else 0.0
    bytes_W: Floats = BUFFER_SLACK * (vectors + in_flight) + offsets
    return bytes_W


def _of_batch(
    plan: ShardingPlan, problem: PlanningProblem, batch: int, *, updates: bool
) -> tuple[Floats, Floats, float]:
    """Return the bytes of one batch on each rank, [W]: of the message of vectors, which also
    carries gradients; of the message of ids and the kernels' integers, for each batch in flight;
    and of the bags' offsets in the output, equal on all ranks.
    """
    world = problem.topology.world_size
    tables = problem.tables
    problem = replace(problem, batch_per_rank=batch)
    works = [work_of(t, plan.tables[t.name], problem) for t in tables]
    asked_3W = by_rank(
        np.concatenate([w.rank_M for w in works]), [w.asked_3M for w in works], world
    )
    everywhere = np.sum([w.everywhere for w in works], 0)
    strips_T = [len({s.cols.start for s in plan.tables[t.name].cells(t, world)}) for t in tables]
    at_home = sum(
        HOME_INTEGERS[w.mode] * n * problem.statistics_of(t).ids_per_sample
        for t, n, w in zip(tables, strips_T, works, strict=True)
    )
    bags = sum(n * problem.vectors_per_sample(t) for t, n in zip(tables, strips_T, strict=True))
    served_W = (asked_3W[0] + everywhere[0]) * (world / ID_BYTES)
    of_row = ANSWER_INTEGERS + (UPDATE_INTEGERS if updates else 0)
    integers = NUMBER_BYTES * (batch * at_home + of_row * served_W)
    vectors = _message(asked_3W[1:].max(0), float(everywhere[1:].max()))
    offsets = float(NUMBER_BYTES * batch * bags)
    return vectors, _message(asked_3W[0], float(everywhere[0])) + integers, offsets


def _message(asked_W: Floats, each: float) -> Floats:
    """Return the bytes of a buffer for both directions, [W]: the requests of the others to a rank,
    and its own requests to all.
    """
    world = len(asked_W)
    bytes_W: Floats = asked_W * (world - 1) + asked_W.sum() + each * (2 * world - 1)
    return bytes_W


def reserve_of(problem: PlanningProblem) -> dict[str, int]:
    """Return the bytes that tables leave free on each rank, by purpose.

    No plan is known yet, so messages are those of all tables cut evenly by rows: the average over
    the ranks of any plan.

    Args:
        problem: Tables, ranks, batches, ids and the dense part of the model.

    Returns:
        On a GPU `messages`, `outputs` (vectors and their gradients), `batches`, `activations`,
        `dense part` and `runtime`; on a CPU `fixed`.
    """
    if problem.topology.compute_device != "cuda":
        return {"fixed": RESERVE_BYTES}
    batch = max(problem.batch_per_rank, problem.val_batch_per_rank)
    tables = problem.tables
    numbers = sum(problem.vectors_per_sample(t) * t.embedding_dim for t in tables)
    number_bytes = compute_dtype(tables).itemsize if tables else NUMBER_BYTES
    ids = sum(problem.statistics_of(t).ids_per_sample for t in tables)
    in_flight = 1 + problem.look_ahead + bool(problem.val_batch_per_rank)
    ranks = CandidateRanks(list(range(problem.topology.world_size)), problem.topology.host_ranks())
    cut = {t.name: tile(t, "row_wise", ranks, "unique") for t in tables}
    even = ShardingPlan(cut, problem.topology.world_size, "row_wise")
    bytes_by_purpose = {
        "messages": float(buffer_bytes(even, problem).max()),
        "outputs": 2 * batch * numbers * number_bytes,
        "batches": in_flight * batch * ids * ID_TYPE_BYTES,
        "activations": batch * problem.dense.activation_bytes,
        "dense part": DENSE_COPIES * problem.dense.bytes,
        "runtime": RUNTIME_BYTES,
    }
    return {name: round(n) for name, n in bytes_by_purpose.items()}


def with_reserve(problem: PlanningProblem) -> PlanningProblem:
    """Return the problem with its computed reserve."""
    reserve = reserve_of(problem)
    topology = replace(problem.topology, reserve_bytes=sum(reserve.values()))
    return replace(problem, topology=topology, reserve=reserve)
