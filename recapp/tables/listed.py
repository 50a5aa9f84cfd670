"""Tables and lookups that settings list.

    tables                                   lookups
    {name, num_embeddings, embedding_dim}    {table, feature, output, combiner}

Without lookups, each of a table's `feature_names` reads the table once. Listed lookups give the
order of the lookups and of their vectors; then tables need no `feature_names`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from recapp.console import note_once
from recapp.errors import ConfigError, suggest
from recapp.tables.config import (
    EmbeddingBagConfig,
    PoolingType,
    check_max_key,
    check_tables,
)
from recapp.tables.lookups import TableLookup, lookups_of, output_of


def listed_tables(
    tables: Sequence[Mapping[str, Any]], lookups: Sequence[Mapping[str, Any]] | None
) -> tuple[list[EmbeddingBagConfig], tuple[TableLookup, ...]]:
    """Return the tables that lookups read, and the lookups.

    A table that no lookup reads is left out, and a note says so.

    Args:
        tables: The tables in the form of settings.
        lookups: The lookups in the form of settings; None takes one lookup for each table and
            feature of its `feature_names`.

    Raises:
        ConfigError: An entry is wrong, or a lookup reads a table that is not listed.
    """
    entries = _named(tables)
    if lookups is None:
        made = [_table(entry, entry.pop("feature_names", None)) for entry in entries.values()]
        return made, lookups_of(made)
    read = [_lookup_entry(values, k, entries) for k, values in enumerate(lookups)]
    features: dict[str, list[str]] = {}
    for entry in read:
        known = features.setdefault(entry["table"], [])
        known += [entry["feature"]] if entry["feature"] not in known else []
    made = []
    for name, entry in entries.items():
        said = entry.pop("feature_names", None)
        if name in features:
            made.append(_table(entry, said or features[name]))
        else:
            note_once(f"table {name} is read by no lookup: it is left out")
    check_tables(made)
    return made, _lookups(read, {table.name: table for table in made})


def row_features(
    tables: Sequence[Mapping[str, Any]], lookups: Sequence[Mapping[str, Any]] | None
) -> set[str]:
    """Return the features whose ids are rows of a listed table.

    Args:
        tables: The tables in the form of settings, of which it reads names, features and id rules.
        lookups: The lookups in the form of settings; None takes those of `feature_names`.
    """
    entries = _named(tables)
    rows = {n for n, entry in entries.items() if entry.get("id_rule", "error") != "hash"}
    if lookups is None:
        return {f for n in rows for f in entries[n].get("feature_names", ())}
    read = [_lookup_entry(values, k, entries) for k, values in enumerate(lookups)]
    return {entry["feature"] for entry in read if entry["table"] in rows}


def _named(tables: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the entry of each table by the table's name."""
    entries = dict[str, dict[str, Any]]()
    for values in tables:
        if values["name"] in entries:
            raise ConfigError(
                f"tables: two tables are called {values['name']}; names must be unique"
            )
        entries[values["name"]] = dict(values)
    return entries


def _table(entry: dict[str, Any], features: Sequence[str] | None) -> EmbeddingBagConfig:
    name = entry["name"]
    for key in ("num_embeddings", "embedding_dim"):
        if key not in entry:
            raise ConfigError(f"tables.{name}.{key} must be given")
    if features is None:
        raise ConfigError(
            f"tables.{name}.feature_names must be given: the features that read the table, or "
            "list what reads it in tables.lookups"
        )
    most = entry.pop("max_key", None)
    made = EmbeddingBagConfig(feature_names=features, **entry)
    if most is not None:
        check_max_key(made, most)
    return made


def _lookup_entry(
    values: Mapping[str, Any], place: int, tables: Mapping[str, Any]
) -> dict[str, Any]:
    where = f"tables.lookups[{place}]"
    entry = dict(values)
    for key in ("table", "feature"):
        if key not in entry:
            raise ConfigError(f"{where}.{key} must be given")
    if entry["table"] not in tables:
        raise ConfigError(
            f"{where} reads table {entry['table']}, which is not listed; "
            f"{suggest(str(entry['table']), tables)}"
        )
    if entry.get("combiner") is not None:
        entry["combiner"] = PoolingType(entry["combiner"])
    return entry


def _lookups(
    read: Sequence[Mapping[str, Any]], tables: Mapping[str, EmbeddingBagConfig]
) -> tuple[TableLookup, ...]:
    """Return the lookups."""
    features = [entry["feature"] for entry in read]
    return tuple(
        TableLookup(
            tables[entry["table"]],
            entry["feature"],
            entry.get("output") or output_of(entry["table"], entry["feature"], features),
            entry.get("combiner") or tables[entry["table"]].pooling,
            entry.get("hotness"),
            entry.get("truncates") or False,
        )
        for entry in read
    )
