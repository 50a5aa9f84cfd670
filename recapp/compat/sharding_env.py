"""TorchRec's ways to say which ranks there are, and its functions that shard modules in place
without DDP around them.
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
    """A name for type annotations; the one sharder is `EmbeddingBagCollectionSharder`."""


class ShardingEnv:
    """The ranks of a model.

    Args:
        world_size: Ranks W.
        rank: The number of this rank.
        pg: Their process group; None where this process is alone.
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
        """Return ranks without a process group; only one rank alone can be sharded over."""
        return cls(world_size, rank)


def get_local_rank(world_size: int | None = None) -> int:
    """Return the number of this rank on its host, which launchers leave in LOCAL_RANK.

    Args:
        world_size: Ranks W; None takes those of the default group.
    """
    return int(os.environ.get("LOCAL_RANK", dist.get_rank() % get_local_size(world_size)))


def get_local_size(world_size: int | None = None) -> int:
    """Return the ranks of this host, which launchers leave in LOCAL_WORLD_SIZE; without it all
    ranks are taken to be on one.

    Args:
        world_size: Ranks W; None takes those of the default group.
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
    """Return the sharded twin of a collection. Every rank calls it.

    Args:
        module: The collection.
        plan: How each table is sharded or cut, by name; or one cut for all of them.
        env: The ranks, as of `DistributedModelParallel`.
        device: Device of this rank.
        sharder: How; None takes the default.
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
    rest, which moves to the device. Every rank calls it.

    Args:
        module: The model.
        env: The ranks, as of `DistributedModelParallel`.
        device: Device of this rank.
        plan: Where tables lie; None lets recapp decide.
        sharders: As of `DistributedModelParallel`.
        init_params: As `init_parameters` of `DistributedModelParallel`.

    Returns:
        The model; where it is a collection itself, its twin.
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
