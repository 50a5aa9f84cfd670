"""Tables and lookups that settings list, in recapp's words or in those of HugeCTR.

    tables                                              lookups
    {name, num_embeddings, embedding_dim}               {table, feature, output, combiner}
    {table_id, max_vocabulary_size, ev_size, min_key}   {table_config, bottom_name, top_name, ...}

Without lookups each table is read once by each of its `feature_names`. Lookups that are listed are
numbered, and their vectors ordered, as they stand; then tables need no `feature_names`.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from recapp.console import note_once
from recapp.errors import ConfigError, suggest
from recapp.tables.config import (
    EmbeddingBagConfig,
    PoolingType,
    check_max_key,
    check_tables,
)
from recapp.tables.dynamic import DYNAMIC
from recapp.tables.lookups import TableLookup, lookups_of

TABLE_WORDS = {
    "name": "name",
    "num_embeddings": "num_embeddings",
    "max_vocabulary_size": "num_embeddings",
    "embedding_dim": "embedding_dim",
    "ev_size": "embedding_dim",
}
LOOKUP_WORDS = {
    "table": "table",
    "table_config": "table",
    "emb_table": "table",
    "feature": "feature",
    "input": "feature",
    "bottom_name": "feature",
    "output": "output",
    "top_name": "output",
    "combiner": "combiner",
    "hotness": "hotness",
    "truncates": "truncates",
}
"""What every name of a value is called here."""


def pooling_of(combiner: str, where: str) -> PoolingType:
    """Return how a combiner of HugeCTR makes one vector of a bag's rows.

    Args:
        combiner: Its name there or here: `average` is `mean`.
        where: What has it, for errors.

    Raises:
        ConfigError: There is none of this name.
    """
    if combiner == "none":
        raise ConfigError(
            f"{where}.combiner=none: a sequence is no bag: list its table in an EmbeddingCollection"
        )
    known = {"sum": "sum", "mean": "mean", "average": "mean", "concat": "concat"}
    if combiner not in known:
        raise ConfigError(f"{where}.combiner={combiner}: {suggest(str(combiner), known)}")
    return PoolingType(known[combiner])


def rows_of(rows: Any) -> Any:
    """Return a number of rows in recapp's words: HugeCTR's -1 is a table that grows."""
    return DYNAMIC if rows == -1 else rows


def listed_tables(
    tables: Sequence[Mapping[str, Any]], lookups: Sequence[Mapping[str, Any]] | None
) -> tuple[list[EmbeddingBagConfig], tuple[TableLookup, ...]]:
    """Return the tables that somebody reads, and what reads them.

    A table that no lookup reads is left out, and a note says so.

    Args:
        tables: The tables as settings list them.
        lookups: The lookups as settings list them; None takes what `feature_names` say.

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
    """Return the features whose ids some listed table takes for rows; arguments as of
    `listed_tables`, and of tables no more than their features and id rules is looked at.
    """
    entries = _named(tables)
    rows = {n for n, entry in entries.items() if entry.get("id_rule", "error") != "hash"}
    if lookups is None:
        return {f for n in rows for f in entries[n].get("feature_names", ())}
    read = [_lookup_entry(values, k, entries) for k, values in enumerate(lookups)]
    return {entry["feature"] for entry in read if entry["table"] in rows}


def table_name(
    name: str | None, table_id: int | None, id_space: int | None, taken: Collection[str]
) -> str:
    """Return the name of a table that HugeCTR's programs may know by a number alone.

    Args:
        name: Its name.
        table_id: Its number among the tables.
        id_space: The number of the set of keys that it is read by, which several tables may share.
        taken: The names of the tables before it; their count is the number where there is none.
    """
    if name is not None:
        return name
    if table_id is not None:
        return f"table_{table_id}"
    base = f"table_{len(taken) if id_space is None else id_space}"
    free = (n for n in (base, *(f"{base}_{k}" for k in range(1, len(taken) + 1))) if n not in taken)
    return next(free)


def in_our_words(values: Mapping[str, Any], words: Mapping[str, str], where: str) -> dict[str, Any]:
    """Return values under the names that they have here; what `words` does not know stays.

    Raises:
        ConfigError: Two names of one value are given.
    """
    made: dict[str, Any] = {}
    said: dict[str, str] = {}
    for key, value in values.items():
        ours = words.get(key, key)
        if ours in made:
            raise ConfigError(f"{where}: {said[ours]} and {key} are one value: give one of them")
        made[ours] = value
        said[ours] = key
    return made


def _named(tables: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what is said of each table in recapp's words, by its name."""
    entries = dict[str, dict[str, Any]]()
    for values in tables:
        entry = _table_entry(values, entries)
        if entry["name"] in entries:
            raise ConfigError(
                f"tables: two tables are called {entry['name']}; names must be unique"
            )
        entries[entry["name"]] = entry
    return entries


def _table_entry(values: Mapping[str, Any], before: Collection[str]) -> dict[str, Any]:
    """Return what is said of a table in recapp's words, with a name."""
    where = f"tables.tables[{len(before)}]"
    entry = in_our_words(values, TABLE_WORDS, where)
    table_id = entry.pop("table_id", None)
    id_space = entry.pop("id_space", None)
    entry["name"] = table_name(entry.get("name"), table_id, id_space, before)
    return entry


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
    rows = rows_of(entry.pop("num_embeddings"))
    made = EmbeddingBagConfig(num_embeddings=rows, feature_names=features, **entry)
    if most is not None:
        check_max_key(made, most)
    return made


def _lookup_entry(
    values: Mapping[str, Any], place: int, tables: Mapping[str, Any]
) -> dict[str, Any]:
    where = f"tables.lookups[{place}]"
    entry = in_our_words(values, LOOKUP_WORDS, where)
    for key in ("table", "feature"):
        if key not in entry:
            raise ConfigError(f"{where}.{key} must be given")
    if entry["table"] not in tables:
        raise ConfigError(
            f"{where} reads table {entry['table']}, which is not listed; "
            f"{suggest(str(entry['table']), tables)}"
        )
    if entry.get("combiner") is not None:
        entry["combiner"] = pooling_of(entry["combiner"], where)
    return entry


def _lookups(
    read: Sequence[Mapping[str, Any]], tables: Mapping[str, EmbeddingBagConfig]
) -> tuple[TableLookup, ...]:
    """Return the lookups, those without an output called as `lookups_of` calls them."""
    features = [entry["feature"] for entry in read]
    made = []
    for entry in read:
        table = tables[entry["table"]]
        feature = entry["feature"]
        own = f"{feature}@{table.name}" if features.count(feature) > 1 else feature
        made.append(
            TableLookup(
                table,
                feature,
                entry.get("output") or own,
                entry.get("combiner") or table.pooling,
                entry.get("hotness"),
                entry.get("truncates") or False,
            )
        )
    return tuple(made)
