"""The choice of a transport: shared memory where all ranks run on the CPU of one host, else the
process group of the ranks.

The ranks exchange their host data, so that all of them choose the same transport. Torch is imported
only where ranks have a choice.

The process group of the ranks of a server.

Start ranks on this machine by one call, from a notebook, a script or a test:

    def work(rows):
        return dist.get_rank() * rows

    run_ranks(work, 10, ranks=2)  # [0, 10]

Each rank is a fork of this process (`recapp/processes/forked_calls.py`) that joins the others in a
process group of gloo before it calls the function.
"""

import math
import os
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from recapp import console
from recapp.errors import ConfigError, LaunchError, suggest
from recapp.processes.fork_server import replace_environment
from recapp.processes.forked_calls import call_in_forks
from recapp.processes.launch import environments_of_ranks, meeting_point
from recapp.processes.rank_environment import RankInfo, started_externally
from recapp.transport.communicator import Comm, leave_process_group
from recapp.transport.shared_memory import Pulses

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from recapp.processes.process_memory import Pool
    from recapp.transport.communicator import Comm

TRANSPORTS = ("auto", "gloo", "shared_memory")
SETTING = "engine.transport"


def check_transport(name: object) -> None:
    """Check that a name is one of `TRANSPORTS`.

    Raises:
        ConfigError: The name is not a transport; the text has close matches.
    """
    if name not in TRANSPORTS:
        raise ConfigError(f"{SETTING}={name}: {suggest(str(name), TRANSPORTS)}")


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

    check_transport(transport)
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

    wanted = file_bytes(len(host_W))
    free = min(
        (n for n in free_memory_bytes([here.pools for here in host_W]) if n is not None),
        default=None,
    )
    if free is not None and free < 2 * wanted:
        return (
            f"a rank needs {wanted:,} bytes for shared memory, and has only {free:,} bytes free "
            "in all"
        )
    return ""


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


Result = TypeVar("Result")


def run_ranks(
    function: Callable[..., Result], *args: Any, ranks: int = 2, timeout: float | None = None
) -> list[Result]:
    """Call a function on several ranks of this machine and return the result of each rank.

    Ranks are forks of this process. So the function may be defined anywhere, also in a cell of a
    notebook, and finds all objects of this process as they are at the start of the ranks. Changes
    stay in their rank. Each rank computes on one thread, is in a process group of gloo with the
    others, and begins with the random state of this process. The output of a rank is printed here,
    line by line. If one rank fails, or Ctrl-C ends this call, all ranks are ended.

    Args:
        function: The function that every rank calls; `torch.distributed.get_rank()` returns the
            number of the rank.
        args: The arguments of the function. They are not copied for the ranks, which share the
            memory of this process until they write.
        ranks: The number of ranks.
        timeout: The seconds after which ranks that have not returned are ended; None: never.

    Returns:
        The results in rank order. Results are pickled: a tensor is copied, and a sharded model
        cannot leave its rank.

    Raises:
        ConfigError: An argument has a value that is not allowed.
        LaunchError: This process cannot be forked, because it is a rank or has used a GPU. Or a
            rank raised an exception (the cause of this error; a note has the traceback), died, or
            reached the timeout. Errors of recapp itself keep their class.
    """
    if not callable(function):
        raise ConfigError(
            f"function={function!r}: give the function that every rank calls, not its result"
        )
    if not _is_whole(ranks) or ranks < 1:
        raise ConfigError(f"ranks={ranks!r}: must be a whole number of at least 1")
    if timeout is not None and not (_is_number(timeout) and 0 < timeout < math.inf):
        raise ConfigError(
            f"timeout={timeout!r}: must be a number of seconds above 0, or None for no limit"
        )
    _check_this_process()
    with meeting_point(0) as port:
        environments = environments_of_ranks(int(ranks), port, uuid.uuid4().hex[:8])
        return call_in_forks(
            [partial(_in_group, each, function, args) for each in environments], timeout
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_this_process() -> None:
    """Check that this process can be forked into ranks.

    Raises:
        LaunchError: This process is a rank, or has used a GPU.
    """
    if started_externally() or dist.is_initialized():
        raise LaunchError(
            "run_ranks: this process is a rank already, or has a process group, and cannot "
            "start ranks; call the function itself, or leave the group "
            "(torch.distributed.destroy_process_group) first"
        )
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise LaunchError(
            "run_ranks: this process has used a GPU, and CUDA does not work in its forks; "
            "restart the process (the notebook's kernel) and start ranks before it uses a GPU"
        )


def _in_group(
    environment: dict[str, str], function: Callable[..., Result], args: tuple[Any, ...]
) -> Result:
    """Call a function as the rank that an environment names."""
    replace_environment(environment | {"OMP_NUM_THREADS": "1"})
    dist.init_process_group("gloo")
    result = function(*args)
    leave_process_group()
    return result
