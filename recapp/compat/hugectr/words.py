"""HugeCTR's words for tables and lookups, and recapp's word for each.

    tables.tables    {table_id: 0, max_vocabulary_size: -1, ev_size: 8}
                  -> {name: table_0, num_embeddings: dynamic, embedding_dim: 8}
    tables.lookups   {table_config: table_0, bottom_name: C1, top_name: emb, combiner: average}
                  -> {table: table_0, feature: C1, output: emb, combiner: mean}

Settings may list tables in either vocabulary, or in both. `in_recapp_words` translates the settings
of command lines and of stored files before recapp checks them, so that the rest of recapp reads
recapp's words only. Programs for HugeCTR use the same tables of words
(`recapp/compat/hugectr/collection.py`).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from recapp.errors import ConfigError, suggest
from recapp.settings.check_settings import unknown
from recapp.settings.values import Natural, Width, Within, read
from recapp.tables.config import PoolingType
from recapp.tables.dynamic import DYNAMIC
from recapp.tables.table_settings import ListedLookup, ListedTable

TABLE_WORDS = {"max_vocabulary_size": "num_embeddings", "ev_size": "embedding_dim"}
LOOKUP_WORDS = {
    "table": "table",
    "feature": "feature",
    "output": "output",
    "combiner": "combiner",
    "hotness": "hotness",
    "truncates": "truncates",
    "table_config": "table",
    "emb_table": "table",
    "input": "feature",
    "bottom_name": "feature",
    "top_name": "output",
}
"""recapp's name for each name of a setting of a lookup; `TABLE_WORDS` has those of a table."""

COMBINERS = {"sum": "sum", "mean": "mean", "average": "mean", "concat": "concat"}
"""recapp's name of each combiner."""

_TABLE_TYPES = {
    "id_space": Natural,
    "table_id": Natural,
    "max_vocabulary_size": Annotated[int, Within(-1, 2**48)],
    "ev_size": Width,
}
_LOOKUP_TYPES = {
    "combiner": Literal["sum", "mean", "average", "concat", "none"] | None,
    **dict.fromkeys(("table_config", "emb_table", "input", "bottom_name", "top_name"), str),
}


def in_recapp_words(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the group `tables` of the settings in recapp's words, every table with a name.

    Values of the wrong kind stay as they are, for the check of the settings to refuse.

    Args:
        tables: The group as a plain value. It lists tables.

    Raises:
        ConfigError: A value in HugeCTR's words is not allowed, a setting is in neither vocabulary,
            or one value is given under two names.
    """
    changed = dict(tables)
    if _is_list_of_mappings(changed.get("tables")):
        named: list[dict[str, Any]] = []
        for k, values in enumerate(changed["tables"]):
            taken = [entry["name"] for entry in named]
            named.append(_table(values, f"tables.tables[{k}]", taken))
        changed["tables"] = named
    if _is_list_of_mappings(changed.get("lookups")):
        changed["lookups"] = [
            _lookup(values, f"tables.lookups[{k}]") for k, values in enumerate(changed["lookups"])
        ]
    return changed


def combiner_of(word: str, where: str) -> PoolingType:
    """Return the pooling type of a lookup for the name of its combiner.

    Args:
        word: The combiner's name in HugeCTR or in recapp: `average` is `mean`.
        where: The lookup, for errors.

    Raises:
        ConfigError: There is no combiner of this name.
    """
    if word == "none":
        raise ConfigError(
            f"{where}.combiner=none: a lookup of bags cannot give a sequence: list its table in "
            "an EmbeddingCollection"
        )
    if word not in COMBINERS:
        raise ConfigError(f"{where}.combiner={word}: {suggest(str(word), COMBINERS)}")
    return PoolingType(COMBINERS[word])


def rows_of(rows: Any) -> Any:
    """Return a number of rows in recapp's words: HugeCTR's -1 is recapp's `dynamic`."""
    return DYNAMIC if rows == -1 else rows


def table_name(
    name: str | None, table_id: int | None, id_space: int | None, taken: Collection[str]
) -> str:
    """Return the name of a table that HugeCTR's programs may know by a number alone.

    Args:
        name: The name of the table.
        table_id: The table's number.
        id_space: The number of the set of keys that index the table; several tables may share one.
        taken: The names of the earlier tables. Their count is the table's number if no other number
            is given.
    """
    if name is not None:
        return name
    if table_id is not None:
        return f"table_{table_id}"
    base = f"table_{len(taken) if id_space is None else id_space}"
    free = (n for n in (base, *(f"{base}_{k}" for k in range(1, len(taken) + 1))) if n not in taken)
    return next(free)


def under_recapp_names(
    values: Mapping[str, Any], words: Mapping[str, str], where: str
) -> dict[str, Any]:
    """Return values under recapp's names; a name that `words` does not have stays.

    Args:
        values: The values by their names in either vocabulary.
        words: recapp's name of each name.
        where: The entry, for errors.

    Raises:
        ConfigError: One value is given under two names.
    """
    made: dict[str, Any] = {}
    given: dict[str, str] = {}
    for key, value in values.items():
        ours = words.get(key, key)
        if ours in made:
            raise ConfigError(
                f"{where}: {given[ours]} and {key} are two names of one value: "
                "give only one of them"
            )
        made[ours] = value
        given[ours] = key
    return made


def _is_list_of_mappings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)


def _table(values: Mapping[str, Any], where: str, taken: Collection[str]) -> dict[str, Any]:
    known = (*(each.name for each in fields(ListedTable)), *_TABLE_TYPES)
    checked = _checked(values, _TABLE_TYPES, known, where)
    entry = under_recapp_names(checked, TABLE_WORDS, where)
    table_id = entry.pop("table_id", None)
    id_space = entry.pop("id_space", None)
    if "max_vocabulary_size" in checked:
        entry["num_embeddings"] = rows_of(checked["max_vocabulary_size"])
    entry.setdefault("name", table_name(None, table_id, id_space, taken))
    return entry


def _lookup(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    known = dict.fromkeys((*LOOKUP_WORDS, *(each.name for each in fields(ListedLookup))))
    checked = _checked(values, _LOOKUP_TYPES, known, where)
    entry = under_recapp_names(checked, LOOKUP_WORDS, where)
    if combiner := entry.get("combiner"):
        entry["combiner"] = COMBINERS.get(combiner, combiner)
    return entry


def _checked(
    values: Mapping[str, Any], types: Mapping[str, Any], known: Iterable[str], where: str
) -> dict[str, Any]:
    """Check the settings of an entry that have a type in `types`, and return the entry.

    Args:
        values: The entry.
        types: The type of each setting that has a name or a word of HugeCTR's.
        known: The names of all settings of such an entry.
        where: The entry, for errors.
    """
    made = dict(values)
    for key, value in values.items():
        if key not in known:
            raise ConfigError(unknown(f"{where}.{key}", [f"{where}.{name}" for name in known]))
        if key in types:
            made[key] = read(value, types[key], f"{where}.{key}")
    return made
