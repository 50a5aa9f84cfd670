"""The settings of tables, the group `tables`: one table for each sparse column, or a list."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from recapp.errors import ConfigError
from recapp.settings.records import absent, to_plain
from recapp.settings.values import IdRule, Positive, Rows, Storage, Width, Within, shown
from recapp.tables.dynamic import DYNAMIC, DynamicRows

WIDE = "wide"
"""The collection with one weight for each id."""


@dataclass(frozen=True, kw_only=True)
class FurtherTables:
    """A further collection of a model, with a table of its own for each of some sparse columns.

    Args:
        dim: The columns of its tables.
        columns: The sparse columns; None takes all columns whose ids are pooled.
        pooling: How the rows of a bag become one vector.
        init_range: Start values are uniform in +-init_range; None takes 1/sqrt(rows).
    """

    dim: Width = 1
    columns: tuple[str, ...] | None = None
    pooling: Literal["sum", "mean"] = "sum"
    init_range: Annotated[float, Within(0)] | None = None


@dataclass(frozen=True, kw_only=True)
class DimRule:
    """The columns of a table by its number of rows: factor * rows ** power, rounded to the nearest
    multiple and limited (mixed dimensions, Ginart and others 2019, arXiv 1909.11810; the default is
    that of DCN, arXiv 1708.05123).

    Args:
        factor: The factor, at most a million.
        power: The power, 0 to 1.
        multiple: The number of which dims are multiples.
        least: The smallest dim, such a multiple.
        most: The largest dim, such a multiple.

    Raises:
        ConfigError: The limits are in the wrong order, or no multiples.
    """

    factor: Annotated[float, Within(above=0, most=1e6)] = 6.0
    power: Annotated[float, Within(0, 1)] = 0.25
    multiple: Positive = 4
    least: Width = 4
    most: Width = 64

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ConfigError(
                f"tables.dim_rule.least={self.least}: must be at most "
                f"tables.dim_rule.most={self.most}"
            )
        for name in ("least", "most"):
            limit = getattr(self, name)
            if limit % self.multiple:
                raise ConfigError(
                    f"tables.dim_rule.{name}={limit}: must be a multiple of "
                    f"tables.dim_rule.multiple={self.multiple}, as dims are"
                )

    def dim(self, rows: int) -> int:
        """Return the columns of a table with a number of rows."""
        power = math.pow(rows, self.power)
        columns = round(self.factor * power / self.multiple) * self.multiple
        return min(max(columns, self.least), self.most)


@dataclass(frozen=True, kw_only=True)
class TablesOfDataset:
    """The group `tables` under `tables=from_dataset` and `tables=dynamic`: a table for each sparse
    column.

    Args:
        dim_rule: The rule that gives each table its own dim, in place of `dim`; None without.
        sequences: The columns whose ids each give a vector.
        shared: The columns that read the table of another column, `{history: item}`.
        wide: Whether the model gets the collection `wide`, with one weight for each id, from 0;
            None makes it for models that need it.
        collections: Further collections of the model by name.
        frozen: The tables that no step changes.
        values: The files from which tables get their start values, by table.

    Raises:
        ConfigError: A setting of dynamic tables is given for other tables, or the reverse; or two
            settings make the collection `wide`.
    """

    source: Literal["from_dataset"] = "from_dataset"
    num_embeddings: Literal["dynamic"] | None = None
    dynamic: DynamicRows | None = None
    dim: Annotated[Width, "; dataset.table_dims={C1: 8} sets single tables"] = 16
    dim_rule: DimRule | None = None
    max_rows: Rows | None = 200_000
    data_type: Storage = "fp32"
    pooling: Literal["sum", "mean"] = "sum"
    sequences: tuple[str, ...] = ()
    shared: dict[str, str] | None = None
    wide: bool | None = None
    collections: dict[str, FurtherTables] | None = None
    id_rule: IdRule | None = None
    init_range: Annotated[float, Within(0)] | None = None
    frozen: tuple[str, ...] = ()
    values: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if self.wide is not None and WIDE in (self.collections or {}):
            raise ConfigError(
                f"tables.wide={shown(self.wide)}: tables.collections has a collection {WIDE}, too: "
                "leave tables.wide=null, or give the collection another name"
            )
        if not self.grow:
            if self.dynamic is not None:
                raise ConfigError(
                    f"tables.dynamic={shown(to_plain(self.dynamic))}: is said of tables that do "
                    "not grow: take tables=dynamic"
                )
            return
        if self.max_rows is not None:
            raise ConfigError(
                f"tables.max_rows={self.max_rows}: limits hashed tables, and these grow: set "
                f"tables.dynamic.max_rows={self.max_rows} and leave tables.max_rows=null"
            )
        if self.id_rule not in (None, "error"):
            raise ConfigError(
                f"tables.id_rule={self.id_rule}: a dynamic table has a row for any id: leave it "
                "null, or take tables=from_dataset"
            )

    @property
    def grow(self) -> bool:
        """Return whether tables are dynamic."""
        return self.num_embeddings == DYNAMIC

    @property
    def only_bags(self) -> bool:
        """Return whether `embedding_bag_collection` has all tables."""
        return not (self.sequences or self.collections or self.wide)


@dataclass(frozen=True, kw_only=True)
class ListedTable:
    """One table of `tables=sample`, with the arguments of
    `recapp.tables.config.EmbeddingBagConfig`, and the collection of its lookups.
    """

    name: str | None = absent()
    num_embeddings: Rows | Literal["dynamic"] | None = absent()
    dynamic: DynamicRows | None = absent(null=True)
    embedding_dim: Width | None = absent()
    feature_names: tuple[str, ...] | None = absent()
    pooling: Literal["sum", "mean", "none"] | None = absent()
    collection: str | None = absent(null=True)
    data_type: Storage | None = absent()
    id_rule: IdRule | None = absent()
    init_range: Annotated[float, Within(0)] | None = absent(null=True)
    weight_init_max: float | None = absent(null=True)
    weight_init_min: float | None = absent(null=True)
    min_key: int | None = absent()
    max_key: int | None = absent(null=True)


@dataclass(frozen=True, kw_only=True)
class ListedLookup:
    """One lookup of `tables=sample`: a feature that reads a table, and the pooling of the rows."""

    table: str | None = absent()
    feature: str | None = absent()
    output: str | None = absent(null=True)
    combiner: Literal["sum", "mean", "concat", "none"] | None = absent(null=True)
    hotness: Positive | None = absent(null=True)
    truncates: bool | None = absent()
    collection: str | None = absent(null=True)


@dataclass(frozen=True, kw_only=True)
class ListedTables:
    """The group `tables` under `tables=sample`: the tables that the file lists, and their lookups.

    Args:
        frozen: As for `TablesOfDataset`, like `values`.
    """

    source: Literal["list"]
    tables: tuple[ListedTable, ...]
    lookups: tuple[ListedLookup, ...] | None = None
    frozen: tuple[str, ...] = ()
    values: dict[str, str] | None = None

    @property
    def only_bags(self) -> bool:
        """Return whether `embedding_bag_collection` has all tables."""
        tables = all(t.collection is None and t.pooling != "none" for t in self.tables)
        lookups = self.lookups or ()
        return tables and all(x.collection is None and x.combiner != "none" for x in lookups)


TableSettings = TablesOfDataset | ListedTables
