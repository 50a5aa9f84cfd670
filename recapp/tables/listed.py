"""Tables and lookups that settings list.

    tables                                   lookups
    {name, num_embeddings, embedding_dim}    {table, feature, output, combiner}

Without lookups, each of a table's `feature_names` reads the table once. Listed lookups give the
order of the lookups and of their vectors; then tables need no `feature_names`. Lookups that do not
pool, or whose table or lookup names a `collection`, are in a collection of their own.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from recapp.console import note_once
from recapp.errors import ConfigError, suggest
from recapp.settings.records import to_plain
from recapp.tables.config import (
    EmbeddingConfig,
    PoolingType,
    TableLookup,
    check_max_key,
    check_tables,
    output_of,
    table_config,
)
from recapp.tables.named_collections import ModelTables, model_tables, usual_collection
from recapp.tables.table_settings import ListedLookup, ListedTable, ListedTables

_NO_ARGUMENTS = ("feature_names", "collection", "max_key")
"""The settings of a table that are no argument of its config, or not as they are."""


class _Read(NamedTuple):
    """A feature that reads a table, and the settings of the lookup."""

    table: str
    feature: str
    settings: ListedLookup = ListedLookup()


def listed_tables(listed: ListedTables) -> ModelTables:
    """Return the tables that lookups read, and the lookups by collection.

    A table that no lookup reads is left out, and a note says so.

    Args:
        listed: The tables and lookups of the settings. Without lookups, each table has one lookup
            for each of its `feature_names`.

    Raises:
        ConfigError: A table or a lookup is wrong, or a lookup reads a table that is not listed.
    """
    tables = _by_name(listed.tables)
    reads = _reads(tables, listed.lookups)
    configs = dict[str, EmbeddingConfig]()
    for name, table in tables.items():
        features = dict.fromkeys(read.feature for read in reads if read.table == name)
        if features or listed.lookups is None:
            configs[name] = _config(name, table, table.feature_names or list(features))
        else:
            note_once(f"table {name} is read by no lookup: it is left out")
    check_tables(list(configs.values()))
    named = [
        read.settings.collection
        or tables[read.table].collection
        or usual_collection(_pooling(read, configs))
        for read in reads
    ]
    features_of = dict[str, list[str]]()
    for collection, read in zip(named, reads, strict=True):
        features_of.setdefault(collection, []).append(read.feature)
    lookups = [
        (collection, _lookup(read, configs, features_of[collection]))
        for collection, read in zip(named, reads, strict=True)
    ]
    return model_tables(list(configs.values()), lookups)


def row_features(listed: ListedTables) -> set[str]:
    """Return the features whose ids are rows of a listed table."""
    tables = _by_name(listed.tables)
    reads = _reads(tables, listed.lookups)
    return {read.feature for read in reads if tables[read.table].id_rule != "hash"}


def features_by_table(listed: ListedTables) -> list[list[str]]:
    """Return the features that read each listed table, each once."""
    features = dict[str, list[str]]()
    for read in _reads(_by_name(listed.tables), listed.lookups):
        of_table = features.setdefault(read.table, [])
        if read.feature not in of_table:
            of_table.append(read.feature)
    return list(features.values())


def _by_name(tables: Sequence[ListedTable]) -> dict[str, ListedTable]:
    """Return the tables by name; the config of a table refuses an empty name."""
    by_name = dict[str, ListedTable]()
    for table in tables:
        name = table.name or ""
        if name in by_name:
            raise ConfigError(f"tables: two tables are called {name}; names must be unique")
        by_name[name] = table
    return by_name


def _reads(
    tables: Mapping[str, ListedTable], lookups: Sequence[ListedLookup] | None
) -> list[_Read]:
    """Return the table and the feature of each lookup, in the order of the lookups."""
    if lookups is None:
        return [
            _Read(name, feature)
            for name, table in tables.items()
            if table.feature_names is not None
            for feature in table.feature_names or (name,)
        ]
    reads = []
    for place, lookup in enumerate(lookups):
        where = f"tables.lookups[{place}]"
        if lookup.table is None or lookup.feature is None:
            missing = "table" if lookup.table is None else "feature"
            raise ConfigError(f"{where}.{missing} must be given")
        if lookup.table not in tables:
            raise ConfigError(
                f"{where} reads table {lookup.table}, which is not listed; "
                f"{suggest(lookup.table, tables)}"
            )
        reads.append(_Read(lookup.table, lookup.feature, lookup))
    return reads


def _config(name: str, table: ListedTable, features: Sequence[str]) -> EmbeddingConfig:
    arguments = {key: value for key, value in to_plain(table).items() if key not in _NO_ARGUMENTS}
    for key in ("num_embeddings", "embedding_dim"):
        if key not in arguments:
            raise ConfigError(f"tables.{name}.{key} must be given")
    if not features:
        raise ConfigError(
            f"tables.{name}.feature_names must be given: the features that read the table, or "
            "list its lookups in tables.lookups"
        )
    config = table_config(feature_names=features, **arguments)
    if table.max_key is not None:
        check_max_key(config, table.max_key)
    return config


def _pooling(read: _Read, tables: Mapping[str, EmbeddingConfig]) -> PoolingType:
    return PoolingType(read.settings.combiner or tables[read.table].pooling)


def _lookup(
    read: _Read, tables: Mapping[str, EmbeddingConfig], features: Sequence[str]
) -> TableLookup:
    """Return a lookup.

    Args:
        read: Its table, feature and settings.
        tables: The tables by name.
        features: The features of all lookups of its collection.
    """
    return TableLookup(
        tables[read.table],
        read.feature,
        read.settings.output or output_of(read.table, read.feature, features),
        _pooling(read, tables),
        read.settings.hotness,
        read.settings.truncates or False,
    )
