"""TorchRec's arguments of the planner, its topology and its constraints, as recapp's.

`Topology` and `ParameterConstraints` here are functions that return recapp's records: TorchRec
counts memory in caps and names kernels, recapp's records say the same in other words.

TorchRec's price of a plan is bytes over bandwidths. Here a price has latencies and costs of single
ids as well, which stay those of the device's default hardware; `python -m recapp.plan calibrate`
measures all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

import torch.distributed as dist
from torch import nn

from recapp.compat.module_helpers import gb_to_bytes
from recapp.console import note, note_once
from recapp.errors import ConfigError
from recapp.planner import constraints as recapp_constraints
from recapp.planner import embedding_planner
from recapp.planner import topology as recapp_topology
from recapp.planner.hardware import Hardware, Link, default_hardware
from recapp.planner.problem import Dense, PlanningProblem, dense_of
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sharding.sharding_types import BUILT_IN, ShardingType

BYTES_PER_MS = 1e-6  # of 10^9 bytes a second
RANKS = [2**k for k in range(1, 11)]  # for which a ring is priced; between them it is interpolated
BETWEEN = {"intra_host_bw": "host", "inter_host_bw": "network"}


def hardware_of_bandwidths(
    compute_device: str, bandwidths: Mapping[str, float | None]
) -> Hardware | None:
    """Return the default hardware of a device with other bandwidths; None where none is given.

    Args:
        compute_device: "cpu" or "cuda".
        bandwidths: Bytes a millisecond. `intra_host_bw` and `inter_host_bw`: between two ranks of
            one host and of two. `hbm_mem_bw` and `ddr_mem_bw`: of a GPU's and of a CPU rank's
            memory; the one of the other device is not used.

    Raises:
        ConfigError: A bandwidth that is no number above 0.
    """
    given = {name: value for name, value in bandwidths.items() if value is not None}
    for name, value in given.items():
        if not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"Topology: {name}={value}: must be bytes a millisecond, above 0")
    if not given:
        return None
    made = default_hardware(compute_device)
    memory = given.get("hbm_mem_bw" if compute_device == "cuda" else "ddr_mem_bw")
    if memory is not None:
        gb_per_s = memory * BYTES_PER_MS
        kernels = {
            name: work if work.gb_per_s == float("inf") else replace(work, gb_per_s=gb_per_s)
            for name, work in made.kernels.items()
        }
        made = replace(made, kernels=kernels)
    for name, kind in BETWEEN.items():
        if name in given:
            gb_per_s = given[name] * BYTES_PER_MS
            made = replace(
                made,
                all_to_all={**made.all_to_all, kind: _all_to_all(made.all_to_all[kind], gb_per_s)},
                all_reduce={**made.all_reduce, kind: _ring(made.all_reduce[kind], gb_per_s)},
            )
    said = ", ".join(f"{name}={value:g}" for name, value in given.items())
    return replace(made, source=f"{made.source} Bandwidths as Topology was given them: {said}.")


def _all_to_all(link: Link, gb_per_s: float) -> Link:
    """Return a link on which the busiest rank sends at a given rate."""
    return replace(link, gb_per_s=dict.fromkeys(link.gb_per_s, gb_per_s))


def _ring(link: Link, gb_per_s: float) -> Link:
    """Return a link whose all-reduce is a ring: of n ranks each sends 2 (n - 1) / n of the bytes
    that are reduced.
    """
    return replace(link, gb_per_s={n: gb_per_s * n / (2 * (n - 1)) for n in RANKS})


TORCHRECS_BATCH = 512


class EmbeddingComputeKernel(Enum):
    """Kernels of TorchRec that mean something here: `dense` for replicated tables, `fused` for all
    others.
    """

    DENSE = "dense"
    FUSED = "fused"


def Topology(
    world_size: int,
    compute_device: str,
    hbm_cap: int | None = None,
    ddr_cap: int | None = None,
    local_world_size: int | None = None,
    *,
    hbm_mem_bw: float | None = None,
    ddr_mem_bw: float | None = None,
    intra_host_bw: float | None = None,
    inter_host_bw: float | None = None,
    **others: Any,
) -> recapp_topology.Topology:
    """Return the topology of some ranks.

    Args:
        world_size: Ranks W.
        compute_device: "cpu" or "cuda".
        hbm_cap: Bytes of each rank for tables on GPUs.
        ddr_cap: Bytes of each rank for tables on CPUs.
        local_world_size: Ranks of a host; None puts all of them on one.
        hbm_mem_bw: Bytes a millisecond of a GPU's memory; None of all four takes those of the
            device's default hardware (`recapp/compat/planning.py`).
        ddr_mem_bw: The same of a CPU rank's memory.
        intra_host_bw: Bytes a millisecond between ranks of one host.
        inter_host_bw: The same between ranks of two hosts.
        others: None. What else steps cost is measured: `python -m recapp.plan calibrate`.

    Raises:
        ConfigError: Another argument, ranks that do not fill hosts, or no bandwidth.
    """
    _refuse_others(
        "Topology", others, "what steps cost is measured: python -m recapp.plan calibrate"
    )
    cap = hbm_cap if compute_device == "cuda" else ddr_cap
    return recapp_topology.Topology(
        world_size,
        compute_device=compute_device,
        memory_bytes=None if cap is None else [cap] * world_size,
        hardware=hardware_of_bandwidths(
            compute_device,
            {
                "hbm_mem_bw": hbm_mem_bw,
                "ddr_mem_bw": ddr_mem_bw,
                "intra_host_bw": intra_host_bw,
                "inter_host_bw": inter_host_bw,
            },
        ),
        local_world_size=local_world_size,
    )


def ParameterConstraints(
    sharding_types: Sequence[str] | None = None,
    compute_kernels: Sequence[str] | None = None,
    min_partition: int | None = None,
    pooling_factors: Sequence[float] | None = None,
    **others: Any,
) -> recapp_constraints.ParameterConstraints:
    """Return the constraints of a table.

    Args:
        sharding_types: Names of sharding types; None allows all.
        compute_kernels: `dense` allows replication, `fused` every other type; None allows all.
            `dense` alone makes the table a parameter with a gradient.
        min_partition: Least columns of a vertical strip.
        pooling_factors: Mean ids of a bag, of each feature.
        others: Fields of recapp's constraints (`modes`, `ranks`, `hosts`, `together`, `apart`).

    Raises:
        ConfigError: A kernel that is not there, types that no named kernel has, or an argument
            that has no effect here.
    """
    known = ("modes", "ranks", "hosts", "together", "apart", "statistics", "data_type")
    unknown = {name: value for name, value in others.items() if name not in known}
    _refuse_others("ParameterConstraints", unknown, f"recapp adds {', '.join(known)}")
    if compute_kernels is not None:
        sharding_types = _types_of_kernels(compute_kernels, sharding_types)
        if set(compute_kernels) == {EmbeddingComputeKernel.DENSE.value}:
            others["as_parameter"] = True
    return recapp_constraints.ParameterConstraints(
        sharding_types=sharding_types,
        min_partition=min_partition,
        pooling_factors=pooling_factors,
        **others,
    )


def _types_of_kernels(kernels: Sequence[str], types: Sequence[str] | None) -> list[str]:
    """Return the sharding types, of those that are allowed, that some kernels run."""
    allowed = [record.name for record in BUILT_IN] if types is None else list(types)
    runs: dict[str, list[str]] = {kernel.value: [] for kernel in EmbeddingComputeKernel}
    for name in allowed:
        replicated = name == ShardingType.DATA_PARALLEL.value
        kernel = EmbeddingComputeKernel.DENSE if replicated else EmbeddingComputeKernel.FUSED
        runs[kernel.value].append(name)
    for kernel_name in kernels:
        if kernel_name not in runs:
            raise ConfigError(
                f"ParameterConstraints: compute_kernels has {kernel_name}: recapp has "
                f"{' and '.join(runs)}; rows lie in the memory of their rank"
            )
    found = [name for name in allowed if any(name in runs[kernel] for kernel in kernels)]
    if not found:
        raise ConfigError(
            f"ParameterConstraints: no sharding type of {allowed} runs with compute_kernels="
            f"{list(kernels)}: dense is for data_parallel, fused for the others"
        )
    return found


class FixedPercentageStorageReservation:
    """Memory that is not given to tables, as a share of all.

    Args:
        percentage: The share, 0 to 1.

    Raises:
        ConfigError: Another number.
    """

    def __init__(self, percentage: float) -> None:
        if not 0 <= percentage <= 1:
            raise ConfigError(f"storage_reservation: percentage={percentage}: must be 0 to 1")
        self.percentage = percentage

    def dense_bytes(self, dense: Dense) -> int:
        """Return the bytes that the dense part of a model needs beside the share."""
        return 0

    def reserve(
        self,
        topology: recapp_topology.Topology,
        batch_size: int,
        module: nn.Module,
        sharders: Sequence[Any],
        constraints: Mapping[str, recapp_constraints.ParameterConstraints] | None = None,
    ) -> recapp_topology.Topology:
        """Return the ranks with the bytes that tables must leave free for a model.

        Args:
            topology: The ranks; it must have a cap.
            batch_size: Not needed: the share stands for batches and messages as well.
            module: The model, whose dense part is counted.
            sharders: Not needed.
            constraints: Not needed.

        Raises:
            ConfigError: The topology has no cap.
        """
        if topology.memory_bytes is None:
            raise ConfigError(
                "storage_reservation: the topology has no cap to reserve from: "
                "Topology(..., hbm_cap=bytes), or ddr_cap on CPUs"
            )
        return self.reserved(topology, dense_of(module))

    def reserved(
        self, topology: recapp_topology.Topology, dense: Dense
    ) -> recapp_topology.Topology:
        """Return ranks of known memory with the bytes that tables must leave free.

        Args:
            topology: The ranks.
            dense: The part of the model that is not sharded.
        """
        share = int(self.percentage * min(topology.memory_bytes or [0]))
        return replace(topology, reserve_bytes=share + self.dense_bytes(dense))


class FixedAbsoluteStorageReservation(FixedPercentageStorageReservation):
    """Memory that is not given to tables, in bytes of each rank.

    Args:
        hbm_reserved_bytes: The bytes; of a CPU rank where the topology is of CPUs.

    Raises:
        ConfigError: A negative number.
    """

    def __init__(self, hbm_reserved_bytes: int) -> None:
        if hbm_reserved_bytes < 0:
            raise ConfigError(
                f"storage_reservation: hbm_reserved_bytes={hbm_reserved_bytes}: must be at least 0"
            )
        super().__init__(0.0)
        self.reserved_bytes = hbm_reserved_bytes

    @classmethod
    def from_gb(cls, hbm_reserved_gb: float) -> "FixedAbsoluteStorageReservation":
        """Return a reservation in GiB, which TorchRec calls GB."""
        return cls(gb_to_bytes(hbm_reserved_gb))

    def dense_bytes(self, dense: Dense) -> int:
        """Return the bytes that are left free, whatever the dense part of a model needs."""
        return self.reserved_bytes


class HeuristicalStorageReservation(FixedPercentageStorageReservation):
    """A share of the memory, and several times the dense parameters: their gradients, the state
    of their optimiser and DDP's buffers.

    Args:
        percentage: The share, 0 to 1.
        parameter_multiplier: How many times the bytes of the dense parameters.
        dense_tensor_estimate: The bytes that the dense part needs, instead of a multiple.
    """

    def __init__(
        self,
        percentage: float,
        parameter_multiplier: float = 6.0,
        dense_tensor_estimate: int | None = None,
    ) -> None:
        super().__init__(percentage)
        self.parameter_multiplier = parameter_multiplier
        self.dense_tensor_estimate = dense_tensor_estimate

    def dense_bytes(self, dense: Dense) -> int:
        """Return the bytes that the dense part of a model needs beside the share."""
        if self.dense_tensor_estimate is not None:
            return self.dense_tensor_estimate
        return int(self.parameter_multiplier * dense.bytes)


class EmbeddingShardingPlanner(embedding_planner.EmbeddingShardingPlanner):
    """recapp's planner with TorchRec's arguments.

    Args:
        topology: The ranks; None as of recapp's planner.
        batch_size: Samples of a rank; None takes TorchRec's default of 512.
        enumerator: None: recapp has one search, without parts to exchange.
        storage_reservation: The memory that tables leave free; it needs a topology with a cap.
        proposer: None.
        partitioner: None.
        performance_model: None.
        stats: None.
        constraints: What a plan must respect, by table name or glob.
        debug: Whether the plan is printed on standard error once it is made.
        others: `rule`, `statistics` and `dense` of recapp's planner.

    Raises:
        ConfigError: An argument that has no effect here.
    """

    def __init__(
        self,
        topology: recapp_topology.Topology | None = None,
        batch_size: int | None = None,
        enumerator: None = None,
        storage_reservation: FixedPercentageStorageReservation | None = None,
        proposer: None = None,
        partitioner: None = None,
        performance_model: None = None,
        stats: None = None,
        constraints: Mapping[str, recapp_constraints.ParameterConstraints] | None = None,
        debug: bool = False,
        **others: Any,
    ) -> None:
        parts = {
            "enumerator": enumerator,
            "proposer": proposer,
            "partitioner": partitioner,
            "performance_model": performance_model,
            "stats": stats,
        }
        given = {name: value for name, value in parts.items() if value is not None}
        given |= {n: v for n, v in others.items() if n not in ("rule", "statistics", "dense")}
        why = "recapp has one search; say what a plan must respect in constraints"
        _refuse_others("EmbeddingShardingPlanner", given, why)
        super().__init__(topology, batch_size or TORCHRECS_BATCH, constraints, **others)
        self.storage_reservation = storage_reservation
        self.debug = debug

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Sequence[Any] | None = None,
        pg: "dist.ProcessGroup | None" = None,
    ) -> ShardingPlan:
        """Plan on rank 0 and return that plan on every rank; every rank calls it.

        Args:
            module: The model, or a collection.
            sharders: The sharders, as `DistributedModelParallel` takes them.
            pg: The ranks; None takes the default group, or this process alone.
        """
        return super().collective_plan(module, sharders, pg)

    def plan_problem(self, found: PlanningProblem) -> ShardingPlan:
        """Return the best plan for what a run has found; arguments as of recapp's planner."""
        made = super().plan_problem(found)
        if self.debug:
            note(str(made))
        return made

    def topology_for(self, problem: PlanningProblem) -> recapp_topology.Topology:
        """Return the ranks that a problem is planned for, with the bytes that stay free."""
        topology = super().topology_for(problem)
        reservation = self.storage_reservation
        if reservation is None:
            return topology
        if topology.memory_bytes is None:
            note_once(
                "storage_reservation: nothing is reserved, because the topology has no cap: "
                "Topology(..., hbm_cap=bytes), or ddr_cap on CPUs"
            )
            return topology
        return reservation.reserved(topology, problem.dense)


def _refuse_others(what: str, given: Mapping[str, Any], why: str) -> None:
    """Raise for arguments that would have no effect."""
    if given:
        raise ConfigError(f"{what}: {', '.join(given)} would have no effect here: {why}")
