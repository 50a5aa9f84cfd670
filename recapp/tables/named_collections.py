"""The collections of a model, each with a name, its tables and its lookups.

    lookups                            collections
    C1, C2: sum                        embedding_bag_collection    an EmbeddingBagCollection
    history: none                      embedding_collection        an EmbeddingCollection
    C1, of a table of `wide`: sum      wide                        an EmbeddingBagCollection

The constructor of the model gets each collection as the argument of its name. Lookups that pool and
lookups that do not have a usual collection each; a table or lookup may name another. Lookups of two
collections may read the same table.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TypeVar

from recapp.errors import ConfigError, suggest
from recapp.tables.config import EmbeddingConfig, PoolingType, TableLookup

T = TypeVar("T")
BAGS = "embedding_bag_collection"
SEQUENCES = "embedding_collection"
MOST_MEMBERS = 64
"""The models of an ensemble at the most."""


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
