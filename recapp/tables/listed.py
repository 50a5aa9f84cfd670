"""Tables and lookups that settings list.

    tables                                   lookups
    {name, num_embeddings, embedding_dim}    {table, feature, output, combiner}

Without lookups, each of a table's `feature_names` reads the table once. Listed lookups give the
order of the lookups and of their vectors; then tables need no `feature_names`. Lookups that do not
pool, or whose table or lookup names a `collection`, are in a collection of their own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from recapp.console import note_once
from recapp.errors import ConfigError, suggest
from recapp.tables.config import (
    EmbeddingConfig,
    PoolingType,
    check_max_key,
    check_tables,
    table_config,
)
from recapp.tables.lookups import TableLookup, output_of
from recapp.tables.named_collections import ModelTables, model_tables, usual_collection


def listed_tables(
    tables: Sequence[Mapping[str, Any]], lookups: Sequence[Mapping[str, Any]] | None
) -> ModelTables:
    """Return the tables that lookups read, and the lookups by collection.

    A table that no lookup reads is left out, and a note says so.

    Args:
        tables: The tables in the form of settings.
        lookups: The lookups in the form of settings; None takes one lookup for each table and
            feature of its `feature_names`.

    Raises:
        ConfigError: An entry is wrong, or a lookup reads a table that is not listed.
    """
    entries = _named(tables)
    read = _read(entries, lookups)
    collection_of = {name: entry.pop("collection", None) for name, entry in entries.items()}
    made = []
    for name, entry in entries.items():
        features = dict.fromkeys(each["feature"] for each in read if each["table"] == name)
        said = entry.pop("feature_names", None)
        if features or lookups is None:
            made.append(_table(entry, said or list(features)))
        else:
            note_once(f"table {name} is read by no lookup: it is left out")
    check_tables(made)
    by_name = {table.name: table for table in made}
    for entry in read:
        table = by_name[entry["table"]]
        entry["combiner"] = PoolingType(entry.get("combiner") or table.pooling)
        entry["collection"] = (
            entry.get("collection")
            or collection_of[table.name]
            or usual_collection(entry["combiner"])
        )
    return model_tables(made, _lookups(read, by_name))


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
    return {entry["feature"] for entry in _read(entries, lookups) if entry["table"] in rows}


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


def _read(
    tables: Mapping[str, Mapping[str, Any]], lookups: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return the entry of each lookup.

    Args:
        tables: The entry of each table by name.
        lookups: The listed lookups; None takes those of `feature_names`.
    """
    if lookups is None:
        return [
            {"table": name, "feature": feature}
            for name, entry in tables.items()
            for feature in (entry["feature_names"] or [name] if "feature_names" in entry else ())
        ]
    for place, entry in enumerate(lookups):
        where = f"tables.lookups[{place}]"
        for key in ("table", "feature"):
            if key not in entry:
                raise ConfigError(f"{where}.{key} must be given")
        if entry["table"] not in tables:
            raise ConfigError(
                f"{where} reads table {entry['table']}, which is not listed; "
                f"{suggest(str(entry['table']), tables)}"
            )
    return [dict(entry) for entry in lookups]


def _table(entry: dict[str, Any], features: Sequence[str]) -> EmbeddingConfig:
    name = entry["name"]
    for key in ("num_embeddings", "embedding_dim"):
        if key not in entry:
            raise ConfigError(f"tables.{name}.{key} must be given")
    if not features:
        raise ConfigError(
            f"tables.{name}.feature_names must be given: the features that read the table, or "
            "list what reads it in tables.lookups"
        )
    most = entry.pop("max_key", None)
    made = table_config(feature_names=features, **entry)
    if most is not None:
        check_max_key(made, most)
    return made


def _lookups(
    read: Sequence[Mapping[str, Any]], tables: Mapping[str, EmbeddingConfig]
) -> list[tuple[str, TableLookup]]:
    """Return the lookups, each after the name of its collection."""
    features: dict[str, list[str]] = {}
    for entry in read:
        features.setdefault(entry["collection"], []).append(entry["feature"])
    made = []
    for entry in read:
        name = entry["collection"]
        usual = output_of(entry["table"], entry["feature"], features[name])
        lookup = TableLookup(
            tables[entry["table"]],
            entry["feature"],
            entry.get("output") or usual,
            entry["combiner"],
            entry.get("hotness"),
            entry.get("truncates") or False,
        )
        made.append((name, lookup))
    return made
