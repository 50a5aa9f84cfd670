"""A table and a lookup of it are two records: several lookups may read one table.

    tables                       lookups                                output, [B, sum of dims]
    t1: 4 columns, reads C1      t1 by C1                               C1@t1
    t2: 3 columns, C1 and C2     t2 by C1, t2 by C2                     C1@t2, C2

Lookups are made once, where a collection is made, and everybody reads that list: ids become rows
lookup by lookup, a layout has a slot for each, the output has its vectors in this order. What is
made of a table's rows for a lookup (sum or mean) belongs to the lookup, so one table may serve
several of them. HugeCTR's embedding collection separates the two in the same way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import nn

from recapp.errors import ConfigError
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.tables.config import EmbeddingBagConfig, PoolingType, check_tables


@dataclass(frozen=True, slots=True)
class TableLookup:
    """One lookup: a bag of ids becomes one vector of a table.

    Args:
        table: The table that is read.
        feature: The feature whose ids are looked up.
        output: The key of the vectors in the output, unique in a collection.
        pooling: How the rows of a bag become one vector.
    """

    table: EmbeddingBagConfig
    feature: str
    output: str
    pooling: PoolingType

    @property
    def dim(self) -> int:
        """Columns D of the vectors."""
        return self.table.embedding_dim


@runtime_checkable
class TableCollection(Protocol):
    """What every collection of tables has, sharded or not: all that a model or a planner needs."""

    lookups: tuple[TableLookup, ...]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the tables, in order."""
        ...

    def leave_room(self, columns: int) -> None:
        """Leave columns free before the first vector of a sample, for `KeyedTensor.prepend`.

        A collection that cannot do so leaves none.

        Args:
            columns: The number of columns.
        """
        ...

    def __call__(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return the pooled vectors, [B, sum of dims], in the order of the lookups."""
        ...


def lookups_of(tables: Sequence[EmbeddingBagConfig]) -> tuple[TableLookup, ...]:
    """List the lookups that tables declare by `feature_names`: table by table, feature by feature.

    Returns:
        Lookups with the table's pooling. An output is called like its feature, or `feature@table`
        where several tables read that feature.
    """
    pairs = [(table, feature) for table in tables for feature in table.feature_names]
    features = [feature for _, feature in pairs]
    return tuple(
        TableLookup(
            table,
            feature,
            f"{feature}@{table.name}" if features.count(feature) > 1 else feature,
            table.pooling,
        )
        for table, feature in pairs
    )


def check_lookups(tables: Sequence[EmbeddingBagConfig], lookups: Sequence[TableLookup]) -> None:
    """Check that lookups read these tables by their features, into outputs of different names.

    Raises:
        ConfigError: It names the lookup or the table.
    """
    known = {table.name: table for table in tables}
    outputs = [lookup.output for lookup in lookups]
    for lookup in lookups:
        if known.get(lookup.table.name) != lookup.table:
            raise ConfigError(
                f"lookup {lookup.output} reads table {lookup.table.name}, which is none of the "
                f"collection's tables: {', '.join(known)}"
            )
        if lookup.feature not in lookup.table.feature_names:
            raise ConfigError(
                f"lookup {lookup.output} reads table {lookup.table.name} by feature "
                f"{lookup.feature}, which is none of its feature_names: "
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
                    f"no lookup reads table {table.name} by feature {feature}: give it one, or "
                    "leave the feature out"
                )


def collections_in(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Walk a model and yield its collections of tables, sharded or not, with their paths.

    A collection that is a submodule under two paths is yielded once.
    """
    for path, part in module.named_modules():
        if isinstance(part, TableCollection):
            yield path, part


def embedding_lookups(module: nn.Module) -> list[TableLookup]:
    """List the lookups of all collections of a model, in the order in which they are met.

    Outputs of different collections may have one name.
    """
    return [lookup for _, held in collections_in(module) for lookup in held.lookups]


def embedding_tables(module: nn.Module) -> list[EmbeddingBagConfig]:
    """List all tables of a model, in the order in which its collections are met.

    Raises:
        ConfigError: Two collections have a table of one name.
    """
    tables = [t for _, held in collections_in(module) for t in held.embedding_bag_configs()]
    if tables:
        check_tables(tables)
    return tables
