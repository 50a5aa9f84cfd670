"""TorchRec's sharders of managed collisions (`recapp/compat/managed_collisions.py`), for programs
that pass them to `DistributedModelParallel`: any sharder shards every collection of a model.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from recapp.compat.managed_collisions import (
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
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


class _WrappedSharder(CollectionSharder):
    """A sharder of collections with managed collisions.

    Args:
        sharder: Names the optimiser and what travels; None takes the next arguments.
        mc_sharder: Not needed: managed collisions lie with the rows.
        fused_params: As of `CollectionSharder`.
        qcomm_codecs_registry: As of `CollectionSharder`.

    Raises:
        ConfigError: Both a sharder and what it would name.
    """

    def __init__(
        self,
        sharder: CollectionSharder | None,
        mc_sharder: ManagedCollisionCollectionSharder | None = None,
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

    def shardable_parameters(self, module: Any) -> dict[str, nn.Parameter]:
        """Return the weights of a collection by table name; they have no rows before they are
        sharded.
        """
        return super().shardable_parameters(module._embedding_module)

    def shard(
        self,
        module: Any,
        params: Mapping[str, TableSharding],
        env: Any = None,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Return the same module over the sharded twin of its collection; arguments as of
        `CollectionSharder.shard`.
        """
        if not isinstance(module, BaseManagedCollisionEmbeddingCollection):
            raise ConfigError(
                f"{type(self).__name__}.shard: the module is a {type(module).__name__}; use the "
                "sharder of its kind"
            )
        twin = super().shard(module._embedding_module, params, env, device, module_fqn)
        return module.over(twin)


class ManagedCollisionEmbeddingBagCollectionSharder(_WrappedSharder):
    """A sharder of bags with managed collisions; arguments as of `_WrappedSharder`."""

    def __init__(
        self, ebc_sharder: CollectionSharder | None = None, *others: Any, **named: Any
    ) -> None:
        super().__init__(ebc_sharder, *others, **named)

    @property
    def module_type(self) -> type[ManagedCollisionEmbeddingBagCollection]:
        """Return the class of the modules that are sharded."""
        return ManagedCollisionEmbeddingBagCollection


class ManagedCollisionEmbeddingCollectionSharder(_WrappedSharder):
    """A sharder of sequences with managed collisions; arguments as of `_WrappedSharder`."""

    def __init__(
        self, ec_sharder: CollectionSharder | None = None, *others: Any, **named: Any
    ) -> None:
        super().__init__(ec_sharder, *others, **named)

    @property
    def module_type(self) -> type[ManagedCollisionEmbeddingCollection]:
        """Return the class of the modules that are sharded."""
        return ManagedCollisionEmbeddingCollection
