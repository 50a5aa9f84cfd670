"""A dict of modules whose names come from data: logs have columns called `items`, `type` or
`user.id`.

torch refuses such names, because submodules are attributes too (`module.items` is a method, a dot
separates a path). Here a module is found by its key, and in the state dict as
`<dict>.<name>.weight` with a slash for each dot of the name, but not as an attribute.

The interface of every collection of tables, sharded or not, and the search for collections in a
model.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from recapp.errors import ConfigError
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.tables.config import EmbeddingConfig, TableLookup, check_tables, compute_type


class ModuleByName(nn.ModuleDict):
    """`torch.nn.ModuleDict` for any names without slashes."""

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a module, whatever its name."""
        modules: dict[str, nn.Module | None] = self._modules  # type: ignore[assignment]
        modules[key_of(name)] = module

    def __getitem__(self, name: str) -> nn.Module:
        return super().__getitem__(key_of(name))

    def __contains__(self, name: Any) -> bool:
        return super().__contains__(key_of(str(name)))


def key_of(name: str) -> str:
    """Return the form of a name in the state dict."""
    return name.replace(".", "/")


def compute_dtype(tables: Sequence[EmbeddingConfig]) -> torch.dtype:
    """Return the dtype of a collection's arithmetic and output (`compute_type`)."""
    return compute_type(tables).dtype


@runtime_checkable
class TableCollection(Protocol):
    """The interface of every collection of tables, sharded or not, for models and planners."""

    lookups: tuple[TableLookup, ...]

    def tables(self) -> list[EmbeddingConfig]:
        """Return the tables, in order."""
        ...

    def holder_of(self, table: str) -> object:
        """Return the object that holds a table's rows. Two collections with the same object share
        the table.
        """
        ...


class BagCollection(TableCollection, Protocol):
    """A collection whose bags are pooled, sharded or not."""

    def leave_room(self, columns: int) -> None:
        """Leave columns free before the first vector of a sample, for `KeyedTensor.prepend`.

        A collection may ignore this.

        Args:
            columns: The number of columns.
        """
        ...

    def __call__(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return the pooled vectors, [B, sum of columns], in the order of the lookups."""
        ...


class SequenceCollection(TableCollection, Protocol):
    """A collection whose ids each give a vector, sharded or not."""

    def __call__(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the vectors of each lookup by output name."""
        ...


def collections_in(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Walk a model and yield its collections of tables, sharded or not, with their paths.

    A collection that is a submodule under two paths is yielded once.
    """
    for path, part in module.named_modules():
        if isinstance(part, TableCollection):
            yield path, part


def embedding_lookups(module: nn.Module) -> list[TableLookup]:
    """List the lookups of all collections of a model, in the order of the walk.

    Outputs of different collections may have the same name.
    """
    return [lookup for _, collection in collections_in(module) for lookup in collection.lookups]


def embedding_tables(module: nn.Module) -> list[EmbeddingConfig]:
    """List all tables of a model, in the order of the walk.

    Two collections share a table if their modules share the weight, like tied weights in torch:

        model.sequences.embeddings["users"].weight = model.bags.embedding_bags["users"].weight

    Raises:
        ConfigError: Two collections have a table of the same name and do not share it, or share a
            table with different configs.
    """
    distinct_tables: dict[tuple[str, int], EmbeddingConfig] = {}
    for _, collection in collections_in(module):
        for t in collection.tables():
            first = distinct_tables.setdefault((t.name, id(collection.holder_of(t.name))), t)
            for key in ("data_type", "init_range", "weight_init_max", "weight_init_min", "init_fn"):
                if getattr(first, key) != getattr(t, key):
                    raise ConfigError(
                        f"table {t.name} is shared by two collections, which give it a different "
                        f"{key}: give both the same {key}"
                    )
    tables = list(distinct_tables.values())
    if tables:
        check_tables(tables)
    return tables
