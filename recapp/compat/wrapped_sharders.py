"""What TorchRec's sharders of modules that wrap a collection have in common: they shard the
collection inside, and the module stands over its twin.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from recapp.engine.sharder import CollectionSharder
from recapp.errors import ConfigError
from recapp.optim.rules import RowRule
from recapp.sharding.sharding_plan import TableSharding


class WrappedSharder(CollectionSharder):
    """A sharder of modules that wrap a collection.

    Args:
        sharder: Names the optimiser and what travels; None takes the next arguments.
        fused_params: As of `CollectionSharder`.
        qcomm_codecs_registry: As of `CollectionSharder`.

    Raises:
        ConfigError: Both a sharder and what it would name.
    """

    wraps: ClassVar[type]
    """The class of the modules that are sharded."""

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
        """Return the class of the modules that are sharded."""
        return self.wraps

    def shardable_parameters(self, module: Any) -> dict[str, nn.Parameter]:
        """Return the weights of the collection by table name; those of dynamic tables have no rows
        before they are sharded.
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
        """Return the same module over the sharded twin of its collection; arguments as of
        `CollectionSharder.shard`.

        Raises:
            ConfigError: The module is of another kind.
        """
        if not isinstance(module, self.module_type):
            raise ConfigError(
                f"{type(self).__name__}.shard: the module is a {type(module).__name__}; use the "
                "sharder of its kind"
            )
        twin = super().shard(module.collection, params, env, device, module_fqn)
        return module.over(twin)
