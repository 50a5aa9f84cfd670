"""TorchRec's description of the ranks, `ShardingEnv`, and its functions that shard modules without
DDP around them.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from recapp.compat.plans_by_hand import Cut, apply_to_all, construct_module_sharding_plan
from recapp.engine.model_parallel import DistributedModelParallel
from recapp.engine.sharded_collection import ShardedCollection
from recapp.engine.sharder import (
    CollectionSharder,
    EmbeddingBagCollectionSharder,
    process_group_of,
)
from recapp.sharding.sharding_plan import ShardingPlan, TableSharding
from recapp.tables.embedding import EmbeddingCollection
from recapp.tables.embedding_bag import EmbeddingBagCollection

M = TypeVar("M", bound=nn.Module)


class ModuleSharder(Generic[M]):
    """A class for type annotations; recapp's sharder is `EmbeddingBagCollectionSharder`."""


class ShardingEnv:
    """The ranks of a model.

    Args:
        world_size: The number of ranks W.
        rank: The number of this rank.
        pg: The process group of the ranks; None if this process is the only one.
    """

    def __init__(self, world_size: int, rank: int, pg: dist.ProcessGroup | None = None) -> None:
        self.world_size = world_size
        self.rank = rank
        self.process_group = pg

    @classmethod
    def from_process_group(cls, pg: dist.ProcessGroup) -> "ShardingEnv":
        """Return the ranks of a process group."""
        return cls(dist.get_world_size(pg), dist.get_rank(pg), pg)

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> "ShardingEnv":
        """Return ranks without a process group; sharding then works for one rank only."""
        return cls(world_size, rank)


def get_local_rank(world_size: int | None = None) -> int:
    """Return the number of this rank on its host, from LOCAL_RANK of the launcher.

    Args:
        world_size: The number of ranks W; None takes that of the default group.
    """
    return int(os.environ.get("LOCAL_RANK", dist.get_rank() % get_local_size(world_size)))


def get_local_size(world_size: int | None = None) -> int:
    """Return the number of ranks on this host, from LOCAL_WORLD_SIZE of the launcher; without that
    variable, all ranks are on one host.

    Args:
        world_size: The number of ranks W; None takes that of the default group.
    """
    world = dist.get_world_size() if world_size is None else world_size
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return local if local > 0 and world % local == 0 else world


def shard(
    module: EmbeddingBagCollection | EmbeddingCollection,
    plan: Mapping[str, TableSharding | Cut] | Cut,
    env: Any = None,
    device: torch.device | None = None,
    sharder: CollectionSharder | None = None,
) -> ShardedCollection:
    """Return the sharded twin of a collection. Every rank calls this.

    Args:
        module: The collection.
        plan: The sharding or the cut of each table, by table name; or one cut for all tables.
        env: The ranks, as for `DistributedModelParallel`.
        device: The device of this rank.
        sharder: The sharder; None takes the default.
    """
    group = process_group_of(env)
    world = 1 if group is None else dist.get_world_size(group)
    local = 1 if group is None else get_local_size(world)
    given = plan if isinstance(plan, Mapping) else apply_to_all(module, plan)
    cuts = {name: one for name, one in given.items() if not isinstance(one, TableSharding)}
    ready = {name: one for name, one in given.items() if isinstance(one, TableSharding)}
    if cuts:
        whole = {name: cuts.get(name) or _as_it_is(ready[name]) for name in given}
        ready = construct_module_sharding_plan(module, whole, sharder, local, world)
    return (sharder or EmbeddingBagCollectionSharder()).shard(module, ready, env, device)


def _as_it_is(sharding: TableSharding) -> Cut:
    return lambda table, machine: sharding


def shard_modules(
    module: nn.Module,
    env: Any = None,
    device: torch.device | None = None,
    plan: ShardingPlan | None = None,
    sharders: Sequence[CollectionSharder] | None = None,
    init_params: bool = False,
) -> nn.Module:
    """Replace every collection of a model by its sharded twin, in place, without DDP around the
    rest, which moves to the device. Every rank calls this.

    Args:
        module: The model.
        env: The ranks, as for `DistributedModelParallel`.
        device: The device of this rank.
        plan: The sharding plan; None lets recapp plan.
        sharders: The sharders, as for `DistributedModelParallel`.
        init_params: The argument `init_parameters` of `DistributedModelParallel`.

    Returns:
        The model; or the twin, if the model is a collection itself.
    """
    sharded = DistributedModelParallel(
        module,
        env,
        device,
        plan,
        sharders,
        init_data_parallel=False,
        init_parameters=init_params,
    )
    return sharded.module
