"""The config of an embedding table: its name, its size, the features that read it, and the pooling
of a bag of rows into one vector.

Names and defaults follow TorchRec (`torchrec/modules/embedding_configs.py`), so porting is changing
an import. recapp adds three properties: the `id_rule`, which turns a raw id of any size into a row
(`recapp/tables/ids.py`); the `min_key`, the id of row 0, as in HugeCTR's tables; and start values
that depend only on (seed, table, row, column) (`recapp/tables/initial.py`).

A table and a lookup of it are two records: several lookups may read one table.

    tables                       lookups                                output, [B, sum of dims]
    t1: 4 columns, reads C1      t1 by C1                               C1@t1
    t2: 3 columns, C1 and C2     t2 by C1, t2 by C2                     C1@t2, C2

A collection makes its list of lookups once, and all other code reads this list: ids become rows
lookup by lookup, a layout has a slot for each lookup, and the output has its vectors in this order.
The pooling of a table's rows (sum or mean) belongs to the lookup, so one table may serve several
lookups. HugeCTR's embedding collection separates tables and lookups in the same way.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from recapp.errors import ConfigError, suggest
from recapp.tables.positions import DYNAMIC, EXPECTED_ROWS, STRETCHES, DynamicRows, dynamic_rows

if TYPE_CHECKING:
    import torch

E = TypeVar("E", bound=StrEnum)


class PoolingType(StrEnum):
    """The function of the rows of a bag (HugeCTR: the combiner).

    - `sum`, `mean`: one vector; a mean divides by the length of the whole bag; an empty bag gives
      zeros.
    - `concat`: as many vectors side by side as the lookup's hotness; zeros where a bag is shorter.
    - `none`: the vectors one after the other, a sequence.
    """

    SUM = "sum"
    MEAN = "mean"
    CONCAT = "concat"
    NONE = "none"


# The poolings that tables of an `EmbeddingBagCollection` may declare: those that need no hotness.
BAG_POOLINGS = (PoolingType.SUM, PoolingType.MEAN)


class DataType(StrEnum):
    """The type in which a table is stored.

    A collection computes in fp64 if any of its tables is fp64, else in fp32. Each row of 8 or 4
    bits has a scale and a bias (`recapp/kernels/quantised.py`). Such rows are only read, so trained
    tables have one of the other types.
    """

    FP64 = "fp64"
    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def dtype(self) -> "torch.dtype":
        """The torch dtype of the stored rows. For quantised rows it is only a name."""
        import torch  # only here, because configs need no torch

        torch_dtype: torch.dtype = getattr(torch, _DTYPES[self.value])
        return torch_dtype

    @property
    def bits(self) -> int | None:
        """The bits of a value of quantised rows; None for floats."""
        return {"int8": 8, "int4": 4}.get(self.value)


# Torch's names of its dtypes.
_DTYPES = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "int8": "quint8",
    "int4": "quint4x2",
}


LARGEST_ID = 2**63 - 1


class IdRule(StrEnum):
    """The rule that turns a raw id into a row (`recapp/tables/ids.py`)."""

    ERROR = "error"
    HASH = "hash"
    CLAMP = "clamp"
    DROP = "drop"


# The only value that recapp accepts for an argument of TorchRec, and the reason.
Only = tuple[Any, str]

_GROWS = f'a table of any ids is num_embeddings="{DYNAMIC}" here, with its eviction in dynamic'
# Arguments of TorchRec's configs that have no meaning here.
_ONLY_THERE: dict[str, Only] = {
    "num_embeddings_post_pruning": (None, "tables are not pruned here, nor when they are exported"),
    "input_dim": (None, "nothing reads it, there or here"),
    "total_num_buckets": (None, _GROWS),
    "use_virtual_table": (False, _GROWS),
    "virtual_table_eviction_policy": (None, _GROWS),
    "enable_embedding_update": (
        False,
        "rows change by training or load_state_dict alone, not by a call with ids and vectors",
    ),
    "stash_weights": (False, "rows stay in the memory of their device"),
}


@dataclass(frozen=True)
class EmbeddingConfig:
    """One table of an `EmbeddingCollection`, whose features are sequences.

    The arguments before `id_rule` stand in TorchRec's order.

    Args:
        num_embeddings: Rows R, at least 1, or "dynamic" for a table of any keys, which grows
            (`recapp/tables/positions.py`); the attribute then holds the expected number of rows.
        embedding_dim: Columns D, at least 1.
        name: The name, unique among the tables of a model.
        data_type: The type of stored rows: "fp64", "fp32", "fp16" or "bf16"; "int8" or "int4" for
            tables that are only read.
        feature_names: The features that read this table. A feature may read several tables, and
            several features may read one table. Empty: the feature with the name of the table.
        weight_init_max: The end of the range of start values, which are uniform; None means
            `init_range`.
        weight_init_min: The beginning of the range of start values; None means -`init_range`.
        num_embeddings_post_pruning: None, because tables are not pruned.
        init_fn: A function that writes the start values instead, into a tensor [R, D] on the CPU.
            Every rank that holds a part calls it for the whole table and keeps its part; so the
            whole table must fit into memory beside the part. Random numbers of torch's generator
            depend only on the seed and the name of the table, so the values are the same under
            every plan.
        need_pos: Whether positions of ids are needed. It changes nothing, because they are known
            under every plan.
        input_dim: None, like `total_num_buckets` and `virtual_table_eviction_policy`.
        total_num_buckets: See `input_dim`.
        use_virtual_table: False, like `enable_embedding_update` and `stash_weights`.
        virtual_table_eviction_policy: See `input_dim`.
        enable_embedding_update: See `use_virtual_table`.
        stash_weights: See `use_virtual_table`.
        id_rule: "error", "hash", "clamp" or "drop".
        init_range: Start values are uniform in +-init_range; None means 1/sqrt(num_embeddings), for
            a dynamic table 1/sqrt(expected rows).
        min_key: The id of row 0: row = id - min_key. A hashed or dynamic table has no `min_key`,
            because it takes any id.
        dynamic: The admission and eviction of rows of a dynamic table: `DynamicRows` or its fields
            expected_rows, max_rows, seen, counter, sketch_width, eviction, ttl_steps. None: the
            defaults if `num_embeddings` is "dynamic"; else the table is not dynamic.
        member_of: The table of the first member of an ensemble, if this is the same table of
            another member; its start values are those of a table of that name.

    Raises:
        ConfigError: A field is out of range; the message names the table and the field.
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: DataType = DataType.FP32
    feature_names: Sequence[str] = ()
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    num_embeddings_post_pruning: InitVar[int | None] = None
    init_fn: "Callable[[torch.Tensor], torch.Tensor | None] | None" = None
    need_pos: bool = field(default=False, compare=False)
    input_dim: InitVar[int | None] = None
    total_num_buckets: InitVar[int | None] = None
    use_virtual_table: InitVar[bool] = False
    virtual_table_eviction_policy: InitVar[Any] = None
    enable_embedding_update: InitVar[bool] = False
    pooling: PoolingType = field(default=PoolingType.NONE, init=False)
    _: KW_ONLY
    stash_weights: InitVar[bool] = False
    id_rule: IdRule = IdRule.ERROR
    init_range: float | None = None
    min_key: int = 0
    dynamic: DynamicRows | None = None
    member_of: str | None = None

    def __post_init__(self, *only_there: Any) -> None:
        if not self.name:
            raise ConfigError(
                "a table has no name: give each EmbeddingBagConfig or EmbeddingConfig a name="
            )
        for (key, (only, why)), value in zip(_ONLY_THERE.items(), only_there, strict=True):
            if value != only:
                raise ConfigError(f"tables.{self.name}.{key}={value}: {why}: leave it out")
        if isinstance(self.feature_names, str):
            raise ConfigError(
                f"tables.{self.name}.feature_names={self.feature_names}: must be a list of names, "
                f"[{self.feature_names}]"
            )
        object.__setattr__(self, "feature_names", tuple(self.feature_names) or (self.name,))
        for key, kind in (("pooling", PoolingType), ("data_type", DataType), ("id_rule", IdRule)):
            object.__setattr__(
                self, key, member(kind, getattr(self, key), f"tables.{self.name}.{key}")
            )
        self._make_dynamic()
        for key in ("num_embeddings", "embedding_dim"):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"tables.{self.name}.{key}={value}: must be a whole number of at least 1"
                    + (f', or "{DYNAMIC}"' if key == "num_embeddings" else "")
                )
        if len(set(self.feature_names)) < len(self.feature_names):
            raise ConfigError(
                f"tables.{self.name}.feature_names={list(self.feature_names)}: name the features "
                "that read the table, each once"
            )
        self._check_start_values()
        if self.id_rule is IdRule.HASH and self.num_embeddings < 2:
            raise ConfigError(
                f"tables.{self.name}.num_embeddings=1: must be at least 2 with id_rule=hash, "
                "because one row is for missing ids"
            )
        self._check_min_key()

    def _make_dynamic(self) -> None:
        """Complete a dynamic table: set `dynamic` and the expected number of rows.

        Raises:
            ConfigError: A dynamic table cannot have a field.
        """
        number: Any = self.num_embeddings
        setting = f"tables.{self.name}"
        if isinstance(number, str) and number != DYNAMIC:
            raise ConfigError(
                f"{setting}.num_embeddings={number}: must be a whole number of at least 1, or "
                f'"{DYNAMIC}" for a table of any keys, which grows'
            )
        if number != DYNAMIC and self.dynamic is None:
            return
        rows = dynamic_rows({} if self.dynamic is None else self.dynamic, f"{setting}.dynamic")
        object.__setattr__(self, "dynamic", rows)
        expected = rows.expected_rows or rows.max_rows or EXPECTED_ROWS
        if number == DYNAMIC:
            object.__setattr__(self, "num_embeddings", expected)
        elif number != expected:  # equal if the record comes from another table
            raise ConfigError(
                f"{setting}.num_embeddings={number}: the setting dynamic needs a table of any "
                f'keys, not of a fixed number of rows: give num_embeddings "{DYNAMIC}", with '
                f"dynamic.expected_rows={number} for the expected number of rows, or leave "
                "dynamic out"
            )
        if self.id_rule is not IdRule.ERROR:
            raise ConfigError(
                f"{setting}.id_rule={self.id_rule}: a dynamic table takes any id and needs no "
                "rule: leave id_rule out, or give num_embeddings a number"
            )
        if self.min_key:
            raise ConfigError(
                f"{setting}.min_key={self.min_key}: a dynamic table takes any id: leave min_key "
                "out, or give num_embeddings a number"
            )

    @property
    def plan_rows(self) -> int:
        """Return the number of rows that a plan cuts: the rows of the table, or the stretches of a
        dynamic one.
        """
        return self.num_embeddings if self.dynamic is None else STRETCHES

    def get_weight_init_max(self) -> float:
        """Return the end of the range of start values."""
        return self._usual_range if self.weight_init_max is None else self.weight_init_max

    def get_weight_init_min(self) -> float:
        """Return the beginning of the range of start values."""
        return -self._usual_range if self.weight_init_min is None else self.weight_init_min

    def num_features(self) -> int:
        """Return the number of features that read the table."""
        return len(self.feature_names)

    @property
    def _usual_range(self) -> float:
        return 1 / math.sqrt(self.num_embeddings) if self.init_range is None else self.init_range

    @property
    def start_range(self) -> float:
        """Return the largest distance of a start value from `start_middle`."""
        return (self.get_weight_init_max() - self.get_weight_init_min()) / 2

    @property
    def start_middle(self) -> float:
        """Return the middle of the range of start values; 0 for a dynamic table."""
        return (self.get_weight_init_max() + self.get_weight_init_min()) / 2

    def _check_start_values(self) -> None:
        setting = f"tables.{self.name}"
        for key in ("init_range", "weight_init_max", "weight_init_min"):
            value = getattr(self, key)
            least = 0 if key == "init_range" else -math.inf
            if value is None:
                continue
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= least):
                at_least = " of at least 0" if key == "init_range" else ""
                raise ConfigError(f"{setting}.{key}={value}: must be a number{at_least}")
            if key != "init_range" and self.init_range is not None:
                raise ConfigError(
                    f"{setting}.{key}={value} and init_range={self.init_range} both set the "
                    "range of the start values: give only one of them"
                )
        low = self.get_weight_init_min()
        high = self.get_weight_init_max()
        if low > high:
            raise ConfigError(
                f"{setting}.weight_init_min={low}: is above weight_init_max={high}: start values "
                "lie between the two (the default bounds are -1/sqrt(num_embeddings) and "
                "1/sqrt(num_embeddings)): swap them, or change one"
            )
        if self.init_fn is not None and not callable(self.init_fn):
            raise ConfigError(
                f"{setting}.init_fn={self.init_fn}: must be a function that writes into a "
                "tensor, such as torch.nn.init.normal_"
            )
        if self.dynamic is not None and (self.start_middle or self.init_fn is not None):
            key = "init_fn" if self.init_fn is not None else "weight_init_max"
            raise ConfigError(
                f"{setting}.{key}: the start values of a dynamic table are uniform around 0: "
                "give weight_init_max with weight_init_min=-weight_init_max, or init_range"
            )

    @property
    def bytes_to_find_a_row(self) -> int:
        """Return the bytes of the index per row, in every strip: 0 for a table that is not
        dynamic.
        """
        if self.dynamic is None:
            return 0
        shared = -(-self.dynamic.bytes_of_sketch // self.num_embeddings)
        return self.dynamic.bytes_beside_a_row + shared

    def rows_in(self, plan_rows: int | range) -> int:
        """Return the number of table rows behind `plan_rows` rows of a plan; for a dynamic table,
        the expected number.
        """
        n = plan_rows if isinstance(plan_rows, int) else len(plan_rows)
        return n if self.dynamic is None else -(-n * self.num_embeddings // STRETCHES)

    def _check_min_key(self) -> None:
        setting = f"tables.{self.name}.min_key={self.min_key}"
        if not isinstance(self.min_key, int) or isinstance(self.min_key, bool):
            raise ConfigError(f"{setting}: must be a whole number, the id of row 0")
        if self.min_key and self.id_rule is IdRule.HASH:
            raise ConfigError(
                f"{setting}: a hashed table takes any id; leave min_key out, or set id_rule to "
                "error, clamp or drop"
            )
        if not -LARGEST_ID <= self.min_key <= LARGEST_ID - self.num_embeddings:
            raise ConfigError(
                f"{setting}: ids {self.min_key}..{self.min_key + self.num_embeddings - 1} must fit "
                "into 64 bits"
            )


@dataclass(frozen=True)
class EmbeddingBagConfig(EmbeddingConfig):
    """One table of an `EmbeddingBagCollection`: the arguments of `EmbeddingConfig`, and the pooling
    of bags.

    Args:
        pooling: "sum" or "mean".

    Raises:
        ConfigError: A field is out of range; the message names the table and the field.
    """

    pooling: PoolingType = PoolingType.SUM

    def __post_init__(self, *only_there: Any) -> None:
        if self.pooling in (PoolingType.NONE, PoolingType.CONCAT):
            raise ConfigError(
                f"tables.{self.name}.pooling={self.pooling}: must be sum or mean; for sequences "
                "use an EmbeddingConfig in an EmbeddingCollection, for concat a TableLookup"
            )
        if self.pooling not in BAG_POOLINGS:
            allowed = suggest(str(self.pooling), list(map(str, BAG_POOLINGS)))
            raise ConfigError(f"tables.{self.name}.pooling={self.pooling}: {allowed}")
        super().__post_init__(*only_there)


def table_config(**values: Any) -> EmbeddingConfig:
    """Return the config of a table: an `EmbeddingConfig`, for sequences, if `pooling` is none, else
    an `EmbeddingBagConfig`.

    Args:
        values: The arguments of `EmbeddingBagConfig`.

    Raises:
        ConfigError: A field is out of range; the message names the table and the field.
    """
    if values.get("pooling") == PoolingType.NONE:
        return EmbeddingConfig(**{key: v for key, v in values.items() if key != "pooling"})
    return EmbeddingBagConfig(**values)


def sequence_table(table: EmbeddingConfig) -> EmbeddingConfig:
    """Return the config of a table for an `EmbeddingCollection`: without pooling."""
    if not isinstance(table, EmbeddingBagConfig):
        return table
    return EmbeddingConfig(
        **{f.name: getattr(table, f.name) for f in fields(EmbeddingConfig) if f.init}
    )


def check_max_key(table: EmbeddingConfig, max_key: int) -> None:
    """Check that all keys up to `max_key` fit into a table.

    The last row plus one is accepted, because HugeCTR's programs write the number of rows there.

    Raises:
        ConfigError: They do not.
    """
    if table.dynamic is not None:
        raise ConfigError(
            f"tables.{table.name}.max_key={max_key}: a dynamic table takes any key: leave max_key "
            "out, or give num_embeddings a number"
        )
    most = table.min_key + table.num_embeddings
    if not isinstance(max_key, int) or not table.min_key <= max_key <= most:
        raise ConfigError(
            f"tables.{table.name}.max_key={max_key}: {table.num_embeddings} rows from "
            f"min_key={table.min_key} on hold the keys {table.min_key}..{most - 1}: set max_key to "
            f"{most - 1} or {most}, or give the table more rows"
        )


def member(kind: type[E], value: str, setting: str) -> E:
    """Return the member of an enumeration that a setting names.

    Raises:
        ConfigError: The enumeration has no such member; the message lists close matches.
    """
    try:
        return kind(value)
    except ValueError:
        known = [str(m.value) for m in kind]
        raise ConfigError(f"{setting}={value}: {suggest(value, known)}") from None


def common_dim(tables: Sequence[EmbeddingConfig]) -> int:
    """Return the columns D of tables of one width.

    Raises:
        ConfigError: The tables have different widths.
    """
    dims = {t.embedding_dim for t in tables}
    if len(dims) > 1:
        raise ConfigError(
            f"embedding_dim(): tables are {', '.join(map(str, sorted(dims)))} columns wide, and "
            "TorchRec's method needs one width: read embedding_configs()[i].embedding_dim"
        )
    return dims.pop()


def compute_type(tables: Iterable[EmbeddingConfig]) -> DataType:
    """Return the type of a collection's arithmetic and output: fp64 if any table is stored in fp64,
    else fp32.
    """
    types = {t.data_type for t in tables}
    return DataType.FP64 if DataType.FP64 in types else DataType.FP32


def check_tables(tables: Sequence[EmbeddingConfig]) -> None:
    """Check that there is at least one table and that table names are unique.

    Raises:
        ConfigError: There is no table, two tables have one name (the message has it), or `tables`
            is no list of configs.
    """
    if isinstance(tables, EmbeddingConfig):
        raise ConfigError(f"tables is the single table {tables.name}: give a list, [table]")
    for t in tables:
        if not isinstance(t, EmbeddingConfig):
            raise ConfigError(
                f"tables has a {type(t).__name__}: give a list of EmbeddingBagConfig or "
                "EmbeddingConfig"
            )
    if not tables:
        raise ConfigError(
            "tables is empty: an embedding collection needs at least one table (TorchRec makes "
            "an empty collection, which cannot look up bags)"
        )
    names = [t.name for t in tables]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"tables: two tables are called {name}; names must be unique, unless two "
                "collections share the weight"
            )


@dataclass(frozen=True)
class TableLookup:
    """One lookup: a bag of ids becomes one vector from a table.

    Args:
        table: The table that the lookup reads.
        feature: The feature that has the ids.
        output: The key of the vectors in the output, unique in a collection.
        pooling: The pooling of the rows of a bag: "sum", "mean", "concat" or, in an
            `EmbeddingCollection`, "none".
        hotness: The number of vectors of a concatenation; None for any other pooling.
        truncates: Whether a bag with more ids than the concatenation has vectors loses its last
            ids; else such a bag is an error.

    Raises:
        ConfigError: A concatenation has no hotness, another pooling has one, the pooling does not
            exist, or `table` is no table.
    """

    table: EmbeddingConfig
    feature: str
    output: str
    pooling: PoolingType
    hotness: int | None = None
    truncates: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.table, EmbeddingConfig):
            raise ConfigError(
                f"lookup {self.output}: table={self.table}: give the table itself, an "
                "EmbeddingConfig or EmbeddingBagConfig, not its name"
            )
        pooling = member(PoolingType, self.pooling, f"lookup {self.output}: pooling")
        object.__setattr__(self, "pooling", pooling)
        concat = self.pooling is PoolingType.CONCAT
        if concat and (not isinstance(self.hotness, int) or self.hotness < 1):
            raise ConfigError(
                f"lookup {self.output}: hotness={self.hotness}: a concatenation needs the number "
                "of its vectors, at least 1"
            )
        if not concat and (self.hotness is not None or self.truncates):
            raise ConfigError(
                f"lookup {self.output}: pooling={self.pooling} takes bags of any length: leave "
                "hotness and truncates out, or choose concat"
            )

    @property
    def dim(self) -> int:
        """Columns D of the table's rows."""
        return self.table.embedding_dim

    @property
    def is_summed(self) -> bool:
        """Whether the rows of a bag become one vector, a sum or a mean."""
        return self.pooling in BAG_POOLINGS

    @property
    def may_be_pooled(self) -> bool:
        """Whether the owners of rows may sum them. The rows of a dynamic table are always requested
        one by one.
        """
        return self.is_summed and self.table.dynamic is None

    @cached_property
    def columns(self) -> int:
        """Columns of a sample's vector; 0 for a sequence, which has a vector per id."""
        if self.pooling is PoolingType.NONE:
            return 0
        return self.dim * (self.hotness or 1)


def lookups_of(tables: Sequence[EmbeddingConfig]) -> tuple[TableLookup, ...]:
    """List the lookups that tables declare by `feature_names`, table by table and feature by
    feature.

    Returns:
        Lookups with the table's pooling and the output from `output_of`.
    """
    pairs = [(table, feature) for table in tables for feature in table.feature_names]
    features = [feature for _, feature in pairs]
    return tuple(
        TableLookup(table, feature, output_of(table.name, feature, features), table.pooling)
        for table, feature in pairs
    )


def output_of(table: str, feature: str, features: Sequence[str]) -> str:
    """Return the default output of a lookup: its feature, or `feature@table` if several lookups
    read that feature.

    Args:
        table: The name of the table.
        feature: The feature.
        features: The feature of every lookup.
    """
    return f"{feature}@{table}" if features.count(feature) > 1 else feature


def outputs_by_table(lookups: Sequence[TableLookup]) -> list[list[str]]:
    """Return the names of the outputs of each table, in the order of the lookups."""
    outputs: dict[str, list[str]] = {}
    for lookup in lookups:
        outputs.setdefault(lookup.table.name, []).append(lookup.output)
    return list(outputs.values())


def check_lookups(tables: Sequence[EmbeddingConfig], lookups: Sequence[TableLookup]) -> None:
    """Check that lookups read these tables by their features, into outputs with distinct names.

    Raises:
        ConfigError: They do not; the message names the lookup or the table.
    """
    known = {table.name: table for table in tables}
    outputs = [lookup.output for lookup in lookups]
    for lookup in lookups:
        if known.get(lookup.table.name) != lookup.table:
            raise ConfigError(
                f"lookup {lookup.output} reads table {lookup.table.name}, which the collection "
                f"does not have: its tables are {', '.join(known)}"
            )
        if lookup.feature not in lookup.table.feature_names:
            raise ConfigError(
                f"lookup {lookup.output} reads table {lookup.table.name} by feature "
                f"{lookup.feature}, which is not in the table's feature_names: "
                f"{', '.join(lookup.table.feature_names)}"
            )
        if outputs.count(lookup.output) > 1:
            raise ConfigError(
                f"two lookups are called {lookup.output}; outputs need different names"
            )
    read = {(lookup.table.name, lookup.feature) for lookup in lookups}
    for table in tables:
        for feature in table.feature_names:
            if (table.name, feature) not in read:
                raise ConfigError(
                    f"no lookup reads table {table.name} by feature {feature}: give it a lookup, "
                    "or leave the feature out"
                )
