"""Join ranks: the transport of a group's messages, the process group of a server with pulses that
show whether other ranks still run, and ranks on this machine by one call.

Messages go through shared memory where all ranks run on the CPU of one host, else through the
process group. The ranks exchange their host data, so that all of them choose the same transport.

Pulses: each rank counts all the time, during any other work.

    rank 1   counts 17, 18, 19            a number of its own in the store where the ranks met
    rank 0   reads  17, 18, 18, 18, 18    rank 1 has not answered for 3 s

A message to a stopped rank would block the sender for half an hour. No rank waits for a number. A
separate thread counts, so the count goes on while a model is loaded, which takes minutes.

A notebook, a script or a test starts ranks by one call:

    def work(rows):
        return dist.get_rank() * rows

    run_ranks(work, 10, ranks=2)  # [0, 10]

Each rank is a fork of this process that joins the others in a process group of gloo before it calls
the function.

    caller   waits for the ends of the ranks, reads their answers
      rank 0    function() -> pickle -> file
      rank 1    function() -> pickle -> file

A fork has all objects of the caller, so a notebook's cell may define the function, and no module is
imported again. But a fork lacks the caller's threads: a rank computes on one thread, because it
would wait for ever for the threads of OpenMP. Only results are pickled. Ranks and caller are one
program, so it is safe to unpickle them. A rank stays until all have answered, because other ranks
may still need it, and it dies with the caller. Ranks print where the caller prints.
"""

import gc
import math
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import current_process, get_context
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from setproctitle import setproctitle
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from recapp import console
from recapp.errors import ConfigError, LaunchError, RankError, RecappError
from recapp.processes.faults import describe_exit, explain_error
from recapp.processes.fork_server import replace_environment
from recapp.processes.launch import environments_of_ranks, meeting_point
from recapp.processes.process_memory import Pool, free_memory_bytes, host_id, memory_pools
from recapp.processes.rank_environment import RankInfo, external_rank
from recapp.processes.rank_process import set_defaults
from recapp.processes.stopping import die_with_parent, end_children, loading
from recapp.settings.values import Transport, read
from recapp.transport.communicator import Comm, SecondsSeen, leave_process_group
from recapp.transport.nccl import NcclComm

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
        return NcclComm(group, device) if comm.transport == "nccl" else comm
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


# ---- ranks by one call

SECONDS_FOR_THE_SOURCE = 2.0  # for the rank with an error of its own, before a peer that lost it
SENDABLE = "return numbers, text, tensors, or lists and dicts of these"
OPENMP = (
    "; GNU's OpenMP does that to a fork where it was used before the fork (in numba, "
    "NUMBA_THREADING_LAYER=workqueue does without it)"
)

Result = TypeVar("Result")


def run_ranks(
    function: Callable[..., Result], *args: Any, ranks: int = 2, timeout: float | None = None
) -> list[Result]:
    """Call a function on several ranks of this machine and return the result of each rank.

    Ranks are forks of this process. So the function may be defined anywhere, also in a cell of a
    notebook, and finds all objects of this process as they are at the start of the ranks. Changes
    stay in their rank. Each rank computes on one thread, is in a process group of gloo with the
    others, and begins with the random state of this process. A rank prints where this
    process prints. If one rank fails, or Ctrl-C ends this call, all ranks are ended.

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
    if not isinstance(ranks, int) or ranks < 1:
        raise ConfigError(f"ranks={ranks!r}: must be a whole number of at least 1")
    if timeout is not None and not (isinstance(timeout, int | float) and 0 < timeout < math.inf):
        raise ConfigError(
            f"timeout={timeout!r}: must be a number of seconds above 0, or None for no limit"
        )
    if external_rank() is not None or dist.is_initialized():
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
    with meeting_point() as port:
        environments = environments_of_ranks(ranks, port, uuid.uuid4().hex[:8])
        return call_in_forks(
            [partial(_in_group, each, function, args) for each in environments], timeout
        )


def _in_group(
    environment: dict[str, str], function: Callable[..., Result], args: tuple[Any, ...]
) -> Result:
    """Call a function as the rank that an environment names."""
    replace_environment(environment | {"OMP_NUM_THREADS": "1"})
    set_defaults()
    dist.init_process_group("gloo")
    result = function(*args)
    leave_process_group()
    return result


@dataclass(frozen=True)
class RaisedInRank:
    """The answer of a rank whose function has raised an exception.

    Args:
        text: The exception's type and text.
        pickled: The exception; empty where it cannot be pickled.
        traceback: Its traceback.
    """

    text: str
    pickled: bytes = b""
    traceback: str = ""


def call_in_forks(
    functions: Sequence[Callable[[], Result]], timeout: float | None = None
) -> list[Result]:
    """Call each function in a fork of this process, all at the same time.

    Args:
        functions: The function of each rank.
        timeout: The seconds for all functions together; None: no limit.

    Returns:
        The results, in the order of the functions.

    Raises:
        RecappError: A rank has raised this error; the text begins with the name of the rank.
        LaunchError: A rank has raised another exception, which is the cause; or a rank has died, or
            the time is up.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # else each fork would print the unflushed text again
    context = get_context("fork")
    world = len(functions)
    all_have_answered = context.Barrier(world)
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        # Python warns of threads, which the forks do not need
        warnings.simplefilter("ignore", DeprecationWarning)
        files = [Path(folder, str(number)) for number in range(world)]
        ranks = [
            context.Process(
                target=_be_rank,
                name=f"rank {number} of {world}",
                args=(functions[number], file, all_have_answered),
            )
            for number, file in enumerate(files)
        ]
        try:
            with loading():  # nothing is collected in a fork before it has set the rest aside
                for rank in ranks:
                    rank.start()
            failed = _first_failed(ranks, timeout)
            exit_code = failed.exitcode if failed else 0
        finally:
            for rank in ranks:
                if rank.pid is not None:  # it was started
                    rank.kill()
                    rank.join()
        if failed:
            _raise_what(failed.name, exit_code or 0, files[ranks.index(failed)])
        return [pickle.loads(file.read_bytes()) for file in files]


def _first_failed(ranks: Sequence[ForkProcess], timeout: float | None) -> ForkProcess | None:
    """Wait until all ranks have ended, or one has failed, and return that one.

    Raises:
        LaunchError: The time is up.
    """
    end = math.inf if timeout is None else time.monotonic() + timeout
    running: dict[Any, ForkProcess] = {rank.sentinel: rank for rank in ranks}
    while running:
        ended = wait(list(running), None if timeout is None else max(0.0, end - time.monotonic()))
        if not ended:
            names = " and ".join(rank.name for rank in running.values())
            raise LaunchError(
                f"timeout={timeout}: {names} took longer; give more seconds, or None for no limit"
            )
        for sentinel in ended:
            rank = running.pop(sentinel)
            rank.join()
            if rank.exitcode:
                return rank
    return None


def _raise_what(name: str, exit_code: int, file: Path) -> NoReturn:
    """Raise the exception of a rank in the caller: an error of recapp in its own class, any other
    as the cause of a `LaunchError`.
    """
    if not file.exists():
        hint = OPENMP if exit_code == -signal.SIGTERM else ""
        raise LaunchError(f"{name} {describe_exit(exit_code)}{hint}")
    raised: RaisedInRank = pickle.loads(file.read_bytes())
    cause = None
    with suppress(Exception):  # unpickling fails if `__init__` takes other arguments than `args`
        cause = pickle.loads(raised.pickled) if raised.pickled else None
    if isinstance(cause, RecappError):
        error: RecappError = type(cause)(f"{name}: {cause}")
    else:
        error = LaunchError(f"{name} {raised.text}")
    if raised.traceback:
        error.add_note(f"in {name}:\n{raised.traceback}")
    raise error from cause


def _be_rank(function: Callable[[], Any], file: Path, all_have_answered: Barrier) -> NoReturn:
    """Call a function in a new fork, leave its answer in a file, and end the process."""
    die_with_parent()
    # garbage of the caller stays, such as a process group, whose threads a fork has not
    gc.freeze()
    gc.enable()
    signal.set_wakeup_fd(-1)  # the descriptor belongs to the caller
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C, the caller ends its ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    setproctitle(f"recapp.run_ranks {current_process().name}")
    torch.set_num_threads(1)
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # lines of ranks do not mix; a notebook has other streams
            stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    answer, failed = _answer_of(function)
    file.write_bytes(answer)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the function may have closed or replaced it
            stream.flush()
    if not failed:
        all_have_answered.wait()
    end_children()
    os._exit(int(failed))


def _answer_of(function: Callable[[], Any]) -> tuple[bytes, bool]:
    """Call a function, and return the pickle of its result or of a `RaisedInRank`, and whether it
    is the latter.
    """
    try:
        result = function()
    except BaseException as error:  # includes `sys.exit`
        explained = explain_error(error, 0) if isinstance(error, Exception) else error
        if getattr(explained, "secondhand", False):
            time.sleep(SECONDS_FOR_THE_SOURCE)
        pickled = b""
        with suppress(Exception):
            pickled = pickle.dumps(error)
        lines = "".join(traceback.format_exception(error))
        text = f"raised {type(error).__name__}: {error}"
        return pickle.dumps(RaisedInRank(text, pickled, lines)), True
    try:
        return pickle.dumps(result), False
    except Exception as error:
        kind = type(result).__name__
        text = f"returned a {kind}, which cannot be sent back ({error}); {SENDABLE}"
        return pickle.dumps(RaisedInRank(text)), True
