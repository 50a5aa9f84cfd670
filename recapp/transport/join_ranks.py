"""Join ranks: the process group of a server, the transport of a group's messages, and pulses that
show whether other ranks still run.

Messages go through shared memory where all ranks run on the CPU of one host, else through the
process group. The ranks exchange their host data, so that all of them choose the same transport.

Pulses: each rank counts all the time, during any other work.

    rank 1   counts 17, 18, 19            a number of its own in the store where the ranks met
    rank 0   reads  17, 18, 18, 18, 18    rank 1 has not answered for 3 s

A message to a stopped rank would block the sender for half an hour. No rank waits for a number. A
separate thread counts, so the count goes on while a model is loaded, which takes minutes.
"""

import os
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from recapp import console
from recapp.errors import LaunchError, RankError
from recapp.processes.process_memory import Pool, free_memory_bytes, host_id, memory_pools
from recapp.processes.rank_environment import RankInfo
from recapp.settings.values import Transport, read
from recapp.transport.communicator import Comm, SecondsSeen

SETTING = "engine.transport"


def make_comm(
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    transport: str = "auto",
    patience_s: float | None = None,
) -> Comm:
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


def describe(comm: Comm) -> str:
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
    pools: list[Pool]


def host_info(device: torch.device) -> HostInfo:
    """Return the host, processes and memory of this rank.

    Args:
        device: The device of its message buffers.
    """
    try:
        processes = str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        processes = ""
    return HostInfo(
        host_id(), processes, _obstacle(device, processes), memory_pools(torch.device("cpu"))
    )


def _obstacle(device: torch.device, processes: str) -> str:
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


# ---- the ranks of a server

PULSE_SECONDS = 1.0
QUIET_SECONDS = (
    5.0  # silent for so long, a rank is an obstacle: longer than a busy machine delays a thread
)
SILENT_SECONDS = 30.0  # silent for so long, a rank is lost: three looks of a Kubernetes probe


class Pulses:
    """The counts of all ranks.

    Args:
        store: The store of the counts.
        rank: The number of this rank.
        world: The number of ranks.
        pulse_seconds: The interval at which a rank counts, and reads the counts of the others.
        quiet_seconds: The time of silence after which a rank is an obstacle.
        silent_seconds: The time of silence after which a rank is lost.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        *,
        pulse_seconds: float = PULSE_SECONDS,
        quiet_seconds: float = QUIET_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        self._store = store
        self._rank = rank
        self._others = [other for other in range(world) if other != rank]
        self._pulse_seconds = pulse_seconds
        self._quiet_seconds = quiet_seconds
        self._silent_seconds = silent_seconds
        self._silent: tuple[float, int] | None = None
        self._ended = threading.Event()

    def show(self) -> None:
        """Start to count."""
        threading.Thread(target=self._show, name="pulse", daemon=True).start()

    def watch(self, lost: Callable[[RankError], object]) -> None:
        """Start to read the counts of all other ranks.

        Args:
            lost: Called once, when a rank is lost.
        """
        threading.Thread(target=self._watch, args=(lost,), name="pulse", daemon=True).start()

    def obstacle(self) -> str:
        """Return a text that names a rank silent for `quiet_seconds` and the time of its silence;
        empty where no rank is silent.
        """
        if self._silent is None or self._silent[0] < self._quiet_seconds:
            return ""
        return _words(*self._silent)

    def end(self) -> None:
        """Stop counting and reading."""
        self._ended.set()

    def _show(self) -> None:
        while self._count(self._rank, 1) is not None and not self._ended.wait(self._pulse_seconds):
            pass

    def _watch(self, lost: Callable[[RankError], object]) -> None:
        seen = SecondsSeen()
        before: dict[int, int | None] = {}
        while not self._ended.wait(self._pulse_seconds):
            counts = {rank: self._count(rank, 0) for rank in self._others}
            silent = seen.look([rank for rank in counts if counts[rank] == before.get(rank)])
            before = counts
            self._silent = max(((seconds, rank) for rank, seconds in silent.items()), default=None)
            if self._silent is not None and self._silent[0] >= self._silent_seconds:
                lost(RankError(_words(*self._silent)))
                return

    def _count(self, rank: int, more: int) -> int | None:
        """Add to the count of a rank and return the count; None where the process of the store has
        ended.
        """
        try:
            return self._store.add(str(rank), more)
        except RuntimeError:
            return None


def _words(seconds: float, rank: int) -> str:
    return f"rank {rank} has not answered for {seconds:.0f} s: it is stopped or lost"


def join_ranks(here: RankInfo, device: torch.device) -> tuple[Comm, Comm, Pulses]:
    """Join the process group of all ranks that the environment names. Every rank calls it.

    Args:
        here: This rank, from the environment.
        device: The device of this rank.

    Returns:
        Two communicators and the pulses. The first communicator carries the commands between
        batches, the second the messages of tables, over the fastest transport. Both have torch's
        timeout for a silent rank, because comparing the checksums of large tables takes minutes;
        they notice at once when a rank has ended. The pulses distinguish a stopped rank from a busy
        one.
    """
    dist.init_process_group("gloo")
    group = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo")
    # a connection of its own: the connection of the process group may block
    store = TCPStore(here.address, here.port, is_master=False)
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun reuses its store
    pulses = Pulses(PrefixStore(f"recapp/pulse/{start}", store), here.rank, here.world)
    return Comm(), make_comm(group, device), pulses
