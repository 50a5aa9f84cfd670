"""Sharders: the settings of sharding that `DistributedModelParallel` takes, and a method that
shards a single collection.

    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": "sgd", "learning_rate": 0.1})
    plan = planner.collective_plan(collection, [sharder])
    sharded = sharder.shard(collection, plan.plan[""], env)

Names and argument order are those of `torchrec/distributed/embeddingbag.py`. One sharder serves all
collections of a model, of bags and of sequences. There is only one engine, so no sharder needs to
be registered.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from recapp.engine.shard_model import sharded_twins
from recapp.engine.sharded_collection import ShardedCollection
from recapp.errors import ConfigError
from recapp.optim.named_rules import Rules, is_rules, rules_of_fused_params
from recapp.optim.rules import RowRule, rowwise_adagrad
from recapp.optim.table_rule import describe, table_rule
from recapp.sharding.sharding_plan import ShardingPlan, TableSharding
from recapp.sharding.sharding_types import BUILT_IN
from recapp.tables.embedding import EmbeddingCollection
from recapp.tables.embedding_bag import EmbeddingBagCollection
from recapp.tables.unsharded_collection import UnshardedCollection
from recapp.transport.choose_transport import make_comm


class CollectionSharder:
    """The optimiser of a model's tables, and the dtype of their vectors in messages.

    Args:
        fused_params: The optimiser as TorchRec's settings (`recapp/optim/named_rules.py`), or a
            row rule (`recapp/optim/rules.py`); the entry `tables` has settings of single tables.
            None takes the optimiser that was applied in backward to the tables
            (`recapp/optim/table_rule.py`), or else row-wise Adagrad at its default rate.
        qcomm_codecs_registry: The result of `get_qcomm_codecs_registry` for a `QCommsConfig`, with
            the dtype of vectors and gradients in messages. None or {} takes the compute type.
        rule: A row rule, or rules by table name or glob (`recapp/optim/named_rules.py`), instead
            of `fused_params`.

    Raises:
        ConfigError: The optimiser is not a row rule, `fused_params` and `rule` are both given, or
            `qcomm_codecs_registry` is not a registry.
    """

    def __init__(
        self,
        fused_params: Mapping[str, Any] | RowRule | None = None,
        qcomm_codecs_registry: Any = None,
        *,
        rule: Rules | None = None,
    ) -> None:
        if fused_params is not None and rule is not None:
            raise ConfigError("fused_params and rule both name the tables' optimiser: give one")
        if not isinstance(fused_params, RowRule | Mapping | None):
            raise ConfigError(
                f"fused_params is a {type(fused_params).__name__}: give a dict such as "
                '{"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.1}, or a row rule'
            )
        if not is_rules(rule):
            raise ConfigError(
                f"rule is a {type(rule).__name__}: give a row rule such as adagrad(0.05), or a "
                'dict of them by table name or glob, {"*": adagrad(0.05), "C3": sgd(0.1)}'
            )
        self.rule: Rules | None = rule if fused_params is None else _named(fused_params)
        self.payload: torch.dtype | None = None
        if qcomm_codecs_registry is not None and qcomm_codecs_registry != {}:
            if not hasattr(qcomm_codecs_registry, "payload"):
                raise ConfigError(
                    f"qcomm_codecs_registry is a {type(qcomm_codecs_registry).__name__}: make it "
                    "with recapp's get_qcomm_codecs_registry(QCommsConfig(...)), or leave it out"
                )
            self.payload = qcomm_codecs_registry.payload

    def shardable_parameters(self, module: UnshardedCollection) -> dict[str, nn.Parameter]:
        """Return the weights of a collection by table name."""
        return {
            t.name: nn.Parameter(weight) if not isinstance(weight, nn.Parameter) else weight
            for t in module.tables()
            for weight in [module.weight(t.name)]
        }

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the names of the sharding types, the same for every device."""
        return [record.name for record in BUILT_IN]

    def shard(
        self,
        module: UnshardedCollection,
        params: Mapping[str, TableSharding],
        env: Any = None,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedCollection:
        """Return the sharded twin of a collection. Every rank calls it.

        Args:
            module: The collection, which does not change.
            params: The sharding of each table: `plan.plan[path]`.
            env: The ranks, as for `DistributedModelParallel`.
            device: The device of this rank; None takes the rank's GPU where the process group is
                NCCL, else the CPU.
            module_fqn: The path of the collection, for error texts.

        Raises:
            PlanError: `params` has other tables than the collection, or is for another number of
                ranks.
            ConfigError: The optimiser contradicts the one that was applied in backward.
        """
        ranks = process_group_of(env)
        comm = make_comm(tables_group(ranks), device or own_device(ranks))
        plan = ShardingPlan(dict(params), comm.world, name=module_fqn or "custom")
        plan.check(module.tables())
        rule = table_rule(module, [self]) or rowwise_adagrad()
        (twin,) = sharded_twins([module], plan, comm, rule, payload=self.payload)
        return twin

    def __repr__(self) -> str:
        named = "default" if self.rule is None else describe(self.rule)
        return f"{type(self).__name__}({named}, payload={self.payload})"


def _named(fused_params: Mapping[str, Any] | RowRule) -> Rules:
    if isinstance(fused_params, RowRule):
        return fused_params
    return rules_of_fused_params(fused_params)


class EmbeddingBagCollectionSharder(CollectionSharder):
    """A sharder with the name of TorchRec's sharder for collections of bags."""

    @property
    def module_type(self) -> type[EmbeddingBagCollection]:
        """Return the class of the unsharded collections."""
        return EmbeddingBagCollection


class EmbeddingCollectionSharder(CollectionSharder):
    """A sharder with the name of TorchRec's sharder for collections of sequences. Arguments as for
    `CollectionSharder`: the optimiser of touched rows, and the dtype of vectors in messages.
    """

    @property
    def module_type(self) -> type[EmbeddingCollection]:
        """Return the class of the unsharded collections."""
        return EmbeddingCollection


def get_default_sharders() -> list[CollectionSharder]:
    """Return the default sharders of `DistributedModelParallel`."""
    return [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]


def payload_of(sharders: Sequence[CollectionSharder] | None) -> torch.dtype | None:
    """Return the dtype of vectors in messages that sharders name; None for the compute type.

    Raises:
        ConfigError: The sharders name different dtypes.
    """
    payloads = [sharder.payload for sharder in sharders or ()]
    if len(set(payloads)) > 1:
        raise ConfigError(
            f"sharders let vectors travel as {payloads}: one sharder shards all tables of a model, "
            "so pass one"
        )
    return payloads[0] if payloads else None


def process_group_of(env: Any) -> dist.ProcessGroup | None:
    """Return the process group of an environment; None where this process is alone.

    Args:
        env: A process group, an object that has one as `process_group`, or None for the default
            group. An object whose `world_size` is 1 needs no group.

    Raises:
        ConfigError: The environment has no process group.
    """
    if env is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    group = env if isinstance(env, dist.ProcessGroup) else getattr(env, "process_group", None)
    if group is None and getattr(env, "world_size", None) == 1:
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"env is a {type(env).__name__} without a process group: pass a "
            "torch.distributed.ProcessGroup, an object that has one as process_group, or nothing "
            "for the default group"
        )
    return group


def tables_group(ranks: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the process group of the tables' messages, which have an order of their own.

    For the default group, make another group. Any other group is used itself, because only all
    ranks of the default group together can make a new group.
    """
    if ranks is None or ranks is not dist.group.WORLD:
        return ranks
    made = dist.new_group()
    assert isinstance(made, dist.ProcessGroup)
    return made


def own_device(ranks: dist.ProcessGroup | None) -> torch.device:
    """Return the device of this rank: the rank's GPU where the group is NCCL, else the CPU."""
    if ranks is not None and dist.get_backend(ranks) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
