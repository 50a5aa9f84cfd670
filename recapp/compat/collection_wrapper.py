"""A module around a collection of tables: feature processors and managed collisions are such."""

import copy
from typing import Any, ClassVar, TypeVar

from torch import nn

from recapp.tables.config import EmbeddingConfig

W = TypeVar("W", bound="CollectionWrapper")


class CollectionWrapper(nn.Module):
    """A module that holds a collection, which is replaced by its sharded twin where the module is
    sharded (`recapp/compat/wrapped_sharders.py`).
    """

    holds: ClassVar[str]
    """The attribute that has the collection, under TorchRec's name."""

    @property
    def collection(self) -> Any:
        """Return the collection inside, sharded or not."""
        return getattr(self, self.holds)

    def tables(self) -> list[EmbeddingConfig]:
        """Return the tables, in order."""
        found: list[EmbeddingConfig] = self.collection.tables()
        return found

    def over(self: W, collection: nn.Module) -> W:
        """Return the same module over another collection, such as the sharded one."""
        made = copy.copy(self)
        made._modules = dict(self._modules)
        setattr(made, self.holds, collection)
        return made
