"""How one table is sharded, written down shard by shard in TorchRec's words.

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
paths. What comes out is recapp's record of rectangles: strips may be of any size, and their rank
may hold several.
"""

import re
from collections.abc import Sequence
from enum import Enum
from typing import Any

from recapp.errors import PlanError, suggest
from recapp.sharding.sharding_plan import Mode, Shard, TableSharding
from recapp.sharding.sharding_types import BUILT_IN

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
