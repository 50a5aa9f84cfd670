"""Plans that a program writes itself, in TorchRec's words: by sharding type, or shard by shard.

    plan = construct_module_sharding_plan(
        collection,
        {"t1": table_wise(rank=0), "t2": row_wise(), "t3": column_wise(ranks=[0, 1])},
        local_size=2,
        world_size=2,
    )
    model = DistributedModelParallel(model, plan=ShardingPlan({"collection": plan}))

Each function names a sharding type and where its shards go; `tile` (`recapp/sharding/tilings.py`)
cuts the table. A table may be written down shard by shard instead:

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

`ShardMetadata` and `EnumerableShardingSpec` are torch's own classes, which TorchRec shows at its
paths. The result is recapp's record of rectangles: strips may be of any size, and one rank may hold
several.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, pairwise
from typing import Any

import torch.distributed as dist

from recapp.errors import PlanError, suggest
from recapp.sharding import sharding_plan
from recapp.sharding.sharding_plan import Mode, Shard, TableSharding
from recapp.sharding.sharding_types import BUILT_IN, CandidateRanks
from recapp.sharding.tilings import tile
from recapp.tables.collections import TableCollection
from recapp.tables.config import EmbeddingConfig

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
        sharding_type: The name of a sharding type, for people; what runs is what the shards say.
        compute_kernel: "dense" for data_parallel, whose table becomes a parameter with a gradient;
            "fused" for every other type.
        ranks: The ranks of the shards; None takes those of their placements.
        sharding_spec: The shards: an object that has them as `shards`, each with `shard_offsets`,
            `shard_sizes` and `placement`.
        others: None: caches, rounding and output types of single tables have no effect here.

    Raises:
        PlanError: An unknown type, a kernel that does not go with it, no shards, a shard that names
            no rank, ranks that are not those of the shards, or another argument.
    """
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise PlanError(
            f"ParameterSharding: {', '.join(given)} would have no effect here: leave it out"
        )
    name = str(word(sharding_type))
    known = {record.name: record.replicated for record in BUILT_IN}
    if name not in known:
        raise PlanError(f"ParameterSharding: sharding_type={name}: {suggest(name, list(known))}")
    check_kernel("ParameterSharding", compute_kernel, replicated=known[name])
    shards = getattr(sharding_spec, "shards", None)
    if shards is None:
        wanted = "construct_module_sharding_plan with data_parallel()" if known[name] else ""
        raise PlanError(
            f"ParameterSharding: sharding_spec={sharding_spec}: a plan by hand says where each "
            f"shard lies, EnumerableShardingSpec([ShardMetadata(...)]){wanted and ', or use '}"
            f"{wanted}"
        )
    made = tuple(_shard(shard) for shard in shards)
    if ranks is not None and not set(ranks) <= {shard.rank for shard in made}:
        raise PlanError(
            f"ParameterSharding: ranks={list(ranks)}: the shards lie on ranks "
            f"{sorted({shard.rank for shard in made})}"
        )
    mode: Mode = "replicated" if known[name] else "unique"
    return TableSharding(made, mode, name, as_parameter=word(compute_kernel) == "dense")


def placement(compute_device: str, rank: int, local_size: int) -> str:
    """Return how `ShardMetadata` writes where a shard lies: `rank:5/cuda:1`.

    Args:
        compute_device: "cpu" or "cuda".
        rank: The rank that holds it.
        local_size: Ranks of a host, each with a GPU of its own.
    """
    check_device("placement: compute_device", compute_device)
    number = f":{rank % local_size}" if compute_device == "cuda" else ""
    return f"rank:{rank}/{compute_device}{number}"


def _shard(shard: Any) -> Shard:
    """Return the rectangle that a shard's metadata describe."""
    if isinstance(shard, Shard):
        return shard
    placement = str(shard.placement)
    found = re.match(r"rank:(\d+)(?:/([a-z]+))?", placement)
    if found is None:
        raise PlanError(
            f"ShardMetadata: placement={placement}: must name a rank, such as rank:1/cuda:1"
        )
    check_device("ShardMetadata: placement", found[2])
    spans = []
    for first, count in zip(shard.shard_offsets, shard.shard_sizes, strict=True):
        spans.append(range(first, first + count))
    if len(spans) != 2:
        raise PlanError(
            f"ShardMetadata: shard_sizes={list(shard.shard_sizes)}: must be rows and columns"
        )
    return Shard(int(found[1]), *spans)


def word(value: Any) -> Any:
    """Return the text that a member of an enumeration stands for; other values as they are."""
    return value.value if isinstance(value, Enum) else value


def check_kernel(where: str, kernel: Any, *, replicated: bool) -> None:
    """Check that a kernel is the one that a sharding type has.

    Args:
        where: The function that was given it, for the message.
        kernel: Its name or TorchRec's enumeration; None is right for every type.
        replicated: Whether the type keeps copies of a table.

    Raises:
        PlanError: It is another one.
    """
    own = "dense" if replicated else "fused"
    if word(kernel) not in (None, own):
        raise PlanError(
            f"{where}: compute_kernel={word(kernel)}: must be {own}; recapp has dense for "
            "data_parallel and fused for every other sharding type, and no memory but that of ranks"
        )


def check_device(where: str, *devices: str | None) -> None:
    """Check that shards lie where ranks have their tables: all on CPUs or all on GPUs.

    Args:
        where: The argument that names them, for the message.
        devices: Their types; None stands for that of the rank.

    Raises:
        PlanError: Another type, or both.
    """
    named = sorted({device.partition(":")[0] for device in devices if device})
    if len(named) > 1 or not set(named) <= set(DEVICES):
        raise PlanError(
            f"{where}={', '.join(named)}: must be {' or '.join(DEVICES)} alone: a rank keeps its "
            "rows in the memory of its own device"
        )


class EmbeddingModuleShardingPlan(dict[str, TableSharding]):
    """How each table of one collection is sharded, by its name.

    Args:
        tables: The tables; they can be added later.
        world_size: The ranks W; None takes those of the default group, or one.
    """

    def __init__(
        self, tables: Mapping[str, TableSharding] | None = None, world_size: int | None = None
    ) -> None:
        super().__init__(tables or {})
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


def data_parallel(compute_kernel: str | None = None) -> Cut:
    """Keep a copy of the table on every rank.

    Args:
        compute_kernel: "dense" makes the table a parameter with a gradient, as TorchRec always
            does; None updates the copies in backward, as other tables.
    """
    check_kernel("data_parallel", compute_kernel, replicated=True)

    def cut(table: EmbeddingConfig, machine: Machine) -> TableSharding:
        made = _tiled(table, "data_parallel", machine.hosts)
        return replace(made, as_parameter=compute_kernel is not None)

    return cut


def table_wise(rank: int, device: str | None = None, compute_kernel: str | None = None) -> Cut:
    """Put the whole table on one rank.

    Args:
        rank: The rank.
        device: The device of ranks; rows lie in the memory of their rank.
        compute_kernel: "fused".
    """
    check_device("table_wise: device", device)
    check_kernel("table_wise", compute_kernel, replicated=False)
    return lambda table, machine: _tiled(table, "table_wise", [[rank]])


def row_wise(
    sizes_placement: tuple[Sequence[int], str | Sequence[str]] | None = None,
    compute_kernel: str | None = None,
    num_buckets: None = None,
) -> Cut:
    """Cut the table by rows over all ranks, equally or into strips of given sizes.

    Args:
        sizes_placement: The rows of each strip, of rank 0 first, and the device of ranks, or of
            each of them. On CPUs strips lie on their ranks as well (TorchRec: all on rank 0).
        compute_kernel: "fused".
        num_buckets: None: strips need no equal buckets, as keys of dynamic tables have runs.

    Raises:
        PlanError: Sizes that are not the rows of the table, devices that differ, or buckets.
    """
    if num_buckets is not None:
        raise PlanError(
            f"row_wise: num_buckets={num_buckets} would have no effect here: leave it out"
        )
    check_kernel("row_wise", compute_kernel, replicated=False)
    if sizes_placement is None:
        return lambda table, machine: _tiled(table, "row_wise", machine.hosts)
    sizes, devices = sizes_placement
    each = [devices] * len(sizes) if isinstance(devices, str) else list(devices)
    check_device("row_wise: sizes_placement", *each)
    if len(each) != len(sizes):
        raise PlanError(
            f"row_wise: sizes_placement has {len(sizes)} sizes and {len(each)} devices: give one "
            "device for all, or one for each size"
        )

    def cut(table: EmbeddingConfig, machine: Machine) -> TableSharding:
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
        ranks: The rank of each strip.
        size_per_rank: The columns of each strip, of rank 0 first.
        compute_kernel: "fused".
        device_types: The device of each strip's rank, the same for all.

    Raises:
        PlanError: Neither or both are given, widths that are not those of the table, or devices
            that differ.
    """
    check_device("column_wise: device_types", *(device_types or ()))
    check_kernel("column_wise", compute_kernel, replicated=False)
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
    """Return the ranges of strips of given sizes, one behind the other.

    Raises:
        PlanError: Together they are not the whole, or one is negative.
    """
    if sum(sizes) != whole or min(sizes) < 0:
        raise PlanError(f"table {table.name}: strips of {list(sizes)} {what} are not its {whole}")
    return [range(*edge) for edge in pairwise(accumulate(sizes, initial=0))]


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
