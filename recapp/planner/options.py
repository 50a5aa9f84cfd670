"""List the options of a table: each allowed sharding type and mode, cut and priced, with open
ranks.

    Option          a sharding type and a mode                row_wise, unique
      PricedBlock   rectangles whose ranks are chosen         a strip; all strips of a row;
                    together                                  a whole table
        candidates  sets of ranks; the search chooses one,    table_wise on 4 ranks:
                    [sets, rectangles]                        [[0], [1], [2], [3]]

A price has components: kernels of four phases, and three messages by two links. The slowest rank
sets the time of each component. Options of all tables are priced together (`pricing.py`).
Constraints, by table or by pattern, are checked against tables and ranks before.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from recapp.errors import PlanError, suggest
from recapp.planner.cost import (
    MESSAGES,
    PHASE_OF_MESSAGE,
    PHASES,
    Floats,
    TableWork,
    fixed_of,
)
from recapp.planner.planner_settings import ParameterConstraints
from recapp.planner.pricing import Cut, cut_of, price_all, work_of
from recapp.planner.problem import PlanningProblem, Topology
from recapp.sharding.sharding_plan import Mode, Shard, TableSharding
from recapp.sharding.sharding_types import (
    BUILT_IN,
    COLUMN_WIDTH,
    SHARDING_TYPES,
    CandidateRanks,
    Ints,
    RectangleGroup,
    ShardingTypeRecord,
    TableToCut,
    sharding_type,
)
from recapp.tables.config import EmbeddingConfig
from recapp.tables.positions import ROW_ORDERS, RowOrderName
from recapp.tables.statistics import TableStatistics, default_statistics

MODES: tuple[Mode, ...] = ("unique", "pooled")


# Constraints by table name or glob. A name wins over a glob, and the last glob over earlier ones.
Constraints = Mapping[str, ParameterConstraints]


def constraints_of(
    tables: Sequence[EmbeddingConfig], constraints: Constraints, topology: Topology
) -> dict[str, ParameterConstraints]:
    """Check the constraints, and return those of each table, by name.

    Raises:
        PlanError: A pattern matches no table, a type or mode is unknown, ranks or hosts do not
            exist, strips are narrower than a column, or tables that must lie together must also lie
            apart or share no allowed type.
    """
    names = [t.name for t in tables]
    by_table = dict.fromkeys(names, ParameterConstraints())
    for pattern in sorted(constraints, key=lambda p: p in names):
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise PlanError(f"constraints.{pattern}: no such table; {suggest(pattern, names)}")
        _check(pattern, constraints[pattern], topology)
        by_table |= {name: constraints[pattern].over(by_table[name]) for name in matching}
    _check_groups(by_table, topology)
    return by_table


def _check(pattern: str, c: ParameterConstraints, topology: Topology) -> None:
    where = f"constraints.{pattern}"
    for name in c.sharding_types or ():
        sharding_type(str(name), f"{where}.sharding_types")
    words = (("modes", "mode", c.modes, MODES), ("row_orders", "order", c.row_orders, ROW_ORDERS))
    for key, noun, entries, known in words:
        for word in entries or ():
            if word not in known:
                says = suggest(str(word), known)
                raise PlanError(f"{where}.{key}: unknown {noun} {word}; {says}")
    limits: list[tuple[str, Sequence[Any] | None, int]] = [
        ("ranks", c.ranks, topology.world_size),
        ("hosts", c.hosts, topology.hosts),
    ]
    for what, numbers, count in limits:
        for number in numbers or ():
            if not 0 <= number < count:
                raise PlanError(
                    f"{where}.{what}: {what[:-1]} {number} does not exist: there "
                    f"{'is' if count == 1 else 'are'} {count} ({what} 0..{count - 1}); name one "
                    "of these, or use a topology that has more"
                )
        if numbers is not None and not numbers:
            raise PlanError(
                f"{where}.{what} is empty: name at least one of 0..{count - 1}, or leave it out"
            )
    if c.min_partition is not None and c.min_partition < 1:
        raise PlanError(f"{where}.min_partition={c.min_partition}: a strip has at least 1 column")
    if c.sharding_types is not None and not c.sharding_types:
        raise PlanError(
            f"{where}.sharding_types is empty: name at least one of {', '.join(SHARDING_TYPES)}, "
            "or leave it out"
        )


def allowed_ranks(c: ParameterConstraints, topology: Topology) -> list[int]:
    """Return the ranks that are allowed for a table, ascending."""
    ranks = set(range(topology.world_size)) if c.ranks is None else set(c.ranks)
    if c.hosts is not None:
        hosts = topology.host_ranks()
        ranks &= {r for h in c.hosts for r in hosts[h]}
    return sorted(ranks)


def _check_groups(by_table: Mapping[str, ParameterConstraints], topology: Topology) -> None:
    one_block = [name for name, record in SHARDING_TYPES.items() if not record.cuts_columns]
    usual = [record.name for record in BUILT_IN]
    groups: dict[str, list[str]] = {}
    for name, c in by_table.items():
        if not allowed_ranks(c, topology):
            raise PlanError(
                f"constraints.{name}: ranks {list(c.ranks or ())} are not on hosts "
                f"{list(c.hosts or ())}: leave ranks or hosts out"
            )
        if c.together is not None:
            groups.setdefault(c.together, []).append(name)
    for label, names in groups.items():
        others = [by_table[n].apart for n in names if by_table[n].apart is not None]
        if len(others) > len(set(others)):
            raise PlanError(
                f"constraints: tables {', '.join(names)} must lie together ({label}) and apart "
                f"({others[0]}) at the same time: leave one of the two out"
            )
        shared = [
            type_name
            for type_name in one_block
            if all(type_name in (by_table[n].sharding_types or usual) for n in names)
        ]
        if not shared:
            raise PlanError(
                f"constraints: tables {', '.join(names)} must lie together ({label}), but they "
                f"have no sharding type in common that allows this ({', '.join(one_block)}): "
                "give them one of these in sharding_types"
            )
        if not set.intersection(*(set(allowed_ranks(by_table[n], topology)) for n in names)):
            raise PlanError(
                f"constraints: tables {', '.join(names)} must lie together ({label}), but they "
                "have no rank in common: give them a common rank in ranks"
            )


# ---- options

KERNEL_PHASES = ("input", "lookup", "gradients", "update")
COMPONENTS = len(KERNEL_PHASES) + 2 * len(MESSAGES)
NARROWEST = 16  # columns of a strip, unless constraints allow fewer: one cache line of fp32
Parts = Sequence[tuple[Ints, Ints, Ints]]  # rows, columns and candidate ranks of each block
SKEWED_FROM = 1.05  # rows are mixed if the busiest strip gets this many times the mean


@dataclass(frozen=True)
class PricedBlock:
    """Rectangles whose ranks are chosen together.

    Args:
        rows: The first row of each of m rectangles, and the row after its last, [m, 2].
        cols: The first column of each rectangle, and the column after its last, [m, 2].
        seconds: Seconds of each rectangle's owner, [m, COMPONENTS].
        bytes: Bytes of weights and optimiser state of each, [m].
        candidates: Sets of ranks that can hold the rectangles, a rank for each rectangle, [A, m].
    """

    rows: Ints
    cols: Ints
    seconds: Floats
    bytes: Floats
    candidates: Ints


@dataclass(frozen=True)
class Option:
    """One way to shard a table, with open ranks.

    Args:
        table: The name of the table.
        sharding_type: The name of the type.
        mode: The mode of the table.
        row_order: The order of the rows.
        work: The price, with rectangles in the order of the blocks, each on the first candidate
            ranks.
        home: Seconds of every rank, independent of the chosen ranks, by component, [COMPONENTS].
        owned: Seconds of all owners together, [COMPONENTS].
        largest: Seconds of the slowest rectangle, by component, [COMPONENTS].
        blocks: The blocks to choose ranks for.
    """

    table: str
    sharding_type: str
    mode: Mode
    row_order: RowOrderName
    work: TableWork
    home: Floats
    owned: Floats
    largest: Floats
    blocks: tuple[PricedBlock, ...]

    def sharding(self, candidates: Sequence[int]) -> TableSharding:
        """Return the table's sharding.

        Args:
            candidates: The index of the candidate ranks of each block.
        """
        shards = tuple(
            Shard(rank, range(*rows), range(*cols))
            for b, a in zip(self.blocks, candidates, strict=True)
            for rank, rows, cols in zip(
                b.candidates[a].tolist(), b.rows.tolist(), b.cols.tolist(), strict=True
            )
        )
        return TableSharding(shards, self.mode, self.sharding_type, self.row_order)

    def on_ranks(self, candidates: Sequence[int]) -> TableWork:
        """Return the work with its rectangles on the chosen candidate ranks.

        Args:
            candidates: The index of the candidate ranks of each block.
        """
        return replace(
            self.work,
            rank_M=np.concatenate(
                [b.candidates[a] for b, a in zip(self.blocks, candidates, strict=True)]
            ),
        )


def constrained_statistics(
    table: EmbeddingConfig, c: ParameterConstraints, problem: PlanningProblem
) -> TableStatistics:
    """Return the statistics of a table: from its constraints, from measurements, or derived from
    its pooling factors.
    """
    if isinstance(c.statistics, TableStatistics):
        return c.statistics
    if c.pooling_factors is not None:
        ids_per_bag = sum(c.pooling_factors) / len(c.pooling_factors)
        return default_statistics(table, ids_per_bag, problem.lookups_per_table[table.name])
    return problem.statistics_of(table)


def options_of(
    tables: Sequence[EmbeddingConfig],
    c: Mapping[str, ParameterConstraints],
    problem: PlanningProblem,
) -> dict[str, list[Option]]:
    """Return all options of each table that its constraints allow, in a fixed order."""
    known: dict[tuple[int, ...], CandidateRanks] = {}
    types_and_parts: list[tuple[str, Parts]] = []
    cuts = []
    for table in tables:
        ranks = tuple(allowed_ranks(c[table.name], problem.topology))
        if ranks not in known:
            hosts = [[r for r in host if r in ranks] for host in problem.topology.host_ranks()]
            known[ranks] = CandidateRanks(ranks, [host for host in hosts if host])
        ways = _cuts_and_modes(table, c[table.name], known[ranks], problem)
        for record, mode, order, blocks in ways:
            parts = [
                (
                    b.rows,
                    np.broadcast_to((b.columns.start, b.columns.stop), (len(b.rows), 2)),
                    b.candidates,
                )
                for b in blocks
            ]
            types_and_parts.append((record.name, parts))
            cuts.append(
                Cut(
                    table,
                    mode,
                    np.concatenate([b.candidates[0] for b in blocks]),
                    np.concatenate([b.rows for b in blocks]),
                    tuple((len(b.columns), len(b.rows)) for b in blocks),
                    order,
                )
            )
    options: dict[str, list[Option]] = {t.name: [] for t in tables}
    for option in _priced(cuts, types_and_parts, problem) if cuts else ():
        options[option.table].append(option)
    return options


def _cuts_and_modes(
    table: EmbeddingConfig,
    c: ParameterConstraints,
    ranks: CandidateRanks,
    problem: PlanningProblem,
) -> Iterator[tuple[ShardingTypeRecord, Mode, RowOrderName, list[RectangleGroup]]]:
    """Yield the allowed sharding types, modes, row orders and cuts."""
    # one rank keeps tables whole, and on one host a type for several makes a simpler type's cuts
    hosts = problem.topology.hosts
    usual = [record for record in BUILT_IN if hosts > 1 or not record.several_hosts]
    records = usual if problem.topology.world_size > 1 else usual[:1]
    if c.sharding_types is not None:
        records = [SHARDING_TYPES[name] for name in c.sharding_types]
    known = problem.statistics_of(table)
    several = known.ids_per_sample > known.bags_per_sample
    unsummed = table.name in problem.unsummed
    modes = [
        m
        for m in MODES
        if (m in c.modes if c.modes is not None else several or m == "unique")
        and (m == "unique" or not unsummed)
    ]
    if unsummed and not modes:
        raise PlanError(
            f"table {table.name}: modes={list(c.modes or ())}: a dynamic table, and a lookup "
            "that is a sequence or a concatenation, need distinct rows: allow unique"
        )
    for record in records:
        type_modes: Sequence[Mode] = ("replicated",) if record.replicated else modes
        yield from (
            (record, mode, order, blocks)
            for blocks in _cuts(record, table, c, ranks, problem)
            for order in _row_orders(table, known, c, record, blocks)
            for mode in type_modes
        )


def _cuts(
    record: ShardingTypeRecord,
    table: EmbeddingConfig,
    c: ParameterConstraints,
    ranks: CandidateRanks,
    problem: PlanningProblem,
) -> list[list[RectangleGroup]]:
    """Return the cuts of a table that a sharding type allows, each a list of blocks.

    Columns are cut into strips of the default width, and into one strip for each set of candidate
    ranks; cuts of a single strip are left out unless constraints ask for the type.
    """
    least = c.min_partition or 1
    usual = max(least, COLUMN_WIDTH)
    table_to_cut = TableToCut(table.plan_rows, table.embedding_dim, ranks)
    if record.replicated and len(ranks.each_rank) < problem.topology.world_size:
        return []
    if record.cuts_columns:
        table_to_cut = table_to_cut._replace(column_width=usual)
    blocks = record.cut(table_to_cut)
    if not blocks or not record.cuts_columns:
        return [blocks] if blocks else []
    as_many = max(least, NARROWEST, -(-table.embedding_dim // len(blocks[0].candidates)))
    cuts = [
        blocks if width == usual else record.cut(table_to_cut._replace(column_width=width))
        for width in sorted({usual, as_many}, reverse=True)
    ]
    several = [blocks for blocks in cuts if len({b.columns.start for b in blocks}) > 1]
    return several or (cuts[:1] if c.sharding_types is not None else [])


def _row_orders(
    table: EmbeddingConfig,
    known: TableStatistics,
    c: ParameterConstraints,
    record: ShardingTypeRecord,
    blocks: Sequence[RectangleGroup],
) -> list[RowOrderName]:
    """Return the row orders worth pricing: mixed if known ids concentrate in some strips of a cut,
    or if constraints allow only mixed. Keys of dynamic tables are always mixed.
    """
    strips = blocks[0].rows
    if not record.cuts_rows or len(strips) == 1 or table.dynamic is not None:
        return ["natural"]
    share_m = known.shares(strips) / known.shares(strips, "mixed")
    worth = float(share_m.max()) >= SKEWED_FROM or c.row_orders == ["mixed"]
    return [
        order
        for order in ROW_ORDERS
        if (c.row_orders is None or order in c.row_orders) and (order == "natural" or worth)
    ]


def _priced(
    cuts: Sequence[Cut], types_and_parts: Sequence[tuple[str, Parts]], problem: PlanningProblem
) -> list[Option]:
    """Return the option of each cut, with prices by component: the owners' kernels, then each
    message by the links inside of a host, then by the network; and the work of every rank for its
    own batch.

    Args:
        cuts: The cuts.
        types_and_parts: The sharding type of each cut, and the parts of its blocks.
        problem: The planning problem.
    """
    prices = price_all(cuts, problem)
    kernels = [PHASES.index(p) for p in KERNEL_PHASES]
    near, far = problem.seconds_per_byte
    fixed = fixed_of(problem)
    seconds_MC = np.concatenate(
        [prices.seconds_PM[kernels], prices.asked_3M * near, prices.asked_3M * far]
    ).T.copy()
    home_JC = np.concatenate(
        [prices.home_JP[:, kernels], prices.everywhere_J3 * near, prices.everywhere_J3 * far], 1
    )
    home_JC[:, KERNEL_PHASES.index("update")] += (
        prices.statistics_rows_J * fixed.statistics_row_seconds
    )
    owned_JC = np.add.reduceat(seconds_MC, prices.first_J)
    largest_JC = np.maximum.reduceat(seconds_MC, prices.first_J)
    options = []
    at = 0
    for j, (cut, (type_name, parts)) in enumerate(zip(cuts, types_and_parts, strict=True)):
        blocks = []
        for rows, cols, candidates in parts:
            here = slice(at, at := at + len(rows))
            blocks.append(
                PricedBlock(rows, cols, seconds_MC[here], prices.bytes_M[here], candidates)
            )
        options.append(
            Option(
                cut.table.name,
                type_name,
                cut.mode,
                cut.row_order,
                prices.work(j),
                home_JC[j],
                owned_JC[j],
                largest_JC[j],
                tuple(blocks),
            )
        )
    return options


def option_of(table: EmbeddingConfig, sharding: TableSharding, problem: PlanningProblem) -> Option:
    """Return a sharding as an option of one block with one set of candidate ranks. `work_of`
    chooses an open mode.
    """
    cells = sharding.cells(table, problem.topology.world_size)
    mode = sharding.mode
    if mode == "auto":
        mode = work_of(table, sharding, problem).mode
    cut = cut_of(table, cells, mode, sharding.row_order)
    cols = np.array([(s.cols.start, s.cols.stop) for s in cells], np.int64)
    parts = [(cut.rows_M2, cols, cut.rank_M[None])]
    return _priced([cut], [(sharding.sharding_type, parts)], problem)[0]


def own_seconds(option: Option, world: int) -> Floats:
    """Return a table's own share of a step, by component, [COMPONENTS]: the table alone, on its
    first candidate ranks, without the fixed costs of calls and messages.
    """
    load = np.zeros((world, COMPONENTS))
    for block in option.blocks:
        np.add.at(load, block.candidates[0], block.seconds)
    seconds: Floats = option.home + load.max(0)
    return seconds


def phases_of(components: Floats) -> Floats:
    """Convert components to phases, [P]: a message takes the time of the slower of its two
    links.
    """
    K = len(KERNEL_PHASES)
    M = len(MESSAGES)
    seconds = dict.fromkeys(PHASES, 0.0)
    for i, phase in enumerate(KERNEL_PHASES):
        seconds[phase] += float(components[i])
    for i, message in enumerate(MESSAGES):
        seconds[PHASE_OF_MESSAGE[message]] += float(max(components[K + i], components[K + M + i]))
    return np.array([seconds[p] for p in PHASES])
