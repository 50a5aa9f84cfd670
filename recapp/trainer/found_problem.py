"""The facts that the ranks of a run find at start: hosts, devices, memory, ids of the data.

Comm, device                     -> a record for each rank -> Topology
module, Topology, rule, data     -> PlanningProblem
"""

import socket
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn

from recapp.optim.named_rules import Rules
from recapp.planner.choose_modes import SAMPLE_BATCHES, decide_modes
from recapp.planner.problem import PlanningProblem, dense_of
from recapp.planner.topology import Topology
from recapp.processes.process_memory import free_memory_bytes, host_id, memory_pools
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.tables.collections import embedding_lookups, embedding_tables
from recapp.tables.statistics import TableStatistics
from recapp.trainer.data_protocols import ProvidesStatistics, datamodule_of
from recapp.transport.communicator import Comm


def found_ranks(comm: Comm, device: torch.device, memory_bytes: int | None) -> list[dict[str, Any]]:
    """Return `host`, `host_id`, `device`, `backend` and `free_bytes` of every rank. It is
    collective.

    Args:
        comm: The ranks.
        device: The device of this rank.
        memory_bytes: The memory that this rank may use, in bytes; None takes the free memory.
    """
    here = {
        "host": socket.gethostname(),
        "host_id": host_id(),
        "device": str(device),
        "backend": dist.get_backend(comm.group),
    }
    pools_W = comm.all_gather(memory_pools(device))
    free = memory_bytes if memory_bytes is not None else free_memory_bytes(pools_W)[comm.rank]
    return comm.all_gather(here | {"free_bytes": free})


def found_problem(module: LightningModule, topology: Topology, rule: Rules) -> PlanningProblem:
    """Return the planning problem as rank 0 knows it at start.

    Id statistics are measured only if several ranks train. Batch sizes, payload and look-ahead have
    their defaults.

    Args:
        module: The module whose tables are sharded.
        topology: The ranks and their memory.
        rule: The row rule of all tables, or row rules by table name or glob.
    """
    tables = embedding_tables(module)
    data = _data_to_look_at(module, topology.world_size) if tables else None
    lookups = embedding_lookups(module)
    statistics: Mapping[str, TableStatistics] = (
        {} if data is None else data.statistics(tables, lookups)
    )
    return PlanningProblem(
        tables,
        topology,
        rule=rule,
        statistics=statistics,
        dense=dense_of(module),
        lookups=lookups,
    )


def with_counted_modes(module: LightningModule, plan: ShardingPlan) -> ShardingPlan:
    """Return the plan with its open modes decided: count the bytes that each mode exchanges in the
    first training batches.

    Return the plan unchanged if there are no batches to count.
    """
    data = _data_to_look_at(module, plan.world_size)
    batches = [] if data is None else [batch.sparse for batch in data.sample(SAMPLE_BATCHES)]
    if not batches:
        return plan
    return decide_modes(embedding_tables(module), plan, batches, embedding_lookups(module))


def _data_to_look_at(module: LightningModule, world: int) -> ProvidesStatistics | None:
    data = datamodule_of(module.trainer)
    fitting = module.trainer.state.fn == TrainerFn.FITTING
    return data if world > 1 and fitting and isinstance(data, ProvidesStatistics) else None
