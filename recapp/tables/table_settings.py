"""The settings of tables, the group `tables`: one table for each sparse column, or a list. And what
they describe: the collections of a model, each with a name, its tables and its lookups.

    lookups                            collections
    C1, C2: sum                        embedding_bag_collection    an EmbeddingBagCollection
    history: none                      embedding_collection        an EmbeddingCollection
    C1, of a table of `wide`: sum      wide                        an EmbeddingBagCollection

The constructor of the model gets each collection as the argument of its name. Lookups that pool and
lookups that do not have a usual collection each; a table or lookup may name another. Lookups of two
collections may read the same table.

Tables and lookups that settings list.

    tables                                   lookups
    {name, num_embeddings, embedding_dim}    {table, feature, output, combiner}

Without lookups, each of a table's `feature_names` reads the table once. Listed lookups give the
order of the lookups and of their vectors; then tables need no `feature_names`. Lookups that do not
pool, or whose table or lookup names a `collection`, are in a collection of their own.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated, Literal, NamedTuple, TypeVar

from recapp.console import note_once
from recapp.errors import ConfigError, suggest
from recapp.settings.records import absent, to_plain
from recapp.settings.values import IdRule, Positive, Rows, Storage, Width, Within, shown
from recapp.tables.config import (
    EmbeddingConfig,
    PoolingType,
    TableLookup,
    check_max_key,
    check_tables,
    output_of,
    table_config,
)
from recapp.tables.positions import DYNAMIC, DynamicRows

# The collection with one weight for each id.
WIDE = "wide"


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


TableSettings = TablesOfDataset | ListedTables


T = TypeVar("T")
BAGS = "embedding_bag_collection"
SEQUENCES = "embedding_collection"
# The models of an ensemble at the most.
MOST_MEMBERS = 64


@dataclass(frozen=True)
class CollectionTables:
    """The tables of a collection, and their lookups in output order."""

    tables: Sequence[EmbeddingConfig]
    lookups: tuple[TableLookup, ...]

    @property
    def pools(self) -> bool:
        """Return whether the lookups pool their bags."""
        return self.lookups[0].pooling is not PoolingType.NONE


@dataclass(frozen=True)
class ModelTables:
    """The tables of a model, and its collections by name."""

    tables: list[EmbeddingConfig]
    collections: Mapping[str, CollectionTables]

    @property
    def lookups(self) -> tuple[TableLookup, ...]:
        """Return the lookups of all collections."""
        return tuple(x for each in self.collections.values() for x in each.lookups)


def member_name(table: str, number: int) -> str:
    """Return the name of a table in member `number` = 0, 1, ... of an ensemble: C1, C1__2, ..."""
    return f"{table}__{number + 1}" if number else table


def of_all_members(by_table: Mapping[str, T], tables: Iterable[EmbeddingConfig]) -> dict[str, T]:
    """Return entries by table name or glob for the tables of all members of an ensemble. Each table
    of a later member gets the entry of its own name, else that of the table of the first member,
    else that of the last glob that matches one of the two names.

    Args:
        by_table: The entries.
        tables: The tables of all members.
    """
    entries = dict(by_table)
    for table in tables:
        if table.member_of is None or table.name in by_table:
            continue
        names = (table.name, table.member_of)
        globs = [p for p in by_table if any(fnmatchcase(name, p) for name in names)]
        if table.member_of in by_table:
            entries[table.name] = by_table[table.member_of]
        elif globs and not fnmatchcase(table.name, globs[-1]):
            entries[table.name] = by_table[globs[-1]]
    return entries


def named_tables(
    setting: str, names: Sequence[str | None], tables: Sequence[EmbeddingConfig]
) -> list[str]:
    """Return the tables that a setting names, each in all members of an ensemble.

    Args:
        setting: The setting, for errors.
        names: The names of tables of the first member, or of a later one.
        tables: The tables of all members.

    Raises:
        ConfigError: There is no such table; the message lists close matches.
    """
    known = [table.name for table in tables if table.member_of is None]
    for name in names:
        if not any(name in (t.name, t.member_of) for t in tables):
            raise ConfigError(f"{setting}: {name}: no such table; {suggest(str(name), known)}")
    return [t.name for t in tables if t.name in names or t.member_of in names]


def member_tables(tables: ModelTables, number: int) -> ModelTables:
    """Return the tables of a member of an ensemble: those of the first member under other names.

    Args:
        tables: The tables of the first member.
        number: The number of the member, from 0 on.
    """
    if number == 0:
        return tables

    def named(table: EmbeddingConfig) -> EmbeddingConfig:
        return replace(table, name=member_name(table.name, number), member_of=table.name)

    collections = {
        name: CollectionTables(
            [named(table) for table in collection.tables],
            tuple(replace(lookup, table=named(lookup.table)) for lookup in collection.lookups),
        )
        for name, collection in tables.collections.items()
    }
    return ModelTables([named(table) for table in tables.tables], collections)


def usual_collection(pooling: PoolingType) -> str:
    """Return the collection of a lookup that names none."""
    return SEQUENCES if pooling is PoolingType.NONE else BAGS


def model_tables(
    tables: list[EmbeddingConfig], named: Sequence[tuple[str, TableLookup]]
) -> ModelTables:
    """Return the tables of a model by collection.

    Args:
        tables: The tables of the model.
        named: The lookups in output order, each after the name of its collection.

    Raises:
        ConfigError: A collection has lookups that pool and lookups that do not, or has the usual
            name of those of the other kind.
    """
    names = dict.fromkeys(name for name, _ in named)
    return ModelTables(tables, {name: _collection(name, tables, named) for name in names})


def _collection(
    name: str, tables: Sequence[EmbeddingConfig], named: Sequence[tuple[str, TableLookup]]
) -> CollectionTables:
    of_collection = [lookup for collection, lookup in named if collection == name]
    others = {(x.table.name, x.feature) for collection, x in named if collection != name}
    others -= {(x.table.name, x.feature) for x in of_collection}
    pooled = {x.pooling is not PoolingType.NONE: x.output for x in of_collection}
    if len(pooled) > 1:
        raise ConfigError(
            f"tables: the collection {name} has a lookup that pools, {pooled[True]}, and one that "
            f"does not, {pooled[False]}: name another collection for one of them"
        )
    if name == (BAGS if False in pooled else SEQUENCES):
        takes, does = ("pool", "does not pool") if name == BAGS else ("do not pool", "pools")
        raise ConfigError(
            f"tables: collection: {name} takes lookups that {takes}, and "
            f"{of_collection[0].output} {does}: name another collection, such as wide"
        )
    names = {x.table.name for x in of_collection}
    read = {t.name: _read_here(t, others) for t in tables if t.name in names}
    lookups = tuple(replace(x, table=read[x.table.name]) for x in of_collection)
    return CollectionTables(list(read.values()), lookups)


def _read_here(table: EmbeddingConfig, others: set[tuple[str, str]]) -> EmbeddingConfig:
    """Return a table without the features that only other collections read it by."""
    features = [name for name in table.feature_names if (table.name, name) not in others]
    return replace(table, feature_names=features)


# The settings of a table that are no argument of its config, or not as they are.
_NO_ARGUMENTS = ("feature_names", "collection", "max_key")


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
