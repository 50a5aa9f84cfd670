"""Place the tables of a read-only model on one rank or over several.

    meta model --placed--> collections of the engine, each rank with its part of the rows

One rank holds whole tables and needs no process group. For several ranks the planner makes a plan
for read-only tables; the scores have the bits of one rank.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from recapp.engine.row_store import RowStore, StoredGroup
from recapp.engine.sharded_collection import shard_model
from recapp.errors import RecappError
from recapp.planner.embedding_planner import serving_plan
from recapp.planner.topology import Topology
from recapp.processes.process_memory import free_memory_bytes, memory_pools
from recapp.sharding.sharding_plan import Shard, ShardingPlan, TableSharding
from recapp.tables.collections import embedding_lookups, embedding_tables
from recapp.transport.communicator import Comm, raise_together

T = TypeVar("T")


def placed(
    model: nn.Module,
    comm: Comm,
    make_store: Callable[[StoredGroup], RowStore] | None = None,
) -> nn.Module:
    """Replace the collections of a model, which are on the meta device. Every rank calls it.

    Args:
        model: The model; it is changed in place.
        comm: The ranks that hold its tables, with the device of this rank.
        make_store: Makes the store of each group; None makes stores that the caller fills.

    Returns:
        The model, in evaluation mode and without gradients.

    Raises:
        PlanError: The tables do not fit.
    """
    if comm.world == 1:
        return one_rank(model, comm.device, make_store)
    free_W = free_memory_bytes(comm.all_gather(memory_pools(comm.device)))
    plan = comm.broadcast(together(comm, lambda: _plan(model, comm, free_W)))
    return _under(plan, model, comm, make_store)


def one_rank(
    model: nn.Module,
    device: torch.device,
    make_store: Callable[[StoredGroup], RowStore] | None = None,
) -> nn.Module:
    """Replace the collections of a model by collections of one rank, without a process group.

    Arguments and result are those of `placed`, with the device of the tables instead of ranks.
    """
    whole = {
        t.name: TableSharding(
            (Shard(0, range(t.plan_rows), range(t.embedding_dim)),), "unique", "table_wise"
        )
        for t in embedding_tables(model)
    }
    plan = ShardingPlan(whole, 1, name="one_rank")
    return _under(plan, model, Comm(device=device, alone=True), make_store)


def _under(
    plan: ShardingPlan,
    model: nn.Module,
    comm: Comm,
    make_store: Callable[[StoredGroup], RowStore] | None,
) -> nn.Module:
    """Return the model with its tables placed by a plan."""
    made = shard_model(model, plan, comm, None, trains=False, make_store=make_store)
    return made.to(comm.device).eval().requires_grad_(False)


def together(comm: Comm, step: Callable[[], T]) -> T:
    """Run a step on each rank and return its result; either all ranks return, or all raise.

    Args:
        comm: The ranks.
        step: The step; it must not communicate with other ranks.

    Raises:
        RecappError: The step has failed on this rank.
        RankError: The step has failed on another rank.
    """
    failure = None
    try:
        made = step()
    except RecappError as error:
        failure = error
    raise_together(failure, comm.all_gather(failure and str(failure)), "could not load the model")
    return made


def _plan(model: nn.Module, comm: Comm, free_W: list[int | None]) -> ShardingPlan | None:
    """Return the plan on rank 0, which decides; return None on other ranks."""
    if comm.rank:
        return None
    known = [free for free in free_W if free is not None]
    memory = known if len(known) == comm.world else None
    topology = Topology(comm.world, compute_device=comm.device.type, memory_bytes=memory)
    return serving_plan(embedding_tables(model), topology, embedding_lookups(model))
