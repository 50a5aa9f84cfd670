"""The base of modules around a collection of tables, feature processors and managed collisions; and
a twin of a collection with other tables.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from recapp.engine.sharded_collection import ShardedEmbeddingCollection
from recapp.tables.config import EmbeddingConfig
from recapp.tables.embedding import EmbeddingCollection
from recapp.tables.embedding_bag import EmbeddingBagCollection
from recapp.tables.unsharded_collection import UnshardedCollection

W = TypeVar("W", bound="CollectionWrapper")


class CollectionWrapper(nn.Module):
    """A module that holds a collection. Sharding the module replaces the collection by its sharded
    twin (`recapp/compat/wrapped_sharders.py`).
    """

    holds: ClassVar[str]
    """The name of the attribute that holds the collection, as in TorchRec."""

    @property
    def collection(self) -> Any:
        """Return the collection inside, sharded or not."""
        return getattr(self, self.holds)

    def tables(self) -> list[EmbeddingConfig]:
        """Return the tables, in order."""
        found: list[EmbeddingConfig] = self.collection.tables()
        return found

    def over(self: W, collection: nn.Module) -> W:
        """Return a shallow copy of this module around another collection, as the sharded one."""
        made = copy.copy(self)
        made._modules = dict(self._modules)
        setattr(made, self.holds, collection)
        return made


def twin_of(
    collection: Any, tables: Mapping[str, EmbeddingConfig], device: torch.device, seed: int
) -> UnshardedCollection:
    """Return an unsharded collection of other tables with the settings of a collection.

    Args:
        collection: The collection, sharded or not.
        tables: The table of the twin for each table of the collection, by its name.
        device: The device of the tables.
        seed: The seed of the start values.
    """
    made = list(tables.values())
    if isinstance(collection, EmbeddingCollection | ShardedEmbeddingCollection):
        return EmbeddingCollection(made, device, collection.need_indices(), seed)
    lookups = [replace(x, table=tables[x.table.name]) for x in collection.lookups]
    twin = EmbeddingBagCollection(made, collection.is_weighted(), device, seed, lookups=lookups)
    twin.leave_room(collection.room)
    return twin
