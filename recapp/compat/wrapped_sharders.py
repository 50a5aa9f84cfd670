"""TorchRec's sharders of modules that wrap a collection: feature processors and managed collisions.

They shard the collection inside and put its sharded twin into the module. Programs pass them to
`DistributedModelParallel`, in which any sharder shards every collection of a model.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from recapp.compat.feature_processors import FeatureProcessedEmbeddingBagCollection
from recapp.compat.managed_collision_collections import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from recapp.compat.managed_collisions import ManagedCollisionCollection
from recapp.engine.sharder import CollectionSharder
from recapp.errors import ConfigError
from recapp.optim.rules import RowRule
from recapp.sharding.sharding_plan import TableSharding


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

    wraps: ClassVar[type]
    """The class of the modules that the sharder shards."""

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
                    f"{type(self).__name__}: a sharder is given, and fused_params or "
                    "qcomm_codecs_registry beside it: say all of it in the sharder"
                )
            self.rule = sharder.rule
            self.payload = sharder.payload

    @property
    def module_type(self) -> type[Any]:
        """Return the class of the modules that the sharder shards."""
        return self.wraps

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


class FeatureProcessedEmbeddingBagCollectionSharder(WrappedSharder):
    """A sharder of collections with feature processors, for every sharding type; TorchRec has no
    row-wise types for them.

    Args:
        ebc_sharder: The `sharder` of `WrappedSharder`.
        qcomm_codecs_registry: The type of sent vectors (`CollectionSharder`).
    """

    wraps = FeatureProcessedEmbeddingBagCollection

    def __init__(
        self, ebc_sharder: CollectionSharder | None = None, qcomm_codecs_registry: Any = None
    ) -> None:
        super().__init__(ebc_sharder, None, qcomm_codecs_registry)


class ManagedCollisionEmbeddingBagCollectionSharder(WrappedSharder):
    """A sharder of bags with managed collisions.

    Args:
        ebc_sharder: The `sharder` of `WrappedSharder`.
        mc_sharder: Ignored, because managed collisions are sharded with the tables.
        fused_params: The optimiser, as `CollectionSharder` takes it.
        qcomm_codecs_registry: The type of sent vectors (`CollectionSharder`).
    """

    wraps = ManagedCollisionEmbeddingBagCollection

    def __init__(
        self,
        ebc_sharder: CollectionSharder | None = None,
        mc_sharder: CollectionSharder | None = None,
        fused_params: Mapping[str, Any] | RowRule | None = None,
        qcomm_codecs_registry: Any = None,
    ) -> None:
        super().__init__(ebc_sharder, fused_params, qcomm_codecs_registry)


class ManagedCollisionEmbeddingCollectionSharder(WrappedSharder):
    """A sharder of sequences with managed collisions.

    Args:
        ec_sharder: The `sharder` of `WrappedSharder`.
        mc_sharder: Ignored, because managed collisions are sharded with the tables.
        fused_params: The optimiser, as `CollectionSharder` takes it.
        qcomm_codecs_registry: The type of sent vectors (`CollectionSharder`).
    """

    wraps = ManagedCollisionEmbeddingCollection

    def __init__(
        self,
        ec_sharder: CollectionSharder | None = None,
        mc_sharder: CollectionSharder | None = None,
        fused_params: Mapping[str, Any] | RowRule | None = None,
        qcomm_codecs_registry: Any = None,
    ) -> None:
        super().__init__(ec_sharder, fused_params, qcomm_codecs_registry)


class ManagedCollisionCollectionSharder(CollectionSharder):
    """A sharder of managed collisions, which recapp shards with their tables only.

    Args:
        qcomm_codecs_registry: The type of sent vectors (`CollectionSharder`).
    """

    def __init__(self, qcomm_codecs_registry: Any = None) -> None:
        super().__init__(None, qcomm_codecs_registry)

    @property
    def module_type(self) -> type[ManagedCollisionCollection]:
        """Return the class of the modules that the sharder shards."""
        return ManagedCollisionCollection

    def shard(
        self,
        module: Any,
        params: Mapping[str, TableSharding],
        env: Any = None,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Refuse to shard managed collisions without their tables.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "ManagedCollisionCollectionSharder.shard: managed collisions lie with the rows of "
            "their tables: shard the ManagedCollisionEmbeddingBagCollection, with its own sharder"
        )
