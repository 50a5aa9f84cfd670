"""The plan of a run, from the facts that its ranks find at start: hosts, devices, memory, ids.

    Comm, device                    -> a record for each rank -> Topology
    module, Topology, rule, data    -> PlanningProblem
    PlanningProblem, PlanSource     -> ShardingPlan

A plan has one of these sources:

    None                        the planner, without constraints
    EmbeddingShardingPlanner    that planner; the run fills in the arguments that it leaves open
    ShardingPlan, path          that plan, checked against the tables and ranks of the run
    function(PlanningProblem)   the plan that the function returns
"""

import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn

from recapp.errors import ConfigError, PlanError
from recapp.optim.named_rules import Rules
from recapp.optim.table_rule import table_rule, with_frozen_of
from recapp.planner.choose_modes import SAMPLE_BATCHES, decide_modes
from recapp.planner.embedding_planner import EmbeddingShardingPlanner, plan_tables
from recapp.planner.hardware import Hardware
from recapp.planner.problem import PlanningProblem, dense_of
from recapp.planner.rank_memory import check_memory
from recapp.planner.topology import Topology, hosts_in_blocks
from recapp.processes.process_memory import free_memory_bytes, host_id, memory_pools
from recapp.sharding.plan_file import load_plan
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.tables.collections import embedding_lookups, embedding_tables
from recapp.tables.statistics import TableStatistics
from recapp.trainer.data_protocols import ProvidesStatistics, datamodule_of
from recapp.transport.communicator import Comm


def found_topology(
    comm: Comm,
    device: torch.device,
    memory_bytes: int | None,
    hosts: int | None,
    reserve_bytes: int,
    hardware: Hardware | None,
) -> tuple[list[dict[str, Any]], Topology]:
    """Return `host`, `host_id`, `device`, `backend` and `free_bytes` of every rank, and their
    topology. It is collective.

    Args:
        comm: The ranks.
        device: The device of this rank.
        memory_bytes: The memory that this rank may use, in bytes; None takes the free memory.
        hosts: The number of hosts that the plan assumes; None takes the real number.
        reserve_bytes: The bytes of a rank's memory that tables may not use.
        hardware: The rates by which the planner estimates times.
    """
    here = {
        "host": socket.gethostname(),
        "host_id": host_id(),
        "device": str(device),
        "backend": dist.get_backend(comm.group),
    }
    pools_W = comm.all_gather(memory_pools(device))
    free = memory_bytes if memory_bytes is not None else free_memory_bytes(pools_W)[comm.rank]
    ranks = comm.all_gather(here | {"free_bytes": free})
    free_W = [rank["free_bytes"] for rank in ranks]
    return ranks, Topology(
        len(ranks),
        hosts or hosts_in_blocks([rank["host_id"] for rank in ranks]),
        device.type,
        None if None in free_W else free_W,
        reserve_bytes,
        hardware,
    )


def found_problem(
    module: LightningModule, topology: Topology, rule: Rules, average_every: float | None = None
) -> PlanningProblem:
    """Return the planning problem as rank 0 knows it at start.

    Id statistics are measured only if several ranks train. Batch sizes, payload and look-ahead have
    their defaults.

    Args:
        module: The module whose tables are sharded.
        topology: The ranks and their memory.
        rule: The row rule of all tables, or row rules by table name or glob.
        average_every: The steps between two updates of an average of all rows, infinity if epochs
            lie between them; None without an average.
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
        rule=with_frozen_of(rule, module),
        statistics=statistics,
        dense=dense_of(module),
        lookups=lookups,
        average_every=average_every,
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


PlanSource = (
    EmbeddingShardingPlanner | ShardingPlan | str | Path | Callable[[PlanningProblem], ShardingPlan]
)


def check_source(source: Any) -> None:
    """Check that a plan can come from a value of this kind.

    Raises:
        ConfigError: The value is none of the kinds that this file takes.
    """
    if source is None or callable(source) or isinstance(source, _NAMED):
        return
    raise ConfigError(
        f"planner={source!r}: must be an EmbeddingShardingPlanner, a ShardingPlan, the path of a "
        "plan file, a function that returns a plan for a PlanningProblem, or None"
    )


_NAMED = (EmbeddingShardingPlanner, ShardingPlan, str, Path)


def named_rule(module: LightningModule, source: PlanSource | None) -> Rules | None:
    """Return the row rule of an optimiser that is applied in backward, else the rule of the
    planner; None if there is neither.
    """
    of_planner = source.rule if isinstance(source, EmbeddingShardingPlanner) else None
    return table_rule(module) or of_planner


def plan_from(source: PlanSource | None, problem: PlanningProblem) -> ShardingPlan:
    """Return the plan of a run.

    Args:
        source: The source of the plan.
        problem: The planning problem, with the hardware and data that the ranks have found.

    Raises:
        PlanError: No plan fits, or the plan is for other tables or ranks.
        ConfigError: A function returned no `ShardingPlan`.
    """
    if source is None:
        return plan_tables(problem).plan
    if isinstance(source, EmbeddingShardingPlanner):
        plan = source.plan_problem(problem)
        _check_ranks(plan, problem, "planner=EmbeddingShardingPlanner(topology=...)")
        return plan
    if isinstance(source, str | Path):
        plan = load_plan(source, problem.tables, problem.topology.world_size, problem.lookups)
    elif isinstance(source, ShardingPlan):
        plan = source
        _check_ranks(plan, problem, "planner=ShardingPlan(...)")
        plan.check(problem.tables)
    else:
        plan = source(problem)
        if not isinstance(plan, ShardingPlan):
            raise ConfigError(
                f"planner: the function returned a {type(plan).__name__}: it must return a "
                "ShardingPlan, as EmbeddingShardingPlanner().plan_problem(problem) does"
            )
        return plan
    check_memory(problem.tables, plan, problem.rule, problem.topology, problem.averaged)
    return plan


def _check_ranks(plan: ShardingPlan, problem: PlanningProblem, where: str) -> None:
    ranks = problem.topology.world_size
    if plan.world_size != ranks:
        raise PlanError(
            f"{where}: its plan is for {plan.world_size} ranks, and the run has {ranks}: start "
            f"{plan.world_size} ranks, or plan for {ranks}"
        )
