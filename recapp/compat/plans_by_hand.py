"""Plans that a program writes itself, in TorchRec's words.

    plan = construct_module_sharding_plan(
        collection,
        {"t1": table_wise(rank=0), "t2": row_wise(), "t3": column_wise(ranks=[0, 1])},
        local_size=2,
        world_size=2,
    )
    model = DistributedModelParallel(model, plan=ShardingPlan({"collection": plan}))

Each function names a sharding type and where its shards go; `tile` (`recapp/sharding/tilings.py`)
cuts the table.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch.distributed as dist

from recapp.errors import PlanError
from recapp.sharding import sharding_plan
from recapp.sharding.sharding_plan import Shard, TableSharding
from recapp.sharding.sharding_types import CandidateRanks
from recapp.sharding.tilings import tile
from recapp.tables.collections import TableCollection
from recapp.tables.config import EmbeddingConfig


class EmbeddingModuleShardingPlan(dict[str, TableSharding]):
    """How each table of one collection is sharded, by its name.

    Args:
        tables: The tables.
        world_size: The ranks W.
    """

    def __init__(self, tables: Mapping[str, TableSharding], world_size: int) -> None:
        super().__init__(tables)
        self.world_size = world_size


@dataclass(frozen=True)
class Machine:
    """The ranks that a table is cut for.

    Args:
        world_size: Ranks W.
        local_size: Ranks of a host.
    """

    world_size: int
    local_size: int

    @property
    def hosts(self) -> list[list[int]]:
        """Return the ranks of each host."""
        step = self.local_size
        return [list(range(first, first + step)) for first in range(0, self.world_size, step)]

    def host(self, index: int) -> list[int]:
        """Return the ranks of one host.

        Raises:
            PlanError: There is no such host.
        """
        if not 0 <= index < len(self.hosts):
            raise PlanError(
                f"host {index} is not there: {self.world_size} ranks, {self.local_size} on each "
                f"host, are on hosts 0..{len(self.hosts) - 1}"
            )
        return self.hosts[index]


Cut = Callable[[EmbeddingConfig, Machine], TableSharding]
"""Cuts one table for some ranks; TorchRec's ParameterShardingGenerator."""


def data_parallel() -> Cut:
    """Keep a copy of the table on every rank."""
    return lambda table, machine: _tiled(table, "data_parallel", machine.hosts)


def table_wise(rank: int) -> Cut:
    """Put the whole table on one rank."""
    return lambda table, machine: _tiled(table, "table_wise", [[rank]])


def row_wise() -> Cut:
    """Cut the table by rows over all ranks."""
    return lambda table, machine: _tiled(table, "row_wise", machine.hosts)


def column_wise(
    ranks: Sequence[int] | None = None, size_per_rank: Sequence[int] | None = None
) -> Cut:
    """Cut the table by columns, into equal strips for some ranks or into strips of given widths.

    Args:
        ranks: The rank of each strip.
        size_per_rank: The columns of each strip, of rank 0 first.

    Raises:
        PlanError: Neither or both are given, or widths that are not those of the table.
    """
    if (ranks is None) == (size_per_rank is None):
        raise PlanError("column_wise: give either ranks or size_per_rank")

    def cut(table: EmbeddingConfig, machine: Machine) -> TableSharding:
        if size_per_rank is None:
            holders = list(ranks or ())
            base, more = divmod(table.embedding_dim, len(holders))
            widths = [base + (number < more) for number in range(len(holders))]
        else:
            holders = list(range(len(size_per_rank)))
            widths = list(size_per_rank)
        if sum(widths) != table.embedding_dim:
            raise PlanError(
                f"table {table.name}: column_wise strips of {widths} columns are not its "
                f"{table.embedding_dim}"
            )
        rows = range(table.plan_rows)
        edges = pairwise(accumulate(widths, initial=0))
        strips = [
            Shard(rank, rows, range(*edge)) for rank, edge in zip(holders, edges, strict=True)
        ]
        return TableSharding(tuple(strips), sharding_type="column_wise")

    return cut


def table_row_wise(host_index: int) -> Cut:
    """Cut the table by rows over the ranks of one host."""
    return lambda table, machine: _tiled(table, "table_row_wise", [machine.host(host_index)])


def grid_shard(host_indexes: Sequence[int]) -> Cut:
    """Cut the table by columns over hosts, and each strip by rows over the ranks of its host."""

    def cut(table: EmbeddingConfig, machine: Machine) -> TableSharding:
        hosts = [machine.host(index) for index in host_indexes]
        return _tiled(table, "grid_shard", hosts, -(-table.embedding_dim // len(hosts)))

    return cut


def _tiled(
    table: EmbeddingConfig, name: str, hosts: list[list[int]], column_width: int | None = None
) -> TableSharding:
    ranks = CandidateRanks([rank for host in hosts for rank in host], hosts)
    return tile(table, name, ranks, column_width=column_width or table.embedding_dim)


def apply_to_all(module: TableCollection, cut: Cut) -> dict[str, Cut]:
    """Return the same cut for every table of a collection.

    Args:
        module: The collection.
        cut: How each of its tables is cut.
    """
    return {table.name: cut for table in module.tables()}


def construct_module_sharding_plan(
    module: TableCollection,
    per_param_sharding: Mapping[str, Cut],
    sharder: Any = None,
    local_size: int | None = None,
    world_size: int | None = None,
    device_type: str | None = None,
) -> EmbeddingModuleShardingPlan:
    """Return the plan of one collection.

    Args:
        module: The collection.
        per_param_sharding: How each of its tables is cut, by name.
        sharder: Not needed: every sharder makes the same shards.
        local_size: Ranks of a host; None puts all of them on one.
        world_size: Ranks W; None takes those of the default group, or one.
        device_type: Not needed: a plan is the same on every device.

    Raises:
        PlanError: Tables that are missing or unknown, or shards that do not tile them.
    """
    world = _world_size() if world_size is None else world_size
    machine = Machine(world, local_size or world)
    tables = {table.name: table for table in module.tables()}
    for name in per_param_sharding:
        if name not in tables:
            raise PlanError(
                f"per_param_sharding names table {name}; the collection has {', '.join(tables)}"
            )
    for name in tables:
        if name not in per_param_sharding:
            raise PlanError(f"per_param_sharding says nothing of table {name}")
    cut = {name: per_param_sharding[name](table, machine) for name, table in tables.items()}
    sharding_plan.ShardingPlan(cut, world).check(list(tables.values()))
    return EmbeddingModuleShardingPlan(cut, world)


def ShardingPlan(plan: Mapping[str, Mapping[str, TableSharding]]) -> sharding_plan.ShardingPlan:
    """Return a plan of the form that TorchRec's constructor takes.

    Args:
        plan: How each table is sharded, by the path of its collection and by its name.

    Raises:
        PlanError: Collections that were planned for different numbers of ranks, or two tables of
            one name.
    """
    sizes = {getattr(part, "world_size", None) or _world_size() for part in plan.values()}
    if len(sizes) > 1:
        raise PlanError(f"the collections of a plan are for {sorted(sizes)} ranks: give them one")
    names = [name for part in plan.values() for name in part]
    for name in names:
        if names.count(name) > 1:
            raise PlanError(f"two tables are called {name}; names must be unique in a model")
    return sharding_plan.ShardingPlan(
        {name: sharding for part in plan.values() for name, sharding in part.items()},
        sizes.pop() if sizes else _world_size(),
        modules={path: list(part) for path, part in plan.items()},
    )


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
