"""A shard is a rectangle of one table. A plan is rectangles for all tables. A sharding type is only
a way to cut tables.

    table of 6 rows x 4 columns        a tiling                 what runs it
    . . . .                            0 0 1 1                  Shard(rank 0, rows 0..3, cols 0..2)
    . . . .                            0 0 1 1                  Shard(rank 1, rows 0..3, cols 2..4)
    . . . .            ->              0 0 1 1           ->     Shard(rank 1, rows 3..6, cols 0..4)
    . . . .                            1 1 1 1
    . . . .                            1 1 1 1
    . . . .                            1 1 1 1

Layout, exchange, checkpoint and report read rectangles; the name of the type is a label for people.
A plan that no named type makes runs as well. `TableSharding.cells` proves that the rectangles tile
the table exactly once.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import pairwise, product
from typing import Any, Literal, get_args

from recapp.errors import PlanError, suggest
from recapp.sharding.sharding_types import (
    COLUMN_WIDTH,
    CandidateRanks,
    TableToCut,
    sharding_type,
)
from recapp.tables.config import EmbeddingConfig, table_config
from recapp.tables.positions import ROW_ORDERS, RowOrder, RowOrderName, mixed_order

# The mode in which a table asks for rows. `unique`: a vector per distinct row, pooled at home.
# `pooled`: a vector per bag and owner, pooled at the owner. `replicated`: rows are read at home,
# and the gradients of all ranks update every rank. `auto`: unique or pooled; the planner decides
# before the plan is used (`recapp/planner/choose_modes.py`).
Mode = Literal["unique", "pooled", "replicated", "auto"]


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows x columns of one table on one rank.

    Args:
        rank: The rank that holds the rectangle.
        rows: The rows. If the plan mixes rows, their positions (`recapp/tables/positions.py`); for
            a dynamic table, its stretches (`recapp/tables/positions.py`).
        cols: The columns.
    """

    rank: int
    rows: range
    cols: range

    @property
    def placement(self) -> str:
        """Return the rank in the form of TorchRec's plans: `rank:1`."""
        return f"rank:{self.rank}"

    @property
    def shard_offsets(self) -> list[int]:
        """Return the first row and column of the shard."""
        return [self.rows.start, self.cols.start]

    @property
    def shard_sizes(self) -> list[int]:
        """Return the numbers of rows and columns of the shard."""
        return [len(self.rows), len(self.cols)]


@dataclass(frozen=True, slots=True)
class TableSharding:
    """The rectangles of one table, and its mode.

    Args:
        shards: The rectangles. They cover the table once; replicas cover it once on every rank.
        mode: The mode in which the table asks for rows.
        sharding_type: A label for people (table_wise, ..., custom); no code branches on it.
        row_order: "natural": the rows of rectangles are rows of the table. "mixed": they are
            positions, over which rows are dealt (`recapp/tables/positions.py`).
        as_parameter: Whether the table, whole on every rank, is a parameter with a gradient for an
            optimiser of the user's; else backward updates the table.
    """

    shards: tuple[Shard, ...]
    mode: Mode = "unique"
    sharding_type: str = "custom"
    row_order: RowOrderName = "natural"
    as_parameter: bool = False

    @property
    def sharding_spec(self) -> "TableSharding":
        """Return this record, which has the `shards`: TorchRec's plans have a second record for
        them.
        """
        return self

    @property
    def compute_kernel(self) -> str:
        """Return the name of the kernel in TorchRec's plans: `dense` for replicas, else `fused`."""
        return "dense" if self.mode == "replicated" else "fused"

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise PlanError(f"mode={self.mode}: {suggest(self.mode, get_args(Mode))}")
        if self.row_order not in ROW_ORDERS:
            raise PlanError(f"row_order={self.row_order}: {suggest(self.row_order, ROW_ORDERS)}")

    def order_of(self, table: EmbeddingConfig) -> RowOrder | None:
        """Return the order of a table's rows; None if they lie by number.

        Raises:
            PlanError: The plan mixes the rows of a dynamic table.
        """
        if self.row_order == "natural":
            return None
        if table.dynamic is not None:
            raise PlanError(
                f"table {table.name}: row_order=mixed, but the table is dynamic, and its keys "
                "are mixed in any case: leave row_order out"
            )
        return mixed_order(table.name, table.num_embeddings)

    @property
    def label(self) -> str:
        """Return the sharding type and the row order as a label for people."""
        mixed = ", mixed rows" if self.row_order == "mixed" else ""
        return f"{self.sharding_type}{mixed}"

    @property
    def ranks(self) -> list[int]:
        """Return the ranks that hold a shard, ascending."""
        return sorted({s.rank for s in self.shards if len(s.rows) and len(s.cols)})

    def cells(self, table: EmbeddingConfig, world: int) -> list[Shard]:
        """Return the tiling, refined along every edge of every shard and ordered by column, row and
        rank. All strips then have the same row cuts.

        Args:
            table: The table.
            world: The number of ranks.

        Raises:
            PlanError: A shard lies on a rank that does not exist or extends beyond the table, or
                shards leave a hole or overlap.
        """
        shards = [s for s in self.shards if len(s.rows) and len(s.cols)]
        for s in shards:
            if not 0 <= s.rank < world:
                raise PlanError(
                    f"table {table.name}: a shard lies on rank {s.rank}, but there are {world} "
                    f"ranks (0..{world - 1}): set trainer.devices={s.rank + 1} or change the plan"
                )
        row = sorted(
            {0, table.plan_rows, *(e for s in shards for e in (s.rows.start, s.rows.stop))}
        )
        col = sorted(
            {0, table.embedding_dim, *(e for s in shards for e in (s.cols.start, s.cols.stop))}
        )
        if (row[0], row[-1], col[0], col[-1]) != (0, table.plan_rows, 0, table.embedding_dim):
            raise PlanError(
                f"table {table.name}: a shard reaches outside its {table.plan_rows} rows x "
                f"{table.embedding_dim} columns"
            )
        cells = [
            Shard(s.rank, range(*r), range(*c))
            for s in shards
            for c in _between(col, s.cols)
            for r in _between(row, s.rows)
        ]
        copies = range(world) if self.mode == "replicated" else [-1]
        count = Counter(
            (s.rows.start, s.cols.start, s.rank if self.mode == "replicated" else -1) for s in cells
        )
        for r, c, k in product(row[:-1], col[:-1], copies):
            if count[r, c, k] != 1:
                where = f" on rank {k}" if k >= 0 else ""
                raise PlanError(
                    f"table {table.name}: the cell that starts at row {r}, column {c} is held "
                    f"{count[r, c, k]} times{where}; a plan must tile a table exactly once"
                )
        return sorted(cells, key=lambda s: (s.cols.start, s.rows.start, s.rank))


def _between(cuts: list[int], part: range) -> Iterator[tuple[int, int]]:
    return pairwise(cuts[bisect_left(cuts, part.start) : bisect_left(cuts, part.stop) + 1])


# The fields of a table that are kept only if they are set; a function cannot be kept.
_LEFT_OUT = ("dynamic", "weight_init_max", "weight_init_min", "init_fn")


@dataclass(frozen=True)
class PlannedFor:
    """The tables, batch and ids for which a plan was made. With this record a plan can be explained
    without the model and the data.

    Args:
        tables: The configs of the tables, in the model's order.
        batch_per_rank: The batch per rank B, in samples; None if it is unknown.
        statistics: Id statistics by table name, as plain values: `ids_per_sample`,
            `bags_per_sample`, `distinct`, `load`.
    """

    tables: tuple[EmbeddingConfig, ...]
    batch_per_rank: int | None = None
    statistics: Mapping[str, Any] = field(default_factory=dict)

    def part(self, names: Sequence[str]) -> "PlannedFor":
        """Return the part for some of the tables."""
        return replace(
            self,
            tables=tuple(t for t in self.tables if t.name in names),
            statistics={n: s for n, s in self.statistics.items() if n in names},
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain values."""
        tables = [
            {
                key: str(value) if isinstance(value, StrEnum) else value
                for key, value in asdict(replace(t, init_fn=None)).items()
                if value is not None or key not in _LEFT_OUT
                if key != "need_pos"
            }
            for t in self.tables
        ]
        return {
            "tables": tables,
            "batch_per_rank": self.batch_per_rank,
            "statistics": dict(self.statistics),
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "PlannedFor":
        """Return the record from the plain values of `to_dict`."""
        return PlannedFor(
            tuple(table_config(**t) for t in values["tables"]),
            values["batch_per_rank"],
            values["statistics"],
        )


@dataclass(frozen=True)
class ShardingPlan:
    """The shardings of all tables for a number of ranks.

    Args:
        tables: The sharding of each table, by table name.
        world_size: The number of ranks W.
        name: The name of the plan in reports and in `metrics.json`.
        notes: Sentences for people about the whole plan.
        reasons: The reason for each table's sharding, by table name: the plan rule that applied, or
            the planner's comparison.
        made_for: The tables, batch and id statistics for which the plan was made.
        modules: The names of the tables of each collection, by the path of the collection in the
            planned model; empty for a plan of tables alone.
    """

    tables: Mapping[str, TableSharding]
    world_size: int
    name: str = "custom"
    notes: Sequence[str] = field(default=(), compare=False)
    reasons: Mapping[str, str] = field(default_factory=dict, compare=False)
    made_for: PlannedFor | None = field(default=None, compare=False)
    modules: Mapping[str, Sequence[str]] = field(default_factory=dict, compare=False)

    def check(self, tables: Sequence[EmbeddingConfig]) -> None:
        """Check that the plan names exactly these tables and tiles each table once.

        Raises:
            PlanError: It does not; the message names the table.
        """
        names = [t.name for t in tables]
        for name in self.tables:
            if name not in names:
                raise PlanError(
                    f"the plan shards table {name}, which the model does not have; "
                    f"{suggest(name, names)}"
                )
        for t in tables:
            if t.name not in self.tables:
                raise PlanError(f"the plan has no entry for table {t.name}")
            self.tables[t.name].cells(t, self.world_size)
            self.tables[t.name].order_of(t)

    @property
    def plan(self) -> dict[str, dict[str, TableSharding]]:
        """Return the sharding of each table, by the path of its collection and by table name.

        This is the form of TorchRec's plans. Without `modules` the path of all tables is empty.
        """
        modules = self.modules or {"": list(self.tables)}
        return {
            path: {name: self.tables[name] for name in names} for path, names in modules.items()
        }

    def __str__(self) -> str:
        """Return a line for every table."""
        rows = [("table", "sharding type", "mode", "ranks", "shards")]
        for name, s in self.tables.items():
            shards = [p for p in s.shards if len(p.rows) and len(p.cols)]
            ranks = ", ".join(map(str, s.ranks))
            rows.append((name, s.label, s.mode, ranks, str(len(shards))))
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        head = f"plan {self.name} for {self.world_size} rank{'s' if self.world_size > 1 else ''}"
        return "\n".join([head, *lines])

    def items(self) -> ItemsView[str, TableSharding]:
        """Return the names of the tables with their shardings."""
        return self.tables.items()

    @property
    def undecided(self) -> list[str]:
        """Return the names of the tables whose mode is still open."""
        return [name for name, s in self.tables.items() if s.mode == "auto"]

    def with_modes(self, modes: Mapping[str, Mode]) -> "ShardingPlan":
        """Return the plan with other modes for some tables, by table name."""
        return replace(
            self, tables={n: replace(s, mode=modes.get(n, s.mode)) for n, s in self.tables.items()}
        )

    def part(self, names: Sequence[str]) -> "ShardingPlan":
        """Return the plan of some of the tables, by name."""
        return replace(
            self,
            tables={n: s for n, s in self.tables.items() if n in names},
            reasons={n: why for n, why in self.reasons.items() if n in names},
            made_for=self.made_for.part(names) if self.made_for else None,
            modules={
                path: [n for n in of_module if n in names]
                for path, of_module in self.modules.items()
            },
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, the form in which a checkpoint stores it. Empty notes,
        reasons and `made_for` are omitted.
        """
        optional = {
            "notes": list(self.notes),
            "reasons": dict(self.reasons),
            "made_for": self.made_for and self.made_for.to_dict(),
        }
        return {
            "name": self.name,
            "world_size": self.world_size,
            "tables": {
                name: {
                    "sharding_type": s.sharding_type,
                    "mode": s.mode,
                    "shards": [
                        [p.rank, p.rows.start, p.rows.stop, p.cols.start, p.cols.stop]
                        for p in s.shards
                    ],
                }
                | ({"row_order": s.row_order} if s.row_order != "natural" else {})
                | ({"as_parameter": True} if s.as_parameter else {})
                for name, s in self.tables.items()
            },
        } | {key: value for key, value in optional.items() if value}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "ShardingPlan":
        """Return the plan from the plain values of `to_dict`."""

        def shards(table: Mapping[str, Any]) -> tuple[Shard, ...]:
            return tuple(
                Shard(rank, range(r0, r1), range(c0, c1))
                for rank, r0, r1, c0, c1 in table["shards"]
            )

        tables = {
            name: TableSharding(
                shards(s),
                s["mode"],
                s["sharding_type"],
                s.get("row_order", "natural"),
                s.get("as_parameter", False),
            )
            for name, s in values["tables"].items()
        }
        made_for = values.get("made_for")
        return ShardingPlan(
            tables,
            values["world_size"],
            values["name"],
            values.get("notes", ()),
            values.get("reasons", {}),
            PlannedFor.from_dict(made_for) if made_for else None,
        )


MODES = tuple(mode for mode in get_args(Mode) if mode != "replicated")


def tile(
    table: EmbeddingConfig,
    type_name: str,
    ranks: CandidateRanks,
    mode: str = "unique",
    *,
    column_width: int = COLUMN_WIDTH,
    row_order: RowOrderName = "natural",
) -> TableSharding:
    """Cut one table by a named sharding type.

    The first block takes the first of its sets of candidate ranks, the second block the second set,
    and so on; after the last set the first follows again. A caller that balances puts the least
    loaded ranks first.

    Args:
        table: The table.
        type_name: The sharding type, a key of `SHARDING_TYPES`.
        ranks: The ranks and hosts on which the table may lie, in the order of preference.
        mode: "unique", "pooled" or "auto"; a type that replicates is always "replicated".
        column_width: Columns of a vertical strip.
        row_order: "mixed" deals the rows over several strips. Keys of dynamic tables are always
            mixed.

    Raises:
        PlanError: The type, mode or order is unknown, a strip would have no columns, or the type
            cannot cut the table on so few ranks.
    """
    record = sharding_type(type_name, f"table {table.name}")
    if column_width < 1:
        raise PlanError(f"plan.column_width={column_width}: must be at least 1")
    if mode not in MODES:
        raise PlanError(f"table {table.name}: plan.mode={mode}: {suggest(mode, MODES)}")
    if row_order not in ROW_ORDERS:
        raise PlanError(
            f"table {table.name}: plan.row_order={row_order}: {suggest(row_order, ROW_ORDERS)}"
        )
    blocks = record.cut(TableToCut(table.plan_rows, table.embedding_dim, ranks, column_width))
    if not blocks:
        raise PlanError(
            f"table {table.name}: {record.name} cannot cut it on {len(ranks.each_rank)} ranks: "
            "choose another type or more ranks"
        )
    shards = tuple(
        Shard(rank, range(*rows), block.columns)
        for number, block in enumerate(blocks)
        for rank, rows in zip(
            block.candidates[number % len(block.candidates)].tolist(),
            block.rows.tolist(),
            strict=True,
        )
    )
    if record.replicated:
        mode = "replicated"
    if table.dynamic is not None or len({s.rows.start for s in shards}) == 1:
        row_order = "natural"
    return TableSharding(shards, mode, record.name, row_order)  # type: ignore[arg-type]
