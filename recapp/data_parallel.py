"""What `DistributedModelParallel` shares with Lightning's strategy (`recapp/trainer/strategy.py`):
the process groups of ranks, and the dense part of a model with sharded tables, which `wrap_dense`
wraps in DDP and `compile_dense` compiles.
"""

import warnings
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recapp.engine.sharded_collection import ShardedCollection, sharded_collections
from recapp.engine.table_weights import TableParameter
from recapp.errors import ConfigError
from recapp.processes.faults import fault_of_compiler
from recapp.transport.communicator import Comm
from recapp.transport.step_messages import AverageOverRanks

_OF_TRAINERS: WeakKeyDictionary[dist.ProcessGroup, dict[timedelta, dist.ProcessGroup | None]] = (
    WeakKeyDictionary()
)


def process_group_of(env: Any) -> dist.ProcessGroup | None:
    """Return the process group of an environment; None where this process is alone.

    Args:
        env: A process group, an object that has one as `process_group`, or None for the default
            group. An object whose `world_size` is 1 needs no group.

    Raises:
        ConfigError: The environment has no process group.
    """
    if env is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    group = env if isinstance(env, dist.ProcessGroup) else getattr(env, "process_group", None)
    if group is None and getattr(env, "world_size", None) == 1:
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"env is a {type(env).__name__} without a process group: pass a "
            "torch.distributed.ProcessGroup, an object that has one as process_group, or nothing "
            "for the default group"
        )
    return group


def tables_group(
    ranks: dist.ProcessGroup | None, timeout: timedelta | None = None
) -> dist.ProcessGroup | None:
    """Return the process group of the tables' messages, which have an order of their own.

    For the default group of several ranks, make another group. Any other group is used itself,
    because only all ranks of the default group together can make a new group. A single rank sends
    no messages, and a group of its own would hold sockets until the process ends.

    Args:
        ranks: The process group of the ranks; None where this process is alone.
        timeout: The longest wait of the made group; None takes torch's.
    """
    if ranks is None or ranks is not dist.group.WORLD or ranks.size() == 1:
        return ranks
    group = dist.new_group(timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


def group_of_trainers(timeout: timedelta) -> dist.ProcessGroup | None:
    """Return the process group of the messages of all trainers in this process.

    Trainers run one after the other, so they share one group: torch keeps the sockets of a group
    until the default group is destroyed.

    Args:
        timeout: The longest wait; each has a group of its own.
    """
    ranks = dist.group.WORLD
    if ranks is None or ranks.size() == 1:
        return tables_group(ranks)
    groups = _OF_TRAINERS.setdefault(ranks, {})
    if timeout not in groups:
        groups[timeout] = tables_group(ranks, timeout)
    return groups[timeout]


def own_device(ranks: dist.ProcessGroup | None) -> torch.device:
    """Return the device of this rank: the rank's GPU where the group is NCCL, else the CPU."""
    if ranks is not None and dist.get_backend(ranks) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def wrap_dense(module: nn.Module, comm: Comm, **settings: Any) -> nn.Module:
    """Wrap a model with sharded tables in DDP for its dense part. Return the module itself where no
    gradient needs a reduction.

    DDP ignores the tables: shards are neither parameters nor buffers, and the gradients of tables
    that are parameters are already reduced. On CPUs dense gradients use the transport of the tables
    and are added in rank order (`recapp/transport/step_messages.py`). On GPUs they use DDP's
    all-reduce.

    Raises:
        ConfigError: Dense parameters have an optimiser in backward, on several CPU ranks.
    """
    tables = [
        f"{path}.weight".lstrip(".")
        for path, part in module.named_modules(remove_duplicate=False)
        if isinstance(part, TableParameter)
    ]
    dense = {
        name: p for name, p in module.named_parameters() if p.requires_grad and name not in tables
    }
    if comm.world == 1 or not dense:
        return module
    in_backward = [name for name, p in dense.items() if hasattr(p, "_in_backward_optimizers")]
    if in_backward and comm.device.type == "cpu":
        raise ConfigError(
            f"{in_backward[0]} has an optimizer by apply_optimizer_in_backward, which torch's "
            "DDP supports on GPUs only: call apply_optimizer_in_backward for the tables alone, "
            "and step an optimizer of the dense parameters yourself"
        )
    if tables:
        ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(module, tables)
    # torch 2.13 renames broadcast_buffers; 2.11 has only the old name
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*broadcast_buffers.*", FutureWarning)
        wrapped = DistributedDataParallel(module, **settings)
    if comm.device.type == "cpu":
        wrapped.register_comm_hook(None, AverageOverRanks(comm.twin()))
    return wrapped


def compile_dense(module: nn.Module) -> list[str]:
    """Compile every part of a model without tables by `torch.compile`, in place. Names and start
    values stay. Metrics are not compiled.

    Call this function after sharding and before DDP. torch compiles a part at its first call, which
    takes minutes for a large part.

    Returns:
        The paths of the compiled parts.

    Raises:
        ConfigError: torch cannot compile for the CPU here.
    """
    from torchmetrics import Metric, MetricCollection

    device = next((p.device.type for p in module.parameters()), "cpu")
    if device == "cpu" and (fault := fault_of_compiler()):
        raise ConfigError(f"engine.compile=true: {fault}, or set engine.compile=false")
    paths: list[str] = []
    for path, child in module.named_children():
        if isinstance(child, ShardedCollection | Metric | MetricCollection):
            continue
        if sharded_collections(child):
            paths += [f"{path}.{below}" for below in compile_dense(child)]
        else:
            child.compile()
            paths.append(path)
    return paths
