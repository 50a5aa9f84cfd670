"""TorchRec's arguments of plans and messages, converted to recapp's: the planner, the topology, the
constraints, and quantised communication.

`Topology` and `ParameterConstraints` of this file are functions that return recapp's records.
TorchRec sets memory by caps and sharding by kernels; the records have other fields for the same.
A `QCommsConfig` becomes recapp's payload: the type in which ranks send vectors and their gradients
(`engine.payload` under Lightning).

TorchRec estimates the cost of a plan as bytes over bandwidths, which are arguments of its topology.
recapp's cost also has latencies and costs per id; `python -m recapp.plan calibrate` measures all of
them, so that a topology here takes no bandwidths.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from typing_extensions import override

from recapp.console import note, note_once
from recapp.errors import ConfigError
from recapp.planner import embedding_planner, planner_settings
from recapp.planner import problem as planning_problem
from recapp.planner.problem import Dense, PlanningProblem
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sharding.sharding_types import BUILT_IN, ShardingType

TORCHRECS_BATCH = 512


class EmbeddingComputeKernel(Enum):
    """The kernels of TorchRec that recapp accepts: `dense` for replicated tables, `fused` for all
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
    **others: Any,
) -> planning_problem.Topology:
    """Return recapp's topology for TorchRec's arguments.

    Args:
        world_size: The number of ranks W.
        compute_device: "cpu" or "cuda".
        hbm_cap: The bytes for tables on each GPU rank.
        ddr_cap: The bytes for tables on each CPU rank.
        local_world_size: The number of ranks on a host; None puts all ranks on one host.
        others: No other argument is allowed, such as a bandwidth.

    Raises:
        ConfigError: Another argument is given, or the ranks do not fill the hosts.
    """
    _refuse_others(
        "Topology", others, "what steps cost is measured: python -m recapp.plan calibrate"
    )
    cap = hbm_cap if compute_device == "cuda" else ddr_cap
    return planning_problem.Topology(
        world_size,
        compute_device=compute_device,
        memory_bytes=None if cap is None else [cap] * world_size,
        local_world_size=local_world_size,
    )


def ParameterConstraints(
    sharding_types: Sequence[str] | None = None,
    compute_kernels: Sequence[str] | None = None,
    min_partition: int | None = None,
    pooling_factors: Sequence[float] | None = None,
    **others: Any,
) -> planner_settings.ParameterConstraints:
    """Return the constraints of a table.

    Args:
        sharding_types: The names of allowed sharding types; None allows all.
        compute_kernels: `dense` allows replication, `fused` every other type; None allows all.
            `dense` alone makes the table a parameter with a gradient.
        min_partition: The smallest number of columns of a strip.
        pooling_factors: The mean number of ids in a bag, for each feature.
        others: Fields of recapp's constraints: `modes`, `ranks`, `hosts`, `together`, `apart`,
            `statistics`, `data_type`.

    Raises:
        ConfigError: A kernel is unknown, no allowed type runs with the kernels, or an argument is
            unknown.
    """
    known = ("modes", "ranks", "hosts", "together", "apart", "statistics", "data_type")
    unknown = {name: value for name, value in others.items() if name not in known}
    _refuse_others("ParameterConstraints", unknown, f"recapp adds {', '.join(known)}")
    if compute_kernels is not None:
        sharding_types = _types_of_kernels(compute_kernels, sharding_types)
        if set(compute_kernels) == {EmbeddingComputeKernel.DENSE.value}:
            others["as_parameter"] = True
    return planner_settings.ParameterConstraints(
        sharding_types=sharding_types,
        min_partition=min_partition,
        pooling_factors=pooling_factors,
        **others,
    )


def _types_of_kernels(kernels: Sequence[str], types: Sequence[str] | None) -> list[str]:
    allowed = [record.name for record in BUILT_IN] if types is None else list(types)
    known = [kernel.value for kernel in EmbeddingComputeKernel]
    for kernel in kernels:
        if kernel not in known:
            raise ConfigError(
                f"ParameterConstraints: compute_kernels has {kernel}: recapp has "
                f"{' and '.join(known)}; rows are in the memory of their rank"
            )
    replicated = ShardingType.DATA_PARALLEL.value
    names = [name for name in allowed if ("dense" if name == replicated else "fused") in kernels]
    if not names:
        raise ConfigError(
            f"ParameterConstraints: no sharding type of {allowed} runs with compute_kernels="
            f"{list(kernels)}: dense is for data_parallel, fused for the others"
        )
    return names


class FixedPercentageStorageReservation:
    """Reserves a share of each rank's memory, which tables do not get.

    Args:
        percentage: The share, 0 to 1.

    Raises:
        ConfigError: The share is out of range.
    """

    def __init__(self, percentage: float) -> None:
        if not 0 <= percentage <= 1:
            raise ConfigError(f"storage_reservation: percentage={percentage}: must be 0 to 1")
        self.percentage = percentage
        self.parameter_multiplier = 0.0
        self.dense_tensor_estimate: int | None = None

    def reserved(
        self, topology: planning_problem.Topology, dense: Dense
    ) -> planning_problem.Topology:
        """Return a topology with a memory cap, and with the bytes that tables must leave free.

        Args:
            topology: The ranks.
            dense: The dense part of the model.
        """
        share = int(self.percentage * min(topology.memory_bytes or [0]))
        of_dense = self.dense_tensor_estimate
        if of_dense is None:
            of_dense = int(self.parameter_multiplier * dense.bytes)
        return replace(topology, reserve_bytes=share + of_dense)


class FixedAbsoluteStorageReservation(FixedPercentageStorageReservation):
    """Reserves a number of bytes on each rank, which tables do not get.

    Args:
        hbm_reserved_bytes: The bytes on each rank, of GPUs or of CPUs.

    Raises:
        ConfigError: The number is negative.
    """

    def __init__(self, hbm_reserved_bytes: int) -> None:
        if hbm_reserved_bytes < 0:
            raise ConfigError(
                f"storage_reservation: hbm_reserved_bytes={hbm_reserved_bytes}: must be at least 0"
            )
        super().__init__(0.0)
        self.dense_tensor_estimate = hbm_reserved_bytes

    @classmethod
    def from_gb(cls, hbm_reserved_gb: float) -> "FixedAbsoluteStorageReservation":
        """Return a reservation in GiB, which TorchRec calls GB."""
        return cls(int(hbm_reserved_gb * 2**30))


class HeuristicalStorageReservation(FixedPercentageStorageReservation):
    """Reserves a share of each rank's memory and a multiple of the bytes of the dense parameters,
    for their gradients, the state of their optimiser and DDP's buffers.

    Args:
        percentage: The share, 0 to 1.
        parameter_multiplier: The multiple.
        dense_tensor_estimate: The bytes for the dense part, which replace the multiple.
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


class EmbeddingShardingPlanner(embedding_planner.EmbeddingShardingPlanner):
    """recapp's planner with TorchRec's arguments.

    Args:
        topology: The ranks; None takes the default of recapp's planner.
        batch_size: The number of samples on a rank; None takes TorchRec's default of 512.
        storage_reservation: The memory that tables leave free; it needs a topology with a cap.
        constraints: The constraints on tables, by table name or glob.
        debug: Whether to print the plan on standard error.
        others: The arguments `rule`, `statistics` and `dense` of recapp's planner. TorchRec's
            `enumerator`, `proposer`, `partitioner`, `performance_model` and `stats` must be None,
            because recapp's search has no exchangeable parts.

    Raises:
        ConfigError: An argument is given that recapp does not support.
    """

    def __init__(
        self,
        topology: planning_problem.Topology | None = None,
        batch_size: int | None = None,
        *,
        storage_reservation: FixedPercentageStorageReservation | None = None,
        constraints: Mapping[str, planner_settings.ParameterConstraints] | None = None,
        debug: bool = False,
        **others: Any,
    ) -> None:
        arguments = {name: value for name, value in others.items() if value is not None}
        known = ("rule", "statistics", "dense")
        parts = {name: value for name, value in arguments.items() if name not in known}
        why = "recapp has one search; say what a plan must respect in constraints"
        _refuse_others("EmbeddingShardingPlanner", parts, why)
        super().__init__(topology, batch_size or TORCHRECS_BATCH, constraints, **arguments)
        self.storage_reservation = storage_reservation
        self.debug = debug

    @override
    def plan_problem(self, problem: PlanningProblem) -> ShardingPlan:
        plan = super().plan_problem(problem)
        if self.debug:
            note(str(plan))
        return plan

    @override
    def topology_for(self, problem: PlanningProblem) -> planning_problem.Topology:
        topology = super().topology_for(problem)
        reservation = self.storage_reservation
        if reservation is None:
            return topology
        if topology.memory_bytes is None:
            note_once(
                "storage_reservation: nothing is reserved, because the topology has no memory "
                "limit: give one, Topology(..., hbm_cap=bytes), or ddr_cap on CPUs"
            )
            return topology
        return reservation.reserved(topology, problem.dense)


def _refuse_others(what: str, others: Mapping[str, Any], why: str) -> None:
    if others:
        raise ConfigError(f"{what}: {', '.join(others)} would have no effect here: {why}")


class CommType(Enum):
    """TorchRec's types of messages; recapp has the first three."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    MX4 = "mx4"


_DTYPES = {CommType.FP32: None, CommType.FP16: torch.float16, CommType.BF16: torch.bfloat16}


@dataclass(frozen=True)
class QCommsConfig:
    """The types of sent vectors (forward) and of their gradients (backward).

    Args:
        forward_precision: The type of vectors.
        backward_precision: The type of gradients. recapp has one type for both directions. If the
            two differ, it takes fp32 if that is one of them, else bf16, and prints a note.
        forward_loss_scale: Must be None, because gradients are not scaled.
        backward_loss_scale: Must be None.

    Raises:
        ConfigError: recapp does not have a type, or a loss scale is given.
    """

    forward_precision: CommType = CommType.FP32
    backward_precision: CommType = CommType.FP32
    forward_loss_scale: float | None = None
    backward_loss_scale: float | None = None

    def __post_init__(self) -> None:
        for name in ("forward_precision", "backward_precision"):
            if getattr(self, name) not in _DTYPES:
                raise ConfigError(
                    f"QCommsConfig: {name}={getattr(self, name)}: must be one of "
                    f"{', '.join(str(kind) for kind in _DTYPES)}"
                )
        if self.forward_loss_scale is not None or self.backward_loss_scale is not None:
            raise ConfigError(
                "QCommsConfig: recapp has no loss scale, and bf16 needs none: leave it out"
            )

    @property
    def payload(self) -> torch.dtype | None:
        """Return the dtype in which ranks send vectors; None for the compute type."""
        kinds = (self.forward_precision, self.backward_precision)
        if kinds[0] is kinds[1]:
            return _DTYPES[kinds[0]]
        widest = CommType.FP32 if CommType.FP32 in kinds else CommType.BF16
        note_once(
            f"QCommsConfig: {kinds[0].value} forward and {kinds[1].value} backward: recapp sends "
            f"both as {widest.value}"
        )
        return _DTYPES[widest]


@dataclass(frozen=True)
class QCommsRegistry:
    """The argument `qcomm_codecs_registry` of `EmbeddingBagCollectionSharder`.

    Args:
        payload: The dtype in which ranks send vectors.
    """

    payload: torch.dtype


def get_qcomm_codecs_registry(
    qcomms_config: QCommsConfig,
    comm_ops: Any = None,
    device: torch.device | str | None = None,
) -> QCommsRegistry | None:
    """Return the registry of a configuration; None if ranks send vectors in the compute type.

    Args:
        qcomms_config: The types.
        comm_ops: Must be None, because all messages of vectors have one type.
        device: Ignored, because every type works on every device. (TorchRec sends FP16 for BF16 on
            CPUs.)

    Raises:
        ConfigError: `comm_ops` is given.
    """
    if comm_ops is not None:
        raise ConfigError(
            "get_qcomm_codecs_registry: comm_ops has no effect, because all messages of vectors "
            "have one type: leave it out"
        )
    payload = qcomms_config.payload
    return None if payload is None else QCommsRegistry(payload)
