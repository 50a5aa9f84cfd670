"""A plan as tables for people: what lies where, and what each rank carries."""

from collections.abc import Sequence
from typing import Any

from recapp.optim.rules import RowRule
from recapp.planner.memory import bytes_per_rank, human
from recapp.sharding.plan import Shard, ShardingPlan, TableSharding
from recapp.tables.config import EmbeddingBagConfig

SHOWN_SHARDS = 4        # a table cut into more pieces is told by its first and its count


def plan_rows(tables: Sequence[EmbeddingBagConfig], plan: ShardingPlan) -> list[dict[str, Any]]:
    """A record per table: name, rows, dim, type, weights of the rank that holds most of it, and which rank holds what.

    The mode stands with the type where the type and the default do not say it: `row_wise (pooled)`.
    """
    held = bytes_per_rank(tables, plan, None)
    return [{"table": t.name, "rows": t.num_embeddings, "dim": t.embedding_dim, "type": _type(plan.tables[t.name]),
             "per rank": human(max(h.weights.get(t.name, 0) for h in held)),
             "ranks": where(t, plan.tables[t.name])} for t in tables]


def _type(sharding: TableSharding) -> str:
    return sharding.sharding_type if sharding.mode in ("unique", "replicated") else f"{sharding.sharding_type} ({sharding.mode})"


def where(table: EmbeddingBagConfig, sharding: TableSharding) -> str:
    """Which rank holds what of a table: `0: rows 0-499, 1: rows 500-999`, `0: all`, `all ranks`."""
    if sharding.mode == "replicated":
        return "all ranks"
    shards = [s for s in sharding.shards if len(s.rows) and len(s.cols)]
    told = [f"{s.rank}: {_part(table, s)}" for s in shards[:SHOWN_SHARDS]]
    more = [f"... {len(shards)} shards on {len(sharding.ranks)} ranks"] if len(shards) > SHOWN_SHARDS else []
    return ", ".join(told + more)


def _part(table: EmbeddingBagConfig, s: Shard) -> str:
    rows = "" if len(s.rows) == table.num_embeddings else f"rows {s.rows.start}-{s.rows.stop - 1}"
    cols = "" if len(s.cols) == table.embedding_dim else f"cols {s.cols.start}-{s.cols.stop - 1}"
    return " ".join(p for p in (rows, cols) if p) or "all"


def rank_rows(tables: Sequence[EmbeddingBagConfig], plan: ShardingPlan, rule: RowRule | None) -> list[dict[str, Any]]:
    """A record per rank: tables held, bytes of weights, of optimiser state, and of both."""
    rows = []
    for rank, held in enumerate(bytes_per_rank(tables, plan, rule)):
        weights, state = sum(held.weights.values()), sum(held.state.values())
        rows.append({"rank": rank, "tables": len(held.weights), "weights": human(weights), "optimiser_state": human(state),
                     "bytes": weights + state})
    return rows
