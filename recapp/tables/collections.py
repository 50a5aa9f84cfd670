"""What every collection of tables has, sharded or not, and which ones a model holds."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from recapp.errors import ConfigError
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.tables.config import EmbeddingConfig, check_tables
from recapp.tables.lookups import TableLookup


def compute_dtype(tables: Sequence[EmbeddingConfig]) -> torch.dtype:
    """Return the dtype that a collection computes in and returns.

    It is fp64 if any of its tables is stored so, else fp32.
    """
    return (
        torch.float64 if any(t.data_type.dtype == torch.float64 for t in tables) else torch.float32
    )


@runtime_checkable
class TableCollection(Protocol):
    """What every collection of tables has, sharded or not: all that a model or a planner needs."""

    lookups: tuple[TableLookup, ...]

    def tables(self) -> list[EmbeddingConfig]:
        """Return the tables, in order."""
        ...

    def holder_of(self, table: str) -> object:
        """Return the object that holds a table's rows: two collections that have the same one share
        the table.
        """
        ...


class BagCollection(TableCollection, Protocol):
    """A collection whose bags are pooled, sharded or not."""

    def leave_room(self, columns: int) -> None:
        """Leave columns free before the first vector of a sample, for `KeyedTensor.prepend`.

        A collection that cannot do so leaves none.

        Args:
            columns: The number of columns.
        """
        ...

    def __call__(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return the pooled vectors, [B, sum of columns], in the order of the lookups."""
        ...


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


def embedding_tables(module: nn.Module) -> list[EmbeddingConfig]:
    """List all tables of a model, in the order in which its collections are met.

    Two collections share a table where their modules share the weight, as tied weights of torch do:

        model.sequences.embeddings["users"].weight = model.bags.embedding_bags["users"].weight

    Raises:
        ConfigError: Two collections have a table of one name and do not share it, or share it and
            disagree about it.
    """
    found: dict[tuple[str, int], EmbeddingConfig] = {}
    for _, held in collections_in(module):
        for t in held.tables():
            first = found.setdefault((t.name, id(held.holder_of(t.name))), t)
            for key in ("data_type", "init_range", "weight_init_max", "weight_init_min", "init_fn"):
                if getattr(first, key) != getattr(t, key):
                    raise ConfigError(
                        f"table {t.name} is shared by two collections, which give it another "
                        f"{key}: give both the same"
                    )
    tables = list(found.values())
    if tables:
        check_tables(tables)
    return tables
