"""The arguments of HugeCTR's programs: the enumerations that they use, and checks at the call that
passes an argument.

    checked("CreateSolver", "batchsize", 1.5, Positive)
        -> CreateSolver: batchsize=1.5: must be a whole number of at least 1

A member of an enumeration that does not exist raises an error of one line with close matches. The
checks are those of settings, and make plain values, because recapp writes them into YAML.

HugeCTR's words for tables and lookups, and recapp's word for each.

    tables.tables    {table_id: 0, max_vocabulary_size: -1, ev_size: 8}
                  -> {name: table_0, num_embeddings: dynamic, embedding_dim: 8}
    tables.lookups   {table_config: table_0, bottom_name: C1, top_name: emb, combiner: average}
                  -> {table: table_0, feature: C1, output: emb, combiner: mean}

Settings may list tables in either vocabulary, or in both. `in_recapp_words` translates the settings
of command lines and of stored files before recapp checks them, so that the rest of recapp reads
recapp's words only. Programs for HugeCTR use the same tables of words
(`recapp/compat/hugectr/collection.py`).
"""

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from enum import Enum, EnumMeta
from typing import Annotated, Any, Literal, get_type_hints

from recapp.console import note_once
from recapp.errors import ConfigError, meant, suggest
from recapp.settings.records import unknown
from recapp.settings.values import Natural, Width, Within, read
from recapp.tables.config import PoolingType
from recapp.tables.positions import DYNAMIC
from recapp.tables.table_settings import ListedLookup, ListedTable


class UnknownNameError(ConfigError, AttributeError):
    """A name that HugeCTR or recapp does not have; `hasattr` returns False for it."""


class _Suggesting(EnumMeta):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in cls._member_map_:
            return cls._member_map_[name]
        same = [known for known in cls._member_map_ if known.lower() == name.lower()]
        close = meant(same) if same else suggest(name, cls._member_map_)
        raise UnknownNameError(f"{cls.__name__}.{name}: unknown; {close}")


class NamedEnum(Enum, metaclass=_Suggesting):
    """An enumeration that raises `UnknownNameError` for an unknown member."""


def _named(kind: str, says: str, members: str) -> Any:
    """Return an enumeration whose members have their names as values.

    Args:
        kind: The name of the enumeration.
        says: Its docstring.
        members: The names of the members.
    """
    enumeration: Any = NamedEnum
    enum_class = enumeration(kind, [(name, name) for name in members.split()], module=__name__)
    enum_class.__doc__ = says
    return enum_class


Layer_t = _named(
    "Layer_t",
    "HugeCTR's types of layers; `graph.py` lists those that recapp has.",
    """
    Add BatchNorm BinaryCrossEntropyLoss Cast Concat CrossEntropyLoss Dropout ELU
    ElementwiseMultiply FmOrder2 FusedInnerProduct FusedReshapeConcat
    FusedReshapeConcatGeneral GRU Gather InnerProduct Interaction LayerNorm MLP
    MatrixMultiply MultiCross MultiCrossEntropyLoss MultiHeadAttention PReLU_Dice ReLU
    ReduceMean ReduceSum Reshape Scale SequenceMask Sigmoid Slice Softmax Sub WeightMultiply
    """,
)
Initializer_t = _named(
    "Initializer_t",
    "HugeCTR's initialisers of a layer.",
    "Default Uniform XavierNorm XavierUniform Zero",
)
MetricsType = _named(
    "MetricsType", "HugeCTR's metrics of an evaluation.", "AUC AverageLoss HitRate NDCG SMAPE"
)
DataReaderType_t = _named(
    "DataReaderType_t",
    "HugeCTR's formats of data; recapp reads Parquet.",
    "Norm Raw Parquet RawAsync",
)
Check_t = _named(
    "Check_t",
    "The checks that HugeCTR makes of the Norm format; Parquet has no sums to check.",
    "Non Sum",
)
LrPolicy_t = _named("LrPolicy_t", "HugeCTR's learning-rate policy; there is only one.", "fixed")
AllReduceAlgo = _named(
    "AllReduceAlgo", "HugeCTR's all-reduce algorithms; in recapp torch chooses.", "NCCL OneShot"
)
DeviceLayout = _named(
    "DeviceLayout",
    "HugeCTR's numberings of the GPUs of several hosts; in recapp the launcher numbers them.",
    "LocalFirst NodeFirst",
)


CommunicationStrategy = _named(
    "CommunicationStrategy",
    "The ways HugeCTR's later versions exchange vectors; recapp chooses by the ranks instead.",
    "Uniform Hierarchical",
)
CompressionStrategy = _named(
    "CompressionStrategy",
    "The vectors that HugeCTR's ranks send for a table; a plan of recapp has modes instead.",
    "Reduction Unique",
)

Switch = bool | Literal[0, 1]
NotNegative = Annotated[float, Within(0)]


def plain(value: Any) -> Any:
    """Return an argument as settings have it: Python's own numbers for those of NumPy and torch,
    lists for tuples, names for members of an enumeration and texts for paths.
    """
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, NamedEnum):
        return value.name
    return value.tolist() if hasattr(value, "tolist") else value


def checked(owner: str, name: str, value: Any, annotation: Any) -> Any:
    """Check an argument as `recapp.settings.values.read` does, and return it as a plain value.

    Args:
        owner: The class or function that has the argument, for errors.
        name: The name of the argument.
        value: The value of the argument.
        annotation: The annotation of the allowed values. `str` allows paths, too, and no empty
            text. An enumeration allows its own members, which are returned as they are.

    Raises:
        ConfigError: The value is not allowed.
    """
    if annotation is str and not (isinstance(value, str | os.PathLike) and os.fspath(value)):
        raise ConfigError(f"{owner}: {name}={value!r}: must be a text that is not empty")
    if not (isinstance(annotation, type) and issubclass(annotation, Enum)):
        return read(plain(value), annotation, f"{owner}: {name}")
    if not isinstance(value, annotation):
        known = ", ".join(annotation.__members__)
        raise ConfigError(f"{owner}: {name}={value}: must be a {annotation.__name__}: {known}")
    return value


def check_fields(owner: str, record: Any) -> None:
    """Check each field of a dataclass by its annotation, and make its value plain.

    Args:
        owner: The class or function that has the fields as arguments, for errors.
        record: The dataclass, which may be frozen.

    Raises:
        ConfigError: The value of a field is not allowed.
    """
    for name, annotation in get_type_hints(type(record), include_extras=True).items():
        value = checked(owner, name, getattr(record, name), annotation)
        object.__setattr__(record, name, value)


def check_others(
    owner: str,
    others: Mapping[str, Any],
    ignored: Mapping[str, Any],
    refused: Mapping[str, tuple[Any, str]],
    known: Iterable[str],
) -> None:
    """Check the arguments of HugeCTR that recapp does not have.

    Args:
        owner: The class that has the arguments, for errors.
        others: The arguments by name.
        ignored: The default of each argument that only changes how HugeCTR computes; a note tells
            that another value has no effect.
        refused: The default of each argument that changes HugeCTR's results, and the text of the
            error for another value.
        known: The names of the other arguments.

    Raises:
        ConfigError: An argument has a value that recapp does not have, or does not exist.
    """
    for name, value in others.items():
        if name in ignored:
            if value != ignored[name]:
                note_once(
                    f"{owner}: {name} has no effect: it only changes how HugeCTR computes, reads "
                    "or names its files"
                )
        elif name not in refused:
            names = {*known, *ignored, *refused}
            raise ConfigError(f"{owner}: unknown argument {name}; {suggest(name, names)}")
        elif value != refused[name][0]:
            raise ConfigError(f"{owner}: {name}={value}: {refused[name][1]}")


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
    group = dict(tables)
    if _is_list_of_mappings(group.get("tables")):
        entries: list[dict[str, Any]] = []
        for k, values in enumerate(group["tables"]):
            names = [entry["name"] for entry in entries]
            entries.append(_table(values, f"tables.tables[{k}]", names))
        group["tables"] = entries
    if _is_list_of_mappings(group.get("lookups")):
        group["lookups"] = [
            _lookup(values, f"tables.lookups[{k}]") for k, values in enumerate(group["lookups"])
        ]
    return group


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
    name: str | None, table_id: int | None, id_space: int | None, earlier_names: Collection[str]
) -> str:
    """Return the name of a table that HugeCTR's programs may know by a number alone.

    Args:
        name: The name of the table.
        table_id: The table's number.
        id_space: The number of the set of keys that index the table; several tables may share one.
        earlier_names: The names of the earlier tables. Their count is the table's number if no
            other number is given.
    """
    if name is not None:
        return name
    if table_id is not None:
        return f"table_{table_id}"
    base = f"table_{len(earlier_names) if id_space is None else id_space}"
    free = (
        n
        for n in (base, *(f"{base}_{k}" for k in range(1, len(earlier_names) + 1)))
        if n not in earlier_names
    )
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
    recapp_values: dict[str, Any] = {}
    source_keys: dict[str, str] = {}
    for key, value in values.items():
        ours = words.get(key, key)
        if ours in recapp_values:
            raise ConfigError(
                f"{where}: {source_keys[ours]} and {key} are two names of one value: "
                "give only one of them"
            )
        recapp_values[ours] = value
        source_keys[ours] = key
    return recapp_values


def _is_list_of_mappings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)


def _table(values: Mapping[str, Any], where: str, earlier_names: Collection[str]) -> dict[str, Any]:
    known = (*(each.name for each in fields(ListedTable)), *_TABLE_TYPES)
    entry = _entry(values, _TABLE_TYPES, TABLE_WORDS, known, where)
    table_id = entry.pop("table_id", None)
    id_space = entry.pop("id_space", None)
    if "max_vocabulary_size" in values:
        entry["num_embeddings"] = rows_of(entry["num_embeddings"])
    entry.setdefault("name", table_name(None, table_id, id_space, earlier_names))
    return entry


def _lookup(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    known = dict.fromkeys((*LOOKUP_WORDS, *(each.name for each in fields(ListedLookup))))
    entry = _entry(values, _LOOKUP_TYPES, LOOKUP_WORDS, known, where)
    if combiner := entry.get("combiner"):
        entry["combiner"] = COMBINERS.get(combiner, combiner)
    return entry


def _entry(
    values: Mapping[str, Any],
    types: Mapping[str, Any],
    words: Mapping[str, str],
    known: Iterable[str],
    where: str,
) -> dict[str, Any]:
    """Return the settings of an entry under recapp's names.

    Args:
        values: The entry.
        types: The type of each setting to check, by its name or by a word of HugeCTR's.
        words: recapp's name of each name.
        known: The names of all settings of such an entry.
        where: The entry, for errors.
    """
    settings = {}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(unknown(f"{where}.{key}", [f"{where}.{name}" for name in known]))
        settings[key] = read(value, types.get(key, Any), f"{where}.{key}")
    return under_recapp_names(settings, words, where)
