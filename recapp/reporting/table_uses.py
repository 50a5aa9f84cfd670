"""The uses of tables as readable records: the lookups of each table, its row rule, and the
admission and eviction of the rows of dynamic tables.
"""

from collections.abc import Sequence
from typing import Any

from recapp.optim.rules_by_table import Rules, rule_of
from recapp.tables.config import BAG_POOLINGS, EmbeddingConfig, PoolingType
from recapp.tables.lookups import TableLookup


def table_uses(
    tables: Sequence[EmbeddingConfig], lookups: Sequence[TableLookup], rules: Rules | None
) -> list[dict[str, Any]]:
    """Return a record for each table: its lookups, the name of its row rule, and, if some table is
    dynamic, its rows.

    The list is empty if all tables are used alike: each feature has one lookup per table, all
    lookups have the same pooling (sums or means), all tables have the same row rule, and no table
    is dynamic.

    Args:
        tables: The tables of a model.
        lookups: The lookups of these tables.
        rules: The row rule of all tables, or row rules by table; None if tables are only read.
    """
    of_T = [[x for x in lookups if x.table.name == t.name] for t in tables]
    rule_T = [rule_of(rules, t.name) for t in tables]
    poolings = {x.pooling for x in lookups}
    plain = (
        len(poolings) < 2
        and poolings <= set(BAG_POOLINGS)
        and all(len(own) == len({x.feature for x in own}) for own in of_T)
    )
    grows = any(t.dynamic is not None for t in tables)
    if plain and not grows and len({rule.name for rule in rule_T if rule}) < 2:
        return []
    return [
        {
            "table": t.name,
            "lookups": ", ".join(_words(x) for x in own),
            "rule": rule.name if rule else None,
        }
        | ({"rows": _rows(t)} if grows else {})
        for t, own, rule in zip(tables, of_T, rule_T, strict=True)
    ]


def _rows(table: EmbeddingConfig) -> str:
    """Return the rows of a table in words: `dynamic, seen 3 times, at most 1,000, lru`."""
    rows = table.dynamic
    if rows is None:
        return f"{table.num_embeddings:,}"
    leaves = rows.max_rows is not None or rows.ttl_steps is not None
    said = {
        "dynamic": True,
        f"about {table.num_embeddings:,} expected": rows.max_rows is None,
        f"seen {rows.seen} times ({rows.counter})": rows.seen > 1,
        f"at most {rows.max_rows or 0:,}": rows.max_rows is not None,
        f"{rows.eviction} {rows.ttl_steps or ''}".strip(): leaves,
    }
    return ", ".join(words for words, holds in said.items() if holds)


def _words(lookup: TableLookup) -> str:
    """Return a lookup in words: its feature and its pooling."""
    words = {
        PoolingType.CONCAT: f"concat of {lookup.hotness}",
        PoolingType.NONE: "sequence",
    }
    return f"{lookup.feature} {words.get(lookup.pooling, lookup.pooling)}"
