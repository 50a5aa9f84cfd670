"""The layout: the rank and the place of every row of every table. It is a pure function of tables
and plan, equal on every rank.

A column strip *is* a narrow table: no room below this file knows wide tables. Strips of one width,
mode, stored dtype and optimiser form a group: one store of rows per rank and one kernel call,
however many tables it serves. Rows of all strips of a group are numbered by one key (strip.key +
row); the sorted pieces map a key to a rank and to a row of that rank's store.

    tables      strips (cols)      groups (width, mode)         store of a rank
    A 6x4  ->   A[0:2], A[2:4] ->  (2, unique): A[0:2] A[2:4] -> its pieces, one after the other
    B 9x3  ->   B[0:3]         ->  (3, unique): B[0:3]

Planner, engine, checkpoint and report read the layout and no other description of a plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from recapp.errors import PlanError
from recapp.sharding.sharding_plan import Mode, Shard, ShardingPlan
from recapp.tables.config import EmbeddingConfig, TableLookup, lookups_of
from recapp.tables.positions import PART_ROWS, RowOrder, moved_rows

WEIGHT = "weight"  # the tensor of a table's weights, by which a stored model scores
RAW = "raw"  # where `weight` is an average: the weights with which training goes on
AVERAGE = "average"  # the average in the compute type, where that of the table is narrower
OF_WEIGHTS = (WEIGHT, RAW, AVERAGE)  # other tensors are optimiser state


@dataclass(frozen=True, slots=True)
class Strip:
    """Some columns of a table, with all rows.

    Args:
        table: Number of the table.
        cols: The columns.
        group: Number of the group.
        key: Number of the strip's first row among the rows of all strips of the group.
    """

    table: int
    cols: range
    group: int
    key: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a strip on one rank.

    Args:
        strip: Number of the strip.
        rank: The rank.
        rows: The rows of the table that the plan gives this piece; of a dynamic table, stretches.
        base: The piece's first row in the group's store on this rank. For a dynamic table, the
            number of the first stretch among the stretches of all strips of the group.
    """

    strip: int
    rank: int
    rows: range
    base: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A strip that a lookup reads.

    Args:
        lookup: Number of the lookup.
        strip: Number of the strip.
        column: First column of the lookup's vector that the strip fills.
    """

    lookup: int
    strip: int
    column: int


@dataclass(frozen=True, slots=True)
class Group:
    """Strips of one width, mode, stored dtype and optimiser.

    Args:
        width: Columns of each strip.
        mode: The mode in which the tables ask for rows.
        dtype: The dtype of the weights.
        slots: The strips that lookups read, lookup by lookup.
        rows_W: Number of rows stored on each rank; for dynamic tables the expected number.
        rule: Number of the tables' optimiser.
        dynamic: Whether the tables are dynamic: rows are found by position, and exist once they
            have been trained.
    """

    width: int
    mode: Mode
    dtype: torch.dtype
    slots: tuple[Slot, ...]
    rows_W: tuple[int, ...]
    rule: int = 0
    dynamic: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """The strips, pieces and groups of a plan.

    Args:
        tables: The tables of the plan.
        lookups: The lookups of the tables, in output order; slots name them by number.
        world: The number of ranks.
        strips: The strips, table by table.
        pieces: The pieces by strip, then row; copies by rank.
        groups: The groups; replicated groups come last, because no rank asks another for their
            rows. Groups of frozen tables are the first of the others and the last of the
            replicated ones, so those with gradients follow each other.
        orders: The order of each table's rows; None for rows that lie by number. Rows of strips and
            pieces are positions in this order.
        frozen: Number of the rule of frozen tables; None if there are none.
    """

    tables: tuple[EmbeddingConfig, ...]
    lookups: tuple[TableLookup, ...]
    world: int
    strips: tuple[Strip, ...]
    pieces: tuple[Piece, ...]
    groups: tuple[Group, ...]
    orders: tuple[RowOrder | None, ...]
    frozen: int | None = None

    @property
    def learning(self) -> range:
        """Return the groups whose tables get gradients."""
        numbers = [g for g, group in enumerate(self.groups) if group.rule != self.frozen]
        return range(numbers[0], numbers[-1] + 1) if numbers else range(0)

    @property
    def column_cut(self) -> bool:
        """Return whether any table is cut by columns: then ranks must exchange row statistics."""
        return any(len(s.cols) < self.tables[s.table].embedding_dim for s in self.strips)

    def tables_of_rule(self, rule: int) -> list[str]:
        """Return the names of the tables of an optimiser, by its number."""
        numbers = {s.table for s in self.strips if self.groups[s.group].rule == rule}
        return [t.name for i, t in enumerate(self.tables) if i in numbers]

    def shards_of(self, table: str) -> list[Shard]:
        """Return the rectangles of a table that ranks store: the plan's rectangles, or parts of
        them.
        """
        return [
            Shard(p.rank, p.rows, strip.cols)
            for p in self.pieces
            if self.tables[(strip := self.strips[p.strip]).table].name == table
        ]

    def pieces_of(self, rank: int, group: int) -> list[Piece]:
        """Return the pieces of a group in the store of a rank, in store order."""
        return [p for p in self.pieces if p.rank == rank and self.strips[p.strip].group == group]


class Block(NamedTuple):
    """One rectangle of one logical tensor on this rank. Checkpoints read and write blocks.

    Args:
        table: The name of the table.
        tensor: The name of the tensor: the weights, or one of the optimiser's states.
        shape: Shape of the whole tensor.
        rows: Rows of the rectangle.
        cols: Columns of the rectangle.
        data: A view into the store, [len(rows), len(cols)]: reading it saves, copying into it
            loads.
        owner: True on exactly one of the ranks that hold the rectangle (replicas, row-wise state
            beside column strips). That rank writes it.
        order: The order in which `rows` number the tensor's rows; None: by row number.
    """

    table: str
    tensor: str
    shape: tuple[int, int]
    rows: range
    cols: range
    data: Tensor
    owner: bool
    order: RowOrder | None = None


def copy_rows(
    block: Block, values: Tensor, rows: range, cols: range, order: RowOrder | None
) -> None:
    """Copy the overlap of a block and a rectangle of the same tensor into the block.

    If rows change their order, this takes a few MB of memory more.

    Args:
        block: The block, which is written.
        values: The values of the rectangle, [len(rows), len(cols)].
        rows: The rectangle's rows, numbered in `order`.
        cols: The rectangle's columns.
        order: The order of the rectangle's rows; None: by row number.
    """
    common = overlap(cols, block.cols)
    to = block.data[:, common.start - block.cols.start : common.stop - block.cols.start]
    of = values[:, common.start - cols.start : common.stop - cols.start]
    if order == block.order:
        same = overlap(rows, block.rows)
        to[same.start - block.rows.start : same.stop - block.rows.start].copy_(
            of[same.start - rows.start : same.stop - rows.start]
        )
        return
    for first in range(rows.start, rows.stop, PART_ROWS):
        part = range(first, min(first + PART_ROWS, rows.stop))
        from_M, to_M = moved_rows(part, order, block.order, block.rows)
        moved = of[part.start - rows.start : part.stop - rows.start][from_M.to(of.device)]
        to[to_M.to(to.device)] = moved.to(to)


def overlap(a: range, b: range) -> range:
    """Return the intersection of two ranges, which may be empty."""
    return range(max(a.start, b.start), max(min(a.stop, b.stop), a.start, b.start))


def make_layout(
    tables: Sequence[EmbeddingConfig],
    plan: ShardingPlan,
    lookups: Sequence[TableLookup] | None = None,
    rules: Mapping[str, int] | None = None,
    frozen: int | None = None,
) -> Layout:
    """Compute the layout of a plan.

    Args:
        tables: The tables of the plan.
        plan: The plan of the tables; it leaves no mode open.
        lookups: The lookups of the tables, in output order; None takes the lookups that the tables
            declare.
        rules: Number of each table's optimiser, by table name; None if all tables have the same.
        frozen: Number of the rule of frozen tables; None if there are none.

    Raises:
        PlanError: The plan does not tile a table, names other tables or leaves a mode open.
    """
    plan.check(tables)
    if plan.undecided:
        open_modes = ", ".join(plan.undecided)
        raise PlanError(
            f"the mode of {open_modes} is still open: decide_modes "
            "(recapp/planner/choose_modes.py) or with_modes sets it"
        )
    read = lookups_of(tables) if lookups is None else tuple(lookups)
    _check_modes(plan, read)
    world = plan.world_size
    rule_T = [0 if rules is None else rules[t.name] for t in tables]
    cells = [plan.tables[t.name].cells(t, world) for t in tables]
    kinds = sorted(
        {
            _kind(t, s, plan, rule)
            for t, shards_of_table, rule in zip(tables, cells, rule_T, strict=True)
            for s in shards_of_table
        },
        key=lambda kind: (_place(kind, frozen), *kind[:2], str(kind[2]), *kind[3:]),
    )
    strips: list[Strip] = []
    pieces: list[Piece] = []
    stored = [[0] * world for _ in kinds]
    keys = [0] * len(kinds)
    for number, (t, shards_of_table) in enumerate(zip(tables, cells, strict=True)):
        for cols, shards in groupby(shards_of_table, key=lambda s: s.cols):
            mode = plan.tables[t.name].mode
            dynamic = t.dynamic is not None
            g = kinds.index((len(cols), mode, t.data_type.dtype, rule_T[number], dynamic))
            strips.append(Strip(number, cols, g, keys[g]))
            for s in shards:
                base = keys[g] + s.rows.start if dynamic else stored[g][s.rank]
                pieces.append(Piece(len(strips) - 1, s.rank, s.rows, base))
                stored[g][s.rank] += t.rows_in(s.rows)
            keys[g] += t.plan_rows
    slots = _slots(read, tables, strips, len(kinds))
    groups = tuple(
        Group(w, mode, dtype, tuple(slots[g]), tuple(stored[g]), rule, dynamic)
        for g, (w, mode, dtype, rule, dynamic) in enumerate(kinds)
    )
    orders = tuple(plan.tables[t.name].order_of(t) for t in tables)
    return Layout(tuple(tables), read, world, tuple(strips), tuple(pieces), groups, orders, frozen)


def _check_modes(plan: ShardingPlan, lookups: Sequence[TableLookup]) -> None:
    """Check that mode `pooled` is used only by tables whose lookups are sums.

    Raises:
        PlanError: A table of this mode has another lookup.
    """
    for lookup in lookups:
        if plan.tables[lookup.table.name].mode != "pooled":
            continue
        if lookup.table.dynamic is not None:
            raise PlanError(
                f"table {lookup.table.name}: mode pooled, but the table is dynamic, and ranks "
                "request its rows one by one: set the mode to unique or auto"
            )
        if not lookup.is_summed:
            raise PlanError(
                f"table {lookup.table.name}: mode pooled, but its lookup {lookup.output} is "
                f"{'a sequence' if not lookup.columns else 'a concatenation'}, whose vectors no "
                "rank sums: set the mode to unique or auto"
            )


Kind = tuple[int, Mode, torch.dtype, int, bool]


def _kind(table: EmbeddingConfig, shard: Shard, plan: ShardingPlan, rule: int) -> Kind:
    mode = plan.tables[table.name].mode
    return len(shard.cols), mode, table.data_type.dtype, rule, table.dynamic is not None


def _place(kind: Kind, frozen: int | None) -> int:
    """Return the place of a group among the others (`Layout.groups`)."""
    is_frozen = kind[3] == frozen
    return 2 + is_frozen if kind[1] == "replicated" else 1 - is_frozen


def _slots(
    lookups: Sequence[TableLookup],
    tables: Sequence[EmbeddingConfig],
    strips: list[Strip],
    groups: int,
) -> list[list[Slot]]:
    """Return the slots of each group, in the order of the lookups."""
    of_table: dict[str, list[tuple[int, Strip]]] = {t.name: [] for t in tables}
    for k, strip in enumerate(strips):
        of_table[tables[strip.table].name].append((k, strip))
    slots: list[list[Slot]] = [[] for _ in range(groups)]
    for i, lookup in enumerate(lookups):
        for k, strip in of_table[lookup.table.name]:
            slots[strip.group].append(Slot(i, k, strip.cols.start))
    return slots
