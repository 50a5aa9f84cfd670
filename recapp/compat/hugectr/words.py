"""The arguments of HugeCTR's programs: the enumerations that they use, and checks at the call that
passes an argument.

    whole("CreateSolver", "batchsize", 1.5, 1)
        -> CreateSolver: batchsize=1.5: must be a whole number of at least 1

A member of an enumeration that does not exist raises an error of one line with close matches. The
checks turn numbers of NumPy into Python's own, because recapp writes settings into YAML.

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

import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from enum import Enum, EnumMeta, StrEnum
from numbers import Real
from operator import index
from typing import Annotated, Any, Literal, TypeVar

from recapp.errors import ConfigError, meant, suggest
from recapp.settings.check_settings import unknown
from recapp.settings.values import Natural, Width, Within, read
from recapp.tables.config import PoolingType
from recapp.tables.dynamic import DYNAMIC
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


class NamedText(StrEnum, metaclass=_Suggesting):
    """An enumeration of words that raises `UnknownNameError` for an unknown member."""


class CommunicationStrategy(NamedText):
    """The ways HugeCTR's later versions exchange vectors; recapp chooses by the ranks instead."""

    Uniform = "uniform"
    Hierarchical = "hierarchical"


class CompressionStrategy(NamedText):
    """The vectors that ranks send for a table: one per bag and owner, or one per distinct row."""

    Reduction = "reduction"
    Unique = "unique"


def _named(kind: str, says: str, members: str) -> Any:
    """Return an enumeration whose members have their names as values.

    Args:
        kind: The name of the enumeration.
        says: Its docstring.
        members: The names of the members.
    """
    enumeration: Any = NamedEnum
    made = enumeration(kind, [(name, name) for name in members.split()], module=__name__)
    made.__doc__ = says
    return made


Layer_t = _named(
    "Layer_t",
    "HugeCTR's types of layers; `layers.py` lists those that recapp has.",
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


MOST = 2**63 - 1
Member = TypeVar("Member", bound=Enum)


def whole(owner: str, name: str, value: Any, least: int = 0) -> int:
    """Check and return a whole number.

    Args:
        owner: The class or function that has the argument, for errors.
        name: The name of the argument.
        value: The value of the argument.
        least: The smallest allowed value.

    Raises:
        ConfigError: The value is no whole number, or out of bounds.
    """
    made = index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else None
    if made is None or not least <= made <= MOST:
        raise ConfigError(f"{owner}: {name}={value}: must be a whole number of at least {least}")
    return made


def number(owner: str, name: str, value: Any, least: float = 0.0, below: float = math.inf) -> float:
    """Check and return a finite number.

    Args:
        owner: The class or function that has the argument, for errors.
        name: The name of the argument.
        value: The value of the argument.
        least: The smallest allowed value.
        below: The value must be smaller than this.

    Raises:
        ConfigError: The value is no finite number, or out of bounds.
    """
    right = not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    if not right or not least <= value < below:
        bounds = f" of at least {least:g}" if least > -math.inf else ""
        bounds += f" and below {below:g}" if below < math.inf else ""
        raise ConfigError(f"{owner}: {name}={value}: must be a finite number{bounds}")
    return value if type(value) is int else float(value)


def switch(owner: str, name: str, value: Any) -> bool:
    """Check and return True or False; 1 and 0 count as these.

    Raises:
        ConfigError: The value is neither.
    """
    if not isinstance(value, int) or value not in (0, 1):
        raise ConfigError(f"{owner}: {name}={value}: must be True or False")
    return bool(value)


def text(owner: str, name: str, value: Any) -> str:
    """Check and return a text that is not empty; a path is a text, too.

    Raises:
        ConfigError: The value is no such text.
    """
    made = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(made, str) or not made:
        raise ConfigError(f"{owner}: {name}={value!r}: must be a text that is not empty")
    return made


def member(owner: str, name: str, value: Any, kind: type[Member]) -> Member:
    """Check and return a member of an enumeration.

    Raises:
        ConfigError: The value is no member of it.
    """
    if not isinstance(value, kind):
        known = ", ".join(kind.__members__)
        raise ConfigError(f"{owner}: {name}={value}: must be a {kind.__name__}: {known}")
    return value


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
