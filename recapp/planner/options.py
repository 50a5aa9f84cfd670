"""What could be done with a table: every allowed type and mode, cut and priced, with its places
still open.

    Option      a type and a mode                             row_wise, unique
      Block     rectangles that are placed at once            a strip; all the strips of a row;
                                                              a whole table
        places  [alternatives, rectangles] the ranks of each  table_wise on 4 ranks:
                                                              [[0], [1], [2], [3]]

A price has lanes, each of which the slowest rank decides for itself: kernels of four phases, and
three messages by two links. Options of all tables are priced together (`pricing.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from recapp.planner.constraints import MODES, ParameterConstraints, allowed_ranks
from recapp.planner.cost import (
    MESSAGES,
    PHASE_OF_MESSAGE,
    PHASES,
    Fixed,
    Floats,
    Work,
    fixed_of,
)
from recapp.planner.pricing import Cut, Ints, Prices, cut_of, price_all, work_of
from recapp.planner.problem import PlanningProblem
from recapp.planner.topology import Topology
from recapp.sharding.sharding_plan import Mode, Shard, TableSharding
from recapp.sharding.tilings import COLUMN_WIDTH, ShardingType, cut, strips
from recapp.tables.config import DataType, EmbeddingBagConfig
from recapp.tables.statistics import TableStatistics, default_statistics

KERNEL_PHASES = ("input", "lookup", "gradients", "update")
LANES = len(KERNEL_PHASES) + 2 * len(MESSAGES)
NARROWEST = 16  # columns of a strip that nobody asked for: one cache line of fp32
UNEVEN_FROM = 1.05  # strips of equal rows whose requests differ by less are left equal
SIMPLEST_FIRST = (
    ShardingType.TABLE_WISE,
    ShardingType.ROW_WISE,
    ShardingType.DATA_PARALLEL,
    ShardingType.COLUMN_WISE,
    # of types that cost the same the first is taken
    ShardingType.TABLE_ROW_WISE,
    ShardingType.GRID_SHARD,
)


@dataclass(frozen=True)
class Block:
    """Rectangles that are placed at once.

    Args:
        rows: first row of each of m rectangles, and the one behind its last, [m, 2].
        cols: likewise.
        lanes: seconds of each rectangle's owner, [m, LANES].
        bytes: of each, [m].
        places: ranks of the rectangles, by alternative, [A, m].
    """

    rows: Ints
    cols: Ints
    lanes: Floats
    bytes: Floats
    places: Ints


@dataclass(frozen=True)
class Option:
    """A way to shard one table, places open.

    Args:
        table: its name.
        kind: sharding type.
        mode: how it asks.
        work: priced, rectangles in the order of the blocks; its ranks are of the first alternative.
        home: seconds that every rank spends whatever the places, by lane, [LANES].
        owned: seconds of all owners together, [LANES].
        largest: of the rectangle that takes longest, lane by lane, [LANES].
        blocks: what is placed.
    """

    table: str
    kind: str
    mode: Mode
    work: Work
    home: Floats
    owned: Floats
    largest: Floats
    blocks: tuple[Block, ...]

    @property
    def seconds(self) -> float:
        """All work of all ranks together: by this tables are ordered."""
        return float(self.home.sum() + self.owned.sum())

    def sharding(self, chosen: Sequence[int]) -> TableSharding:
        """With an alternative chosen for each block."""
        shards = tuple(
            Shard(rank, range(*rows), range(*cols))
            for b, a in zip(self.blocks, chosen, strict=True)
            for rank, rows, cols in zip(
                b.places[a].tolist(), b.rows.tolist(), b.cols.tolist(), strict=True
            )
        )
        return TableSharding(shards, self.mode, self.kind)

    def placed(self, chosen: Sequence[int]) -> Work:
        """The work, its rectangles on the ranks of the chosen alternatives."""
        return replace(
            self.work,
            rank_M=np.concatenate([b.places[a] for b, a in zip(self.blocks, chosen, strict=True)]),
        )


def seen_table(table: EmbeddingBagConfig, c: ParameterConstraints) -> EmbeddingBagConfig:
    """The table as it is counted."""
    return table if c.data_type is None else replace(table, data_type=DataType(c.data_type))


def seen_statistics(
    table: EmbeddingBagConfig, c: ParameterConstraints, known: TableStatistics | None
) -> TableStatistics:
    """A table's statistics: given ones, measured ones, or what its pooling factor suggests."""
    if c.statistics is not None:
        return c.statistics
    if c.pooling_factors is not None:
        return default_statistics(table, sum(c.pooling_factors) / len(c.pooling_factors))
    return known or default_statistics(table)


@dataclass(frozen=True)
class _Part:
    """A block before it is priced: rows of its rectangles, their columns, where they may lie."""

    rows: Ints
    cols: range
    places: Ints


def options_of(
    tables: Sequence[EmbeddingBagConfig],
    c: Mapping[str, ParameterConstraints],
    setting: PlanningProblem,
) -> dict[str, list[Option]]:
    """Every option of every table that its constraints allow, in a fixed order."""
    free: dict[tuple[int, ...], _Places] = {}
    asked = []
    cuts = []
    for table in tables:
        ranks = tuple(allowed_ranks(c[table.name], setting.topology))
        places = free.setdefault(ranks, _Places(ranks, setting.topology))
        for kind, mode, parts in _ways(table, c[table.name], places, setting):
            asked.append((table.name, kind, parts))
            cuts.append(
                Cut(
                    table,
                    mode,
                    np.concatenate([p.places[0] for p in parts]),
                    np.concatenate([p.rows for p in parts]),
                    tuple((len(p.cols), len(p.rows)) for p in parts),
                )
            )
    found: dict[str, list[Option]] = {t.name: [] for t in tables}
    if cuts:
        priced = _Priced(price_all(cuts, setting), setting)
        for j, (name, kind, parts) in enumerate(asked):
            found[name].append(
                priced.option(
                    j, kind, [(p.rows, _repeated(p.cols, len(p.rows)), p.places) for p in parts]
                )
            )
    return found


def _repeated(cols: range, times: int) -> Ints:
    return np.broadcast_to(np.array([cols.start, cols.stop], np.int64), (times, 2))


def _ways(
    table: EmbeddingBagConfig, c: ParameterConstraints, places: "_Places", setting: PlanningProblem
) -> Iterator[tuple[str, Mode, list[_Part]]]:
    """Types, modes and cuts that are allowed."""
    kinds = (
        [ShardingType(k) for k in c.sharding_types]
        if c.sharding_types is not None
        else _sensible(setting.topology)
    )
    known = setting.of(table)
    several = known.ids_per_sample > known.bags_per_sample
    modes = [
        m for m in MODES if (m in c.modes if c.modes is not None else several or m == "unique")
    ]
    for kind in kinds:
        own: Sequence[Mode] = ("replicated",) if kind is ShardingType.DATA_PARALLEL else modes
        yield from (
            (kind.value, mode, parts)
            for parts in _cuts(kind, table, c, places, setting)
            for mode in own
        )


def _sensible(topology: Topology) -> list[ShardingType]:
    """What is worth pricing: one rank keeps tables whole, and on one host table_row_wise is
    row_wise by another name.
    """
    if topology.world_size == 1:
        return [ShardingType.TABLE_WISE]
    return [k for k in SIMPLEST_FIRST if topology.hosts > 1 or k is not ShardingType.TABLE_ROW_WISE]


class _Places:
    """Ranks that a table may lie on, as alternatives of each type."""

    def __init__(self, ranks: Sequence[int], topology: Topology) -> None:
        allowed = set(ranks)
        hosts = [mates for h in topology.host_ranks() if (mates := [r for r in h if r in allowed])]
        self.everyone = len(ranks) == topology.world_size
        self.alone = np.array(ranks, np.int64)[:, None]
        self.all = np.array([ranks], np.int64)
        self.mates = min(len(h) for h in hosts)
        self.hosts = np.array([h[: self.mates] for h in hosts], np.int64)


def _cuts(
    kind: ShardingType,
    table: EmbeddingBagConfig,
    c: ParameterConstraints,
    places: _Places,
    setting: PlanningProblem,
) -> list[list[_Part]]:
    """The ways to cut a table as a type does: blocks of each."""
    R = table.num_embeddings
    D = range(table.embedding_dim)
    ranks = len(places.alone)
    whole = np.array([[0, R]], np.int64)
    match kind:
        case ShardingType.TABLE_WISE:
            return [[_Part(whole, D, places.alone)]]
        case ShardingType.COLUMN_WISE:
            return [
                [_Part(whole, cols, places.alone) for cols in parts]
                for parts in _widths(table, c, ranks)
            ]
        case ShardingType.ROW_WISE:
            return [
                [_Part(rows, D, places.all[:, : len(rows)])]
                for rows in _row_cuts(table, ranks, setting)
            ]
        case ShardingType.TABLE_ROW_WISE:
            rows = _equal(R, places.mates)
            return [[_Part(rows, D, places.hosts[:, : len(rows)])]]
        case ShardingType.GRID_SHARD:
            rows = _equal(R, places.mates)
            return [
                [_Part(rows, cols, places.hosts[:, : len(rows)]) for cols in parts]
                for parts in _widths(table, c, len(places.hosts))
            ]
        case ShardingType.DATA_PARALLEL:
            return [[_Part(np.repeat(whole, ranks, 0), D, places.all)]] if places.everyone else []


def _equal(rows: int, parts: int) -> Ints:
    """Strips of `tilings.cut`, [parts, 2]."""
    return np.array([(r.start, r.stop) for r in cut(rows, parts)], np.int64)


def _widths(table: EmbeddingBagConfig, c: ParameterConstraints, count: int) -> list[list[range]]:
    """Strips of the usual width, and as many as there are ranks (or hosts); at least two, or it is
    no cut.
    """
    least = c.min_partition or 1
    wanted = {
        max(least, COLUMN_WIDTH),
        max(least, NARROWEST, -(-table.embedding_dim // max(count, 1))),
    }
    found = [strips(table, width) for width in sorted(wanted, reverse=True)]
    if c.sharding_types is not None:
        return (
            found[:1]
            if all(len(parts) < 2 for parts in found)
            else [parts for parts in found if len(parts) > 1]
        )
    return [parts for parts in found if len(parts) > 1]


def _row_cuts(table: EmbeddingBagConfig, count: int, setting: PlanningProblem) -> list[Ints]:
    """Equal strips; where ids are known to crowd, also strips of equal requests."""
    known = setting.of(table)
    equal = _equal(table.num_embeddings, count)
    if len(equal) < 2 or float(known.shares(equal).max()) * len(equal) < UNEVEN_FROM:
        return [equal]
    uneven = [(r.start, r.stop) for r in known.equal_shares(count) if len(r)]
    return [equal, np.array(uneven, np.int64)] if len(uneven) == len(equal) else [equal]


class _Priced:
    """Prices by lane: owners' kernels, then each message through the links of its host, then
    through the network; homes likewise.
    """

    def __init__(self, prices: Prices, setting: PlanningProblem) -> None:
        kernels = [PHASES.index(p) for p in KERNEL_PHASES]
        near, far = setting.seconds_per_byte
        self.prices = prices
        fixed = fixed_of(setting)
        self.lanes_ML = np.concatenate(
            [prices.seconds_PM[kernels], prices.asked_3M * near, prices.asked_3M * far]
        ).T.copy()
        self.home_JL = np.concatenate(
            [prices.home_JP[:, kernels], prices.everywhere_J3 * near, prices.everywhere_J3 * far], 1
        )
        self.home_JL[:, KERNEL_PHASES.index("update")] += (
            prices.agreeing_J * fixed.agreement_row_seconds
        )
        self.owned_JL = np.add.reduceat(self.lanes_ML, prices.first_J)
        self.largest_JL = np.maximum.reduceat(self.lanes_ML, prices.first_J)

    def option(self, j: int, kind: str, parts: Sequence[tuple[Ints, Ints, Ints]]) -> Option:
        """One cut's: rows, columns and places of its blocks."""
        blocks = []
        at = int(self.prices.first_J[j])
        for rows, cols, places in parts:
            here = slice(at, at := at + len(rows))
            blocks.append(Block(rows, cols, self.lanes_ML[here], self.prices.bytes_M[here], places))
        cut = self.prices.cuts[j]
        return Option(
            cut.table.name,
            kind,
            cut.mode,
            self.prices.work(j),
            self.home_JL[j],
            self.owned_JL[j],
            self.largest_JL[j],
            tuple(blocks),
        )


def option_of(
    table: EmbeddingBagConfig, sharding: TableSharding, setting: PlanningProblem
) -> Option:
    """A sharding as it stands: one block, one alternative. An open mode counts as `work_of` counts
    it.
    """
    cells = sharding.cells(table, setting.topology.world_size)
    mode = sharding.mode
    if mode == "auto":
        mode = work_of(table, sharding, setting).mode
    asked = cut_of(table, cells, mode)
    cols = np.array([(s.cols.start, s.cols.stop) for s in cells], np.int64)
    return _Priced(price_all([asked], setting), setting).option(
        0, sharding.sharding_type, [(asked.rows_M2, cols, asked.rank_M[None])]
    )


def base_lanes(fixed: Fixed) -> Floats:
    """What each lane has before a table is placed, [LANES]: the messages' latencies."""
    return np.concatenate([np.zeros(len(KERNEL_PHASES)), *fixed.latency_23])


def own_seconds(option: Option, world: int) -> Floats:
    """A table's own share of a step by lane, [LANES]: as if it were alone, without what calls and
    messages cost at all.
    """
    load = np.zeros((world, LANES))
    for block in option.blocks:
        np.add.at(load, block.places[0], block.lanes)
    found: Floats = option.home + load.max(0)
    return found


def phases_of(lanes: Floats) -> Floats:
    """Lanes as phases, [P]: a message takes the slower of its two links."""
    K = len(KERNEL_PHASES)
    M = len(MESSAGES)
    found = dict.fromkeys(PHASES, 0.0)
    for i, phase in enumerate(KERNEL_PHASES):
        found[phase] += float(lanes[i])
    for i, message in enumerate(MESSAGES):
        found[PHASE_OF_MESSAGE[message]] += float(max(lanes[K + i], lanes[K + M + i]))
    return np.array([found[p] for p in PHASES])
