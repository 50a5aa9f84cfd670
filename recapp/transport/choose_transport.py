"""Which way messages go: through memory where all ranks run on one host and on its CPU, else
through their process group.

The ranks tell each other what they have, so all of them choose the same. Torch is imported only
once there is something to choose.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from recapp import console
from recapp.errors import ConfigError, LaunchError, suggest

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from recapp.processes.process_memory import Pool
    from recapp.transport.communicator import Comm

TRANSPORTS = ("auto", "gloo", "shared_memory")
SETTING = "engine.transport"


def check_transport(name: object) -> None:
    """Raises ConfigError, with close matches, for what is no transport."""
    if name not in TRANSPORTS:
        raise ConfigError(f"{SETTING}={name}: {suggest(str(name), TRANSPORTS)}")


def make_comm(
    group: "dist.ProcessGroup | None" = None,
    device: "torch.device | None" = None,
    transport: str = "auto",
    patience_s: float | None = None,
) -> "Comm":
    """The ranks of a process group, and the way their messages go. Every rank calls it.

    Args:
        group: as of `Comm`.
        device: as of `Comm`.
        transport: `shared_memory`; `gloo`, the process group whatever its backend; `auto`, the
            first where it can be had. On GPUs that is never so and goes without saying; on the CPU
            rank 0 says why not, and the reason is kept in `Comm.fallback`.
        patience_s: seconds that a rank waits for a silent one in shared memory; None for those of a
            process group. A group has its own.

    Raises:
        ConfigError: an unknown transport.
        LaunchError: shared memory is asked for and cannot be had.
    """
    from recapp.transport.communicator import Comm

    check_transport(transport)
    comm = Comm(group, device)
    if (
        comm.world == 1
        or transport == "gloo"
        or (transport == "auto" and comm.device.type != "cpu")
    ):
        return comm
    obstacle = why_not(comm.gather(survey(comm.device)))
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
    """The transport in few words, with the reason if it is not the one that was hoped for."""
    return f"transport {comm.transport}" + (
        f" (no shared memory: {comm.fallback})" if comm.fallback else ""
    )


class Here(NamedTuple):
    """What a rank has: its host, which processes it sees, why it has no shared memory (empty: it
    may), its pools of memory.
    """

    host: str
    processes: str
    obstacle: str
    pools: "list[Pool]"


def survey(device: "torch.device") -> Here:
    """What there is where this rank runs."""
    import torch

    from recapp.processes.process_memory import host_id, memory_pools

    try:
        processes = str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        processes = ""
    return Here(
        host_id(), processes, _obstacle(device, processes), memory_pools(torch.device("cpu"))
    )


def _obstacle(device: "torch.device", processes: str) -> str:
    if device.type != "cpu":
        return f"the device is {device.type}"
    if not processes or not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "it needs Linux"
    try:
        import recapp.transport.ring  # noqa: F401
    # numba is not there, or it has nowhere to keep what it compiles
    except (ImportError, RuntimeError) as error:
        return f"numba cannot be used: {' '.join(str(error).split())}"
    return ""


def why_not(here_W: Sequence[Here]) -> str:
    """Why these ranks cannot share memory; empty where they can."""
    for rank, here in enumerate(here_W):
        if here.obstacle:
            return f"rank {rank}: {here.obstacle}"
    if (hosts := len({here.host for here in here_W})) > 1:
        return f"the ranks are on {hosts} hosts"
    if len({here.processes for here in here_W}) > 1:
        return "the ranks are in containers that do not see each other's processes"
    from recapp.processes.process_memory import free_memory_bytes
    from recapp.transport.shared_memory import file_bytes

    wanted = file_bytes(len(here_W))
    free = min(
        (n for n in free_memory_bytes([here.pools for here in here_W]) if n is not None),
        default=None,
    )
    if free is not None and free < 2 * wanted:
        return f"a rank needs {wanted:,} bytes for it, and has {free:,} bytes free for all it does"
    return ""
