"""The base of modules around a collection of tables: feature processors, managed collisions."""

import copy
from typing import Any, ClassVar, TypeVar

from torch import nn

from recapp.tables.config import EmbeddingConfig

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
