"""The bases of modules around a collection of tables (feature processors, managed collisions) and
of their sharders, and a twin of a collection with other tables.

Programs pass the sharders to `DistributedModelParallel`, in which any sharder shards every
collection of a model.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from recapp.engine.sharded_collection import ShardedEmbeddingCollection
from recapp.errors import ConfigError
from recapp.optim.rules import RowRule
from recapp.parallel import CollectionSharder
from recapp.sharding.sharding_plan import TableSharding
from recapp.tables.config import EmbeddingConfig
from recapp.tables.embedding import EmbeddingCollection
from recapp.tables.embedding_bag import EmbeddingBagCollection
from recapp.tables.unsharded_collection import UnshardedCollection

W = TypeVar("W", bound="CollectionWrapper")


class CollectionWrapper(nn.Module):
    """A module that holds a collection. Sharding the module replaces the collection by its sharded
    twin (`WrappedSharder`).
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


class WrappedSharder(CollectionSharder):
    """A sharder of modules that wrap a collection.

    Args:
        sharder: A sharder with the optimiser and the type of sent vectors; None takes the next two
            arguments.
        fused_params: The optimiser, as `CollectionSharder` takes it.
        qcomm_codecs_registry: The type of sent vectors (`CollectionSharder`).

    Raises:
        ConfigError: A sharder is given together with one of the other arguments.
    """

    def __init__(
        self,
        sharder: CollectionSharder | None,
        fused_params: Mapping[str, Any] | RowRule | None = None,
        qcomm_codecs_registry: Any = None,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
        if sharder is not None:
            if fused_params is not None or self.payload is not None:
                raise ConfigError(
                    f"{type(self).__name__}: a sharder is given together with fused_params or "
                    "qcomm_codecs_registry: give these to the sharder instead"
                )
            self.rule = sharder.rule
            self.payload = sharder.payload

    def shardable_parameters(self, module: Any) -> dict[str, nn.Parameter]:
        """Return the weights of the collection by table name. Weights of dynamic tables have no
        rows before sharding.
        """
        return super().shardable_parameters(module.collection)

    def shard(
        self,
        module: Any,
        params: Mapping[str, TableSharding],
        env: Any = None,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Return the module around the sharded twin of its collection. The arguments are those of
        `CollectionSharder.shard`.

        Raises:
            ConfigError: The module has another class.
        """
        if not isinstance(module, self.module_type):
            raise ConfigError(
                f"{type(self).__name__}.shard: the module is a {type(module).__name__}; use the "
                "sharder of its kind"
            )
        twin = super().shard(module.collection, params, env, device, module_fqn)
        return module.over(twin)


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
