"""The choice of a transport: shared memory where all ranks run on the CPU of one host, else the
process group of the ranks.

The ranks exchange their host data, so that all of them choose the same transport. Torch is imported
only where ranks have a choice.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from recapp import console
from recapp.errors import LaunchError
from recapp.settings.values import read

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from recapp.processes.process_memory import Pool
    from recapp.transport.communicator import Comm

Transport = Literal["auto", "gloo", "shared_memory"]
SETTING = "engine.transport"


def make_comm(
    group: "dist.ProcessGroup | None" = None,
    device: "torch.device | None" = None,
    transport: str = "auto",
    patience_s: float | None = None,
) -> "Comm":
    """Return the communicator of a process group, with the chosen transport.

    Every rank calls it.

    Args:
        group: The process group, as for `Comm`.
        device: The device, as for `Comm`.
        transport: `shared_memory`; `gloo`, the process group with any backend; or `auto`, shared
            memory where it is possible, else the process group. On GPUs `auto` always takes the
            process group. On CPUs rank 0 prints the reason if shared memory is not possible, and
            `Comm.fallback` keeps it.
        patience_s: The timeout in seconds for a silent rank in shared memory; None takes the
            default timeout of process groups. A process group has its own timeout.

    Raises:
        ConfigError: The transport is unknown.
        LaunchError: `shared_memory` is not possible.
    """
    from recapp.transport.communicator import Comm

    read(transport, Transport, SETTING)
    comm = Comm(group, device)
    if (
        comm.world == 1
        or transport == "gloo"
        or (transport == "auto" and comm.device.type != "cpu")
    ):
        return comm
    obstacle = obstacle_to_sharing(comm.all_gather(host_info(comm.device)))
    if not obstacle:
        from recapp.transport.shared_memory import PATIENCE_SECONDS, SharedMemoryComm

        try:
            return SharedMemoryComm(group, PATIENCE_SECONDS if patience_s is None else patience_s)
        except LaunchError as error:
            obstacle = str(error)
    if transport == "shared_memory":
        raise LaunchError(f"{SETTING}=shared_memory: {obstacle}; use auto or gloo")
    comm.fallback = obstacle
    if comm.rank == 0:
        console.note(
            f"no shared memory between the ranks ({obstacle}): their messages go through "
            f"{comm.transport}"
        )
    return comm


def describe(comm: "Comm") -> str:
    """Describe the transport in a few words, with the reason if it is not shared memory."""
    return f"transport {comm.transport}" + (
        f" (no shared memory: {comm.fallback})" if comm.fallback else ""
    )


class HostInfo(NamedTuple):
    """The data that decide whether a rank can share memory with others.

    Args:
        host: A unique name of the rank's host.
        processes: The name of the rank's process namespace.
        obstacle: The reason why the rank cannot share memory; empty if it can.
        pools: The pools from which the rank takes memory.
    """

    host: str
    processes: str
    obstacle: str
    pools: "list[Pool]"


def host_info(device: "torch.device") -> HostInfo:
    """Return the host, processes and memory of this rank.

    Args:
        device: The device of its message buffers.
    """
    import torch

    from recapp.processes.process_memory import host_id, memory_pools

    try:
        processes = str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        processes = ""
    return HostInfo(
        host_id(), processes, _obstacle(device, processes), memory_pools(torch.device("cpu"))
    )


def _obstacle(device: "torch.device", processes: str) -> str:
    """Return the reason why this rank cannot share memory; empty if it can."""
    if device.type != "cpu":
        return f"the device is {device.type}"
    if not processes or not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "it needs Linux"
    try:
        import recapp.transport.ring  # noqa: F401
    # numba is missing, or has no directory for its compiled code
    except (ImportError, RuntimeError) as error:
        return f"numba cannot be used: {' '.join(str(error).split())}"
    return ""


def obstacle_to_sharing(host_W: Sequence[HostInfo]) -> str:
    """Return the reason why ranks cannot share memory with each other; empty if they can.

    Args:
        host_W: The results of `host_info` on all ranks.
    """
    for rank, here in enumerate(host_W):
        if here.obstacle:
            return f"rank {rank}: {here.obstacle}"
    if (hosts := len({here.host for here in host_W})) > 1:
        return f"the ranks are on {hosts} hosts"
    if len({here.processes for here in host_W}) > 1:
        return "the ranks are in different containers, which do not see each other's processes"
    from recapp.processes.process_memory import free_memory_bytes
    from recapp.transport.shared_memory import file_bytes

    needed_bytes = file_bytes(len(host_W))
    free = min(
        (n for n in free_memory_bytes([here.pools for here in host_W]) if n is not None),
        default=None,
    )
    if free is not None and free < 2 * needed_bytes:
        return (
            f"a rank needs {needed_bytes:,} bytes for shared memory, and has only {free:,} bytes "
            "free in all"
        )
    return ""
