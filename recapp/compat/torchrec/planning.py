"""TorchRec's arguments of plans and messages, converted to recapp's: the planner, the topology, the
constraints, and quantised communication.

`Topology` and `ParameterConstraints` of this file are functions that return recapp's records.
TorchRec sets memory by caps and sharding by kernels; the records have other fields for the same.
A `QCommsConfig` becomes recapp's payload: the type in which ranks send vectors and their gradients
(`engine.payload` under Lightning).

TorchRec estimates the cost of a plan as bytes over bandwidths, which are arguments of its topology.
recapp's cost also has latencies and costs per id; `python -m recapp.plan calibrate` measures all of
them, so that a topology here takes no bandwidths.

Plans that a program writes by hand with TorchRec's functions, by sharding type or shard by
shard; TorchRec's description of the ranks, `ShardingEnv`; and its functions that shard modules by
such plans without DDP around them.

    plan = construct_module_sharding_plan(
        collection,
        {"t1": table_wise(rank=0), "t2": row_wise(), "t3": column_wise(ranks=[0, 1])},
        local_size=2,
        world_size=2,
    )
    model = DistributedModelParallel(model, plan=ShardingPlan({"collection": plan}))

Each function names a sharding type and the ranks of the shards; `tile`
(`recapp/sharding/sharding_plan.py`) cuts the table. A program may also list the shards of a table:

    strips = [
        ShardMetadata(shard_offsets=[0, 0], shard_sizes=[70, 16], placement="rank:0/cpu"),
        ShardMetadata(shard_offsets=[70, 0], shard_sizes=[30, 16], placement="rank:1/cpu"),
    ]
    ParameterSharding(
        sharding_type="row_wise",
        compute_kernel="fused",
        ranks=[0, 1],
        sharding_spec=EnumerableShardingSpec(strips),
    )

`ShardMetadata` and `EnumerableShardingSpec` are classes of torch, which TorchRec exports as well.
The result is recapp's record of rectangles: strips may have any size, and one rank may hold several
strips.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from recapp.console import note, note_once
from recapp.data_parallel import process_group_of
from recapp.engine.sharded_collection import ShardedCollection
from recapp.errors import ConfigError, PlanError, suggest
from recapp.parallel import (
    CollectionSharder,
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    get_default_sharders,
)
from recapp.planner import embedding_planner, planner_settings
from recapp.planner import problem as planning_problem
from recapp.planner.problem import Dense, PlanningProblem
from recapp.sharding import sharding_plan
from recapp.sharding.sharding_plan import Shard, TableSharding, tile
from recapp.sharding.sharding_types import BUILT_IN, CandidateRanks
from recapp.tables.collections import EmbeddingBagCollection, EmbeddingCollection, TableCollection
from recapp.tables.config import EmbeddingConfig

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
    kernel_of = {record.name: "dense" if record.replicated else "fused" for record in BUILT_IN}
    names = [name for name in allowed if kernel_of.get(name, "fused") in kernels]
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

    parameter_multiplier = 0.0
    dense_tensor_estimate: int | None = None

    def __init__(self, percentage: float) -> None:
        if not 0 <= percentage <= 1:
            raise ConfigError(f"storage_reservation: percentage={percentage}: must be 0 to 1")
        self.percentage = percentage

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
    def plan_problem(self, problem: PlanningProblem) -> sharding_plan.ShardingPlan:
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


DEVICES = ("cpu", "cuda")


def ParameterSharding(
    sharding_type: str,
    compute_kernel: str,
    ranks: Sequence[int] | None = None,
    sharding_spec: Any = None,
    **others: Any,
) -> TableSharding:
    """Return the rectangles of one table.

    Args:
        sharding_type: The name of a sharding type, for reports; the shards alone decide what runs.
        compute_kernel: "dense" for data_parallel, whose table becomes a parameter with a gradient;
            "fused" for every other type.
        ranks: The ranks of the shards; None takes those of their placements.
        sharding_spec: An object with the list `shards`, in which each shard has `shard_offsets`,
            `shard_sizes` and `placement`.
        others: Must be None: recapp has no caches, rounding or output types of single tables.

    Raises:
        PlanError: The type is unknown, the kernel does not fit the type, shards are missing, a
            shard names no rank, `ranks` differ from those of the shards, or another argument is
            given.
    """
    names = [name for name, value in others.items() if value is not None]
    if names:
        raise PlanError(
            f"ParameterSharding: {', '.join(names)} would have no effect here: leave it out"
        )
    name = str(word(sharding_type))
    known = {record.name: record.replicated for record in BUILT_IN}
    if name not in known:
        raise PlanError(f"ParameterSharding: sharding_type={name}: {suggest(name, list(known))}")
    check_kernel("ParameterSharding", compute_kernel, replicated=known[name])
    shards = getattr(sharding_spec, "shards", None)
    if shards is None:
        hint = "construct_module_sharding_plan with data_parallel()" if known[name] else ""
        raise PlanError(
            f"ParameterSharding: sharding_spec={sharding_spec}: a plan by hand must give the "
            "place of each shard, "
            f"EnumerableShardingSpec([ShardMetadata(...)]){hint and ', or use '}{hint}"
        )
    rectangles = tuple(_shard(shard) for shard in shards)
    if ranks is not None and not set(ranks) <= {shard.rank for shard in rectangles}:
        raise PlanError(
            f"ParameterSharding: ranks={list(ranks)}: must be the ranks of the shards, "
            f"{sorted({shard.rank for shard in rectangles})}"
        )
    return TableSharding(
        rectangles,
        "replicated" if known[name] else "unique",
        name,
        as_parameter=word(compute_kernel) == "dense",
    )


def placement(compute_device: str, rank: int, local_size: int) -> str:
    """Return the placement of a shard in the form of `ShardMetadata`: `rank:5/cuda:1`.

    Args:
        compute_device: "cpu" or "cuda".
        rank: The rank that holds the shard.
        local_size: The number of ranks on a host, each with its own GPU.
    """
    check_device("placement: compute_device", compute_device)
    number = f":{rank % local_size}" if compute_device == "cuda" else ""
    return f"rank:{rank}/{compute_device}{number}"


def _shard(shard: Any) -> Shard:
    if isinstance(shard, Shard):
        return shard
    placement = str(shard.placement)
    match = re.match(r"rank:(\d+)(?:/([a-z]+))?", placement)
    if match is None:
        raise PlanError(
            f"ShardMetadata: placement={placement}: must name a rank, such as rank:1/cuda:1"
        )
    check_device("ShardMetadata: placement", match[2])
    ends = zip(shard.shard_offsets, shard.shard_sizes, strict=True)
    spans = [range(first, first + count) for first, count in ends]
    if len(spans) != 2:
        raise PlanError(
            f"ShardMetadata: shard_sizes={list(shard.shard_sizes)}: must be rows and columns"
        )
    return Shard(int(match[1]), *spans)


def word(value: Any) -> Any:
    """Return the value of a member of an enumeration; return any other object unchanged."""
    return value.value if isinstance(value, Enum) else value


def check_kernel(where: str, kernel: Any, *, replicated: bool) -> None:
    """Check that a kernel fits a sharding type.

    Args:
        where: The function that got the kernel, for the message.
        kernel: The name of the kernel, or a member of TorchRec's enumeration; None fits every type.
        replicated: Whether the type keeps a copy of the table on every rank.

    Raises:
        PlanError: The kernel does not fit.
    """
    if word(kernel) not in (None, "dense" if replicated else "fused"):
        raise PlanError(
            f"{where}: compute_kernel={word(kernel)}: must be {'dense' if replicated else 'fused'};"
            " recapp has dense for data_parallel and fused for every other sharding type, and rows "
            "are in the memory of their rank"
        )


def check_device(where: str, *devices: str | None) -> None:
    """Check that the shards are all on CPUs or all on GPUs.

    Args:
        where: The argument with the devices, for the message.
        devices: The types of the shards' devices; None stands for the device of the rank.

    Raises:
        PlanError: A type is unknown, or shards are on CPUs and on GPUs.
    """
    device_types = sorted({device.partition(":")[0] for device in devices if device})
    if len(device_types) > 1 or not set(device_types) <= set(DEVICES):
        raise PlanError(
            f"{where}={', '.join(device_types)}: must be {' or '.join(DEVICES)} alone: a rank "
            "keeps its rows in the memory of its own device"
        )


class EmbeddingModuleShardingPlan(dict[str, TableSharding]):
    """The sharding of each table of one collection, by table name.

    Args:
        tables: The shardings by table name; a program may add them later.
        world_size: The number of ranks W; None takes that of the default group, or 1.
    """

    def __init__(
        self, tables: Mapping[str, TableSharding] | None = None, world_size: int | None = None
    ) -> None:
        super().__init__(tables or {})
        self.world_size = world_size


Hosts = list[list[int]]
"""The ranks of each host."""
Cut = Callable[[EmbeddingConfig, Hosts], TableSharding]
"""A function that shards one table over the ranks; TorchRec's ParameterShardingGenerator."""


def data_parallel(compute_kernel: str | None = None) -> Cut:
    """Keep a copy of the table on every rank.

    Args:
        compute_kernel: "dense" makes the table a parameter with a gradient, as TorchRec always
            does; None updates the copies in backward, like other tables.
    """
    check_kernel("data_parallel", compute_kernel, replicated=True)

    def cut(table: EmbeddingConfig, hosts: Hosts) -> TableSharding:
        sharding = _tiled(table, "data_parallel", hosts)
        return replace(sharding, as_parameter=compute_kernel is not None)

    return cut


def table_wise(rank: int, device: str | None = None, compute_kernel: str | None = None) -> Cut:
    """Put the whole table on one rank.

    Args:
        rank: The rank.
        device: The type of the ranks' devices, "cpu" or "cuda".
        compute_kernel: "fused", or None.
    """
    check_device("table_wise: device", device)
    check_kernel("table_wise", compute_kernel, replicated=False)
    return lambda table, hosts: _tiled(table, "table_wise", [[rank]])


def row_wise(
    sizes_placement: tuple[Sequence[int], str | Sequence[str]] | None = None,
    compute_kernel: str | None = None,
    num_buckets: None = None,
) -> Cut:
    """Cut the table by rows over all ranks, equally or into strips of given sizes.

    Args:
        sizes_placement: The number of rows of each strip, beginning with rank 0, and one device
            type for all ranks or one for each. On CPUs each strip lies on its own rank as well
            (TorchRec puts all of them on rank 0).
        compute_kernel: "fused", or None.
        num_buckets: Must be None: strips need no equal buckets, and dynamic tables have stretches.

    Raises:
        PlanError: The sizes do not sum to the rows of the table, the devices differ, or buckets are
            given.
    """
    if num_buckets is not None:
        raise PlanError(
            f"row_wise: num_buckets={num_buckets} would have no effect here: leave it out"
        )
    check_kernel("row_wise", compute_kernel, replicated=False)
    if sizes_placement is None:
        return lambda table, hosts: _tiled(table, "row_wise", hosts)
    sizes, devices = sizes_placement
    each = [devices] * len(sizes) if isinstance(devices, str) else list(devices)
    check_device("row_wise: sizes_placement", *each)
    if len(each) != len(sizes):
        raise PlanError(
            f"row_wise: sizes_placement has {len(sizes)} sizes and {len(each)} devices: give one "
            "device for all, or one for each size"
        )

    def cut(table: EmbeddingConfig, hosts: Hosts) -> TableSharding:
        columns = range(table.embedding_dim)
        strips = [
            Shard(rank, rows, columns)
            for rank, rows in enumerate(_strips(table, "rows", sizes, table.plan_rows))
        ]
        return TableSharding(tuple(strips), sharding_type="row_wise")

    return cut


def column_wise(
    ranks: Sequence[int] | None = None,
    size_per_rank: Sequence[int] | None = None,
    compute_kernel: str | None = None,
    device_types: Sequence[str] | None = None,
) -> Cut:
    """Cut the table by columns, into equal strips for some ranks or into strips of given widths.

    Args:
        ranks: The rank of each equal strip.
        size_per_rank: The number of columns of each strip, beginning with rank 0.
        compute_kernel: "fused", or None.
        device_types: The device type of each strip's rank, the same for all.

    Raises:
        PlanError: Neither or both of `ranks` and `size_per_rank` are given, the widths do not sum
            to the columns of the table, or the devices differ.
    """
    check_device("column_wise: device_types", *(device_types or ()))
    check_kernel("column_wise", compute_kernel, replicated=False)
    if (ranks is None) == (size_per_rank is None):
        raise PlanError("column_wise: give either ranks or size_per_rank")

    def cut(table: EmbeddingConfig, hosts: Hosts) -> TableSharding:
        if size_per_rank is None:
            holders = list(ranks or ())
            base, more = divmod(table.embedding_dim, len(holders))
            widths = [base + (number < more) for number in range(len(holders))]
        else:
            holders = list(range(len(size_per_rank)))
            widths = list(size_per_rank)
        if device_types is not None and len(device_types) != len(widths):
            raise PlanError(
                f"table {table.name}: column_wise has {len(widths)} strips and "
                f"{len(device_types)} device_types: give one for each, or leave them out"
            )
        rows = range(table.plan_rows)
        strips = [
            Shard(rank, rows, columns)
            for rank, columns in zip(
                holders, _strips(table, "columns", widths, table.embedding_dim), strict=True
            )
        ]
        return TableSharding(tuple(strips), sharding_type="column_wise")

    return cut


def _strips(table: EmbeddingConfig, what: str, sizes: Sequence[int], whole: int) -> list[range]:
    """Return the ranges of consecutive strips of given sizes.

    Raises:
        PlanError: The sizes do not sum to `whole`, or one is negative.
    """
    if sum(sizes) != whole or min(sizes) < 0:
        raise PlanError(f"table {table.name}: strips of {list(sizes)} {what} are not its {whole}")
    return [range(*edge) for edge in pairwise(accumulate(sizes, initial=0))]


def table_row_wise(host_index: int) -> Cut:
    """Cut the table by rows over the ranks of one host."""
    return lambda table, hosts: _tiled(table, "table_row_wise", [_host(hosts, host_index)])


def grid_shard(host_indexes: Sequence[int]) -> Cut:
    """Cut the table by columns over hosts, and each strip by rows over the ranks of its host."""

    def cut(table: EmbeddingConfig, hosts: Hosts) -> TableSharding:
        holders = [_host(hosts, index) for index in host_indexes]
        return _tiled(table, "grid_shard", holders, -(-table.embedding_dim // len(holders)))

    return cut


def _host(hosts: Hosts, index: int) -> list[int]:
    if not 0 <= index < len(hosts):
        raise PlanError(
            f"host {index} does not exist: {sum(map(len, hosts))} ranks, {len(hosts[0])} on each "
            f"host, are on hosts 0..{len(hosts) - 1}"
        )
    return hosts[index]


def _tiled(
    table: EmbeddingConfig, name: str, hosts: Hosts, column_width: int | None = None
) -> TableSharding:
    ranks = CandidateRanks([rank for host in hosts for rank in host], hosts)
    return tile(table, name, ranks, column_width=column_width or table.embedding_dim)


def apply_to_all(module: TableCollection, cut: Cut) -> dict[str, Cut]:
    """Return the same cut for every table of a collection, by table name.

    Args:
        module: The collection.
        cut: The cut for each table.
    """
    return {table.name: cut for table in module.tables()}


def construct_module_sharding_plan(
    module: TableCollection,
    per_param_sharding: Mapping[str, TableSharding | Cut],
    sharder: Any = None,
    local_size: int | None = None,
    world_size: int | None = None,
    device_type: str | None = None,
) -> EmbeddingModuleShardingPlan:
    """Return the plan of one collection.

    Args:
        module: The collection.
        per_param_sharding: The sharding or the cut of each table, by table name.
        sharder: Ignored, because every sharder makes the same shards.
        local_size: The number of ranks on a host; None puts all ranks on one host.
        world_size: The number of ranks W; None takes that of the default group, or 1.
        device_type: Ignored, because a plan is the same on every device.

    Raises:
        PlanError: A table is missing or unknown, or its shards do not tile it.
    """
    world = _world_size() if world_size is None else world_size
    step = local_size or world
    hosts = [list(range(first, first + step)) for first in range(0, world, step)]
    tables = {table.name: table for table in module.tables()}
    for name in per_param_sharding:
        if name not in tables:
            raise PlanError(
                f"per_param_sharding names table {name}; the collection has {', '.join(tables)}"
            )
    for name in tables:
        if name not in per_param_sharding:
            raise PlanError(f"per_param_sharding has no entry for table {name}")
    shardings = {}
    for name, table in tables.items():
        cut = per_param_sharding[name]
        shardings[name] = cut if isinstance(cut, TableSharding) else cut(table, hosts)
    sharding_plan.ShardingPlan(shardings, world).check(list(tables.values()))
    return EmbeddingModuleShardingPlan(shardings, world)


def ShardingPlan(plan: Mapping[str, Mapping[str, TableSharding]]) -> sharding_plan.ShardingPlan:
    """Return recapp's plan for the argument of TorchRec's constructor.

    Args:
        plan: The sharding of each table, by the path of the collection and the name of the table.

    Raises:
        PlanError: The plans of two collections have different numbers of ranks, or two tables have
            one name.
    """
    sizes = {getattr(part, "world_size", None) or _world_size() for part in plan.values()}
    if len(sizes) > 1:
        raise PlanError(
            f"the collections of a plan are for {sorted(sizes)} ranks: make them all "
            "for the same number of ranks"
        )
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


def get_module_to_default_sharders() -> dict[type[nn.Module], CollectionSharder]:
    """Return the default sharders, by the class that they shard."""
    return {sharder.module_type: sharder for sharder in get_default_sharders()}


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
    cuts = plan if isinstance(plan, Mapping) else apply_to_all(module, plan)
    module_plan = construct_module_sharding_plan(module, cuts, sharder, local, world)
    return (sharder or EmbeddingBagCollectionSharder()).shard(module, module_plan, env, device)


def shard_modules(
    module: nn.Module,
    env: Any = None,
    device: torch.device | None = None,
    plan: sharding_plan.ShardingPlan | None = None,
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
