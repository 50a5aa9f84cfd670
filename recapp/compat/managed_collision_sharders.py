"""TorchRec's sharders of managed collisions (`recapp/compat/managed_collisions.py`), for programs
that pass them to `DistributedModelParallel`: any sharder shards every collection of a model.
"""

from collections.abc import Mapping
from typing import Any

import torch

from recapp.compat.managed_collision_collections import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from recapp.compat.managed_collisions import ManagedCollisionCollection
from recapp.compat.wrapped_sharders import WrappedSharder
from recapp.engine.sharder import CollectionSharder
from recapp.errors import ConfigError
from recapp.optim.rules import RowRule
from recapp.sharding.sharding_plan import TableSharding


class ManagedCollisionCollectionSharder(CollectionSharder):
    """A sharder of managed collisions, which lie with the rows of their tables.

    Args:
        qcomm_codecs_registry: As of `CollectionSharder`.
    """

    def __init__(self, qcomm_codecs_registry: Any = None) -> None:
        super().__init__(None, qcomm_codecs_registry)

    @property
    def module_type(self) -> type[ManagedCollisionCollection]:
        """Return the class of the modules that are sharded."""
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


class ManagedCollisionEmbeddingBagCollectionSharder(WrappedSharder):
    """A sharder of bags with managed collisions.

    Args:
        ebc_sharder: As of `WrappedSharder`.
        mc_sharder: Not needed: managed collisions lie with the rows.
        fused_params: As of `WrappedSharder`.
        qcomm_codecs_registry: As of `WrappedSharder`.
    """

    wraps = ManagedCollisionEmbeddingBagCollection

    def __init__(
        self,
        ebc_sharder: CollectionSharder | None = None,
        mc_sharder: ManagedCollisionCollectionSharder | None = None,
        fused_params: Mapping[str, Any] | RowRule | None = None,
        qcomm_codecs_registry: Any = None,
    ) -> None:
        super().__init__(ebc_sharder, fused_params, qcomm_codecs_registry)


class ManagedCollisionEmbeddingCollectionSharder(WrappedSharder):
    """A sharder of sequences with managed collisions.

    Args:
        ec_sharder: As of `WrappedSharder`.
        mc_sharder: Not needed: managed collisions lie with the rows.
        fused_params: As of `WrappedSharder`.
        qcomm_codecs_registry: As of `WrappedSharder`.
    """

    wraps = ManagedCollisionEmbeddingCollection

    def __init__(
        self,
        ec_sharder: CollectionSharder | None = None,
        mc_sharder: ManagedCollisionCollectionSharder | None = None,
        fused_params: Mapping[str, Any] | RowRule | None = None,
        qcomm_codecs_registry: Any = None,
    ) -> None:
        super().__init__(ec_sharder, fused_params, qcomm_codecs_registry)
