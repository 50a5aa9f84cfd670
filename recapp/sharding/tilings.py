"""Cut one table by a sharding type and take the first candidate ranks of each block."""

from typing import get_args

from recapp.errors import PlanError, suggest
from recapp.sharding.sharding_plan import Mode, Shard, TableSharding
from recapp.sharding.sharding_types import (
    COLUMN_WIDTH,
    CandidateRanks,
    TableToCut,
    sharding_type,
)
from recapp.tables.config import EmbeddingConfig
from recapp.tables.row_order import ROW_ORDERS, RowOrderName

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
