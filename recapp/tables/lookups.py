"""A table and a lookup of it are two records: several lookups may read one table.

    tables                       lookups                                output, [B, sum of dims]
    t1: 4 columns, reads C1      t1 by C1                               C1@t1
    t2: 3 columns, C1 and C2     t2 by C1, t2 by C2                     C1@t2, C2

A collection makes its list of lookups once, and all other code reads this list: ids become rows
lookup by lookup, a layout has a slot for each lookup, and the output has its vectors in this order.
The pooling of a table's rows (sum or mean) belongs to the lookup, so one table may serve several
lookups. HugeCTR's embedding collection separates tables and lookups in the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from recapp.errors import ConfigError
from recapp.tables.config import BAG_POOLINGS, EmbeddingConfig, PoolingType, member


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
    found: dict[str, list[str]] = {}
    for lookup in lookups:
        found.setdefault(lookup.table.name, []).append(lookup.output)
    return list(found.values())


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
