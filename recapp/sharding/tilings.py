"""The named sharding types: six ways to cut a table into rectangles and to place them.

| type           | rectangles                                                                   |
|----------------|------------------------------------------------------------------------------|
| table_wise     | one, on one rank                                                             |
| column_wise    | vertical strips, dealt over the ranks                                        |
| row_wise       | horizontal strips over all ranks                                             |
| table_row_wise | horizontal strips over the ranks of one host                                 |
| grid_shard     | vertical strips, each cut into horizontal strips over the ranks of one host  |
| data_parallel  | the whole table on every rank                                                |

A function takes the table, the free ranks in the order in which they should be used (least loaded
first) and the hosts likewise, so that who decides about balance (`recapp/planner`) and what a type
means stay apart. Source of the vocabulary: TorchRec's ShardingType.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from recapp.errors import PlanError, suggest
from recapp.sharding.sharding_plan import Shard, TableSharding
from recapp.tables.config import EmbeddingBagConfig

# columns of a strip unless set: 256 columns make four; 64 fp32 are four cache lines
COLUMN_WIDTH = 64


class ShardingType(StrEnum):
    """The six named types; values as TorchRec spells them."""

    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    GRID_SHARD = "grid_shard"
    DATA_PARALLEL = "data_parallel"


@dataclass(frozen=True)
class Places:
    """Where shards may go: ranks and hosts, those that should be used first in front.

    Args:
        ranks: every rank, least loaded first.
        hosts: the ranks of every host, least loaded host first.
        column_width: columns of a vertical strip.
    """

    ranks: Sequence[int]
    hosts: Sequence[Sequence[int]]
    column_width: int = COLUMN_WIDTH


def cut(total: int, parts: int) -> list[range]:
    """At most `parts` contiguous ranges of equal length, the last one shorter."""
    block = -(-total // parts)
    return [range(i, min(i + block, total)) for i in range(0, total, block)]


def strips(table: EmbeddingBagConfig, width: int) -> list[range]:
    """Vertical strips of `width` columns, the last one narrower."""
    return [
        range(c, min(c + width, table.embedding_dim)) for c in range(0, table.embedding_dim, width)
    ]


def _table_wise(t: EmbeddingBagConfig, p: Places) -> list[Shard]:
    return [Shard(p.ranks[0], range(t.num_embeddings), range(t.embedding_dim))]


def _column_wise(t: EmbeddingBagConfig, p: Places) -> list[Shard]:
    return [
        Shard(p.ranks[i % len(p.ranks)], range(t.num_embeddings), cols)
        for i, cols in enumerate(strips(t, p.column_width))
    ]


def _row_wise(t: EmbeddingBagConfig, p: Places) -> list[Shard]:
    ranks = sorted(p.ranks)
    return [
        Shard(k, rows, range(t.embedding_dim))
        for k, rows in zip(ranks, cut(t.num_embeddings, len(ranks)), strict=False)
    ]


def _table_row_wise(t: EmbeddingBagConfig, p: Places) -> list[Shard]:
    host = sorted(p.hosts[0])
    return [
        Shard(k, rows, range(t.embedding_dim))
        for k, rows in zip(host, cut(t.num_embeddings, len(host)), strict=False)
    ]


def _grid_shard(t: EmbeddingBagConfig, p: Places) -> list[Shard]:
    shards = []
    for i, cols in enumerate(strips(t, p.column_width)):
        host = sorted(p.hosts[i % len(p.hosts)])
        shards += [
            Shard(k, rows, cols)
            for k, rows in zip(host, cut(t.num_embeddings, len(host)), strict=False)
        ]
    return shards


def _data_parallel(t: EmbeddingBagConfig, p: Places) -> list[Shard]:
    return [Shard(k, range(t.num_embeddings), range(t.embedding_dim)) for k in sorted(p.ranks)]


_TILINGS: dict[ShardingType, Callable[[EmbeddingBagConfig, Places], list[Shard]]] = {
    ShardingType.TABLE_WISE: _table_wise,
    ShardingType.COLUMN_WISE: _column_wise,
    ShardingType.ROW_WISE: _row_wise,
    ShardingType.TABLE_ROW_WISE: _table_row_wise,
    ShardingType.GRID_SHARD: _grid_shard,
    ShardingType.DATA_PARALLEL: _data_parallel,
}


def tile(
    table: EmbeddingBagConfig, sharding_type: str, places: Places, mode: str = "unique"
) -> TableSharding:
    """Cut one table as a named type does.

    Args:
        table: to be cut.
        sharding_type: a value of `ShardingType`.
        places: ranks and hosts, least loaded first.
        mode: "unique", "pooled" or "auto"; data_parallel is always "replicated".

    Raises:
        PlanError: an unknown type or mode, a strip of no columns.
    """
    known = [t.value for t in ShardingType]
    if sharding_type not in known:
        raise PlanError(
            f"table {table.name}: unknown sharding type {sharding_type}; "
            f"{suggest(sharding_type, known)}"
        )
    if places.column_width < 1:
        raise PlanError(f"plan.column_width={places.column_width}: must be at least 1")
    if mode not in ("auto", "unique", "pooled"):
        raise PlanError(
            f"table {table.name}: plan.mode={mode}: {suggest(mode, ['auto', 'unique', 'pooled'])}"
        )
    kind = ShardingType(sharding_type)
    shards = tuple(_TILINGS[kind](table, places))
    if kind is ShardingType.DATA_PARALLEL:
        mode = "replicated"
    return TableSharding(shards, mode, kind.value)  # type: ignore[arg-type]
