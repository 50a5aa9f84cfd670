"""The process of a rank: it ends in time, and reports the error that ends it. The launcher starts,
watches and ends the ranks of its machine.

The launcher (`launch.py`, torchrun or srun) sees only the exit code and the error file of a rank.
So a rank
- ends with its launcher, for any reason (the kernel kills it), and soon after a signal, even inside
  a collective that will never return (`stopping.py`);
- writes the exception that ends it to the file that its environment names, in torch elastic's
  format, and leaves at once.

A rank of `launch.py` may be a fork of a process that has loaded the libraries already
(`fork_server.py`). The libraries do not read the rank's environment again, so the rank applies it.

Where torchrun, srun or a person has started the ranks, the command itself is a rank
(`rank_environment.py`).

Python's multiprocessing starts the ranks of `launch.py`, by a fork server or as fresh interpreters.
Each rank gets its work through a pipe once all ranks have started, so a launcher that is stopped
before that leaves no rank that computes.

The launcher forwards signals to the ranks: the first one asks them to stop, the second ends them.

    Ctrl-C -> this process -> SIGINT to each rank -> they stop at the same step, save and leave
           -> this process leaves with code 130

Each rank has a session of its own, so a terminal's Ctrl-C reaches only this process, and each rank
gets the signal once. A rank that is still starting blocks signals. It gets the signal as soon as it
handles signals, and leaves with nothing to save.
"""

import faulthandler
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from io import TextIOWrapper
from multiprocessing import parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.reduction import DupFd
from operator import methodcaller
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import yaml  # type: ignore[import-untyped]
from setproctitle import setproctitle

from recapp.console import note, stop_printing
from recapp.errors import LaunchError
from recapp.processes.faults import explain_error
from recapp.processes.fork_server import (
    DEFAULTS,
    context_of,
    ensure_running,
    replace_environment,
    signals_blocked,
    without_main_module,
)
from recapp.processes.rank_environment import (
    cores_of_rank,
    external_rank,
    interface_towards,
    rank_info,
)
from recapp.processes.stopping import (
    SIGNALS,
    Stopped,
    die_with_parent,
    end_at_once,
    end_children,
    end_process,
    raise_if_stopped,
    raising_if_stopped,
    take_signals,
)
from recapp.settings.whole_file import write_whole

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun and launch.py set it for each rank
THREAD_VARIABLES = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")  # the first one that is set counts
SECONDS_FOR_RANK_0 = 2  # head start of rank 0 in reporting an error that all ranks have
SECONDS_FOR_THE_SOURCE = 1  # head start of the rank with the error over ranks that lost this peer
TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class RankWork:
    """The work of a launched rank.

    Args:
        module: The module whose `run(settings, job directory)` does the work.
        config: The file of the settings, in the job's directory.
        environment: All environment variables of the rank.
    """

    module: str
    config: Path
    environment: dict[str, str]


@dataclass(frozen=True)
class InheritedStream:
    """A file descriptor of the launcher. Each rank gets a duplicate at its start."""

    descriptor: int

    def __reduce__(self) -> tuple[Any, ...]:
        return methodcaller("detach"), (DupFd(self.descriptor),)


def be_rank(orders: Connection, *streams: Any) -> NoReturn:
    """Do the work of a rank in a process that `launch` has started, and end the process.

    After an exception, write the error file and leave with code 1, without waiting for threads or
    peers. After a signal, leave with 128 + the signal's number.

    Args:
        orders: The pipe that brings the `Work`. A closed pipe means that there is no work.
        streams: The file descriptors that become standard output and standard error.
    """
    _leave_with_launcher()
    try:
        work: RankWork = orders.recv()
    except EOFError:  # no work: the launcher was stopped while it started ranks
        os._exit(TERMINATED)
    for number, descriptor in enumerate(streams, 1):
        os.dup2(descriptor, number)
    for descriptor in {*streams} - {1, 2}:
        os.close(descriptor)
    os.setsid()
    _become(work)
    directory = work.config.parent
    try:
        with as_rank(directory):
            import_module(work.module).run(yaml.safe_load(work.config.read_text()), directory)
    except Stopped as stopped:
        end_at_once(128 + stopped.number)
    except Exception:
        end_at_once(1)
    end_process(0)


def _leave_with_launcher() -> None:
    """Make the kernel kill this process when the fork server or the launcher ends."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # the handler was the fork server's
    die_with_parent()
    launcher = parent_process()
    if launcher is not None and not launcher.is_alive():  # it ended before `die_with_parent`
        os._exit(TERMINATED)


def _become(work: RankWork) -> None:
    """Replace the fork server's environment, threads and title by those of the rank."""
    multiprocessing.set_start_method(None, force=True)  # data workers start by Python's default
    rank, world = (work.environment[name] for name in ("RANK", "WORLD_SIZE"))
    # before the environment changes: the title is written into the memory beside it
    setproctitle(f"{work.module} rank {rank} of {world} in {work.config.parent}")
    replace_environment(work.environment)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a shell may have closed it
            stream.reconfigure(line_buffering=True)
    if "torch" in sys.modules and (threads := threads_of(work.environment)):
        import torch

        torch.set_num_threads(threads)


def threads_of(environment: Mapping[str, str]) -> int | None:
    """Return the number of compute threads that an environment sets; None where it sets none.
    OpenMP takes one number for each level of nesting: the first one counts.
    """
    for name in THREAD_VARIABLES:
        number = environment.get(name, "").partition(",")[0]
        if number.isdecimal() and int(number):
            return int(number)
    return None


@contextmanager
def as_rank(directory: Path | None = None) -> Iterator[None]:
    """Make this process a rank inside the `with`: it handles signals, and writes an exception to
    the error file of its launcher.

    Args:
        directory: The directory of the run.

    Raises:
        Stopped: A signal has ended the work.
        LaunchError: Ranks were started by hand without the variables of their meeting point, or the
            reader of standard output has ended.
    """
    faulthandler.enable()
    take_signals(write_error_file)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        set_defaults()
        with raising_if_stopped():
            yield
    except BrokenPipeError as error:
        unread = LaunchError(
            "standard output is a pipe whose reader has ended: write it to a file, or keep the "
            "reader running"
        )
        write_error_file(unread)
        raise unread from error
    except Stopped as stopped:
        write_error_file(stopped)
        raise
    except Exception as error:
        explained = explain_error(error, external_rank() or 0, directory)
        if getattr(explained, "secondhand", False):
            time.sleep(SECONDS_FOR_THE_SOURCE)
        write_error_file(explained, error)
        if explained is error:
            raise
        raise explained from error
    finally:
        end_children()


def set_defaults() -> None:
    """Set the number of threads and gloo's interface where the launcher of this rank has not.

    Raises:
        LaunchError: Ranks were started by hand, and their environment lacks variables.
    """
    info = rank_info()
    if info is None:
        return
    os.environ.setdefault("OMP_NUM_THREADS", str(cores_of_rank()))
    if interface := interface_towards(info):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def write_error_file(error: BaseException, cause: BaseException | None = None) -> None:
    """Report the error that ends this rank to the launcher, if the launcher has named a file.

    Keep only the first report. Write the whole file or no file, because torch elastic cannot read a
    partial one. A full disk gets no file.

    Args:
        error: The error whose type and text are reported.
        cause: The exception whose traceback is reported; by default `error` itself.
    """
    path = os.environ.get(ERROR_FILE)
    if path and not os.path.exists(path):
        calls = {
            "py_callstack": "".join(traceback.format_exception(cause or error)),
            "timestamp": str(int(time.time())),
        }
        # the class in `recapp.errors`, which the launcher can make again from its name
        kind = next(
            (c for c in type(error).__mro__ if c.__module__ == "recapp.errors"), type(error)
        )
        text = json.dumps({"message": {"message": f"{kind.__name__}: {error}", "extraInfo": calls}})
        with suppress(OSError):
            write_whole(path, text)


def wait_for_rank_0_error() -> None:
    """Wait until rank 0 reports an error that all ranks may have, and its launcher ends this rank.

    Only ranks of torchrun, of srun or of a person call this function: one line is enough for an
    error of all ranks. Under torchrun the first rank of each host reports, because each host has a
    terminal; else rank 0 reports. The function returns in the reporting rank at once, and in the
    others if nothing ends them in time; the caller then reports the error.
    """
    rank = os.environ.get("LOCAL_RANK") if "TORCHELASTIC_RUN_ID" in os.environ else external_rank()
    if int(rank or 0):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(SECONDS_FOR_RANK_0)


def leave(main: Callable[[], int]) -> NoReturn:
    """Run a command, and end its process with its exit code.

    A rank that has failed waits neither for threads nor for peers, because peers wait for it.

    Args:
        main: The command. It fails without a word if the reader of standard output has ended.
    """
    try:
        code = main()
    except BrokenPipeError:
        stop_printing()
        code = 1
    if code and external_rank() is not None:
        end_at_once(code)
    end_process(code)


# ---- the launcher's side

# time after launch.grace, or after the end of the first rank, until the launcher kills the others
GRACE_SECONDS = 10.0
LOOK_SECONDS = 0.2


class Forwarding:
    """A context manager that forwards signals from this process to its ranks.

    Args:
        grace: The seconds that ranks have to write a checkpoint.
        reloads: Whether SIGHUP only goes to rank 0, which reloads, and stops nothing.

    Attributes:
        number: The first signal; 0 before.
    """

    def __init__(self, grace: float, reloads: bool = False) -> None:
        self.grace = grace
        self._reloads = reloads
        self.number = 0
        self._deadline = float("inf")
        self._kept: dict[int, Any] = {}
        self._ranks: Mapping[int, Any] = {}

    def __enter__(self) -> "Forwarding":
        raise_if_stopped()  # for a signal that arrived before the start of the ranks
        for number in SIGNALS:
            handler = signal.getsignal(number)
            reloads = self._reloads and number == signal.SIGHUP
            if reloads or not (number == signal.SIGHUP and handler == signal.SIG_IGN):  # nohup
                self._kept[number] = handler
                signal.signal(number, self._pass_on if reloads else self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._kept.items():
            signal.signal(number, handler)

    def watch(self, ranks: Mapping[int, Any]) -> None:
        """Forward signals to the ranks from now on.

        Args:
            ranks: The process of each rank that runs. The caller removes ranks that have ended.

        Raises:
            Stopped: A signal has arrived already, and the exception of its handler got lost.
        """
        self._ranks = ranks
        if self.number:
            raise Stopped(self.number)

    def deadline(self, *, one_has_ended: bool) -> float:
        """Return the time at which ranks that still run are killed: infinite before a signal, the
        end of the grace after it, or some seconds after the end of the first rank.
        """
        if self.number and one_has_ended:
            self._deadline = min(self._deadline, time.monotonic() + GRACE_SECONDS)
        return self._deadline

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            send_signal(self._ranks, signal.SIGKILL)
            raise Stopped(self.number)
        self.number = number
        self._deadline = time.monotonic() + self.grace + GRACE_SECONDS
        if not self._ranks:
            raise Stopped(number)
        send_signal(self._ranks, number)
        note(f"stopping after {signal.Signals(number).name}; a second one ends the run at once")

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Send a signal only to rank 0, and only if that rank handles signals already."""
        rank = self._ranks.get(0)
        if rank is not None and _takes_signals(rank.pid):
            send_signal({0: rank}, number)


def send_signal(ranks: Mapping[int, Any], number: int) -> None:
    """Send a signal to processes, some of which may just have ended."""
    for rank in list(ranks.values()):
        with suppress(ProcessLookupError):
            os.kill(rank.pid, number)


def _takes_signals(pid: int) -> bool:
    """Return whether a process has a handler for SIGTERM, which Python itself does not install."""
    try:
        caught = re.search(
            r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
        )
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


PATIENCE_SECONDS = 30.0  # for the peers of a failed rank, which may be saving
ERROR_SUFFIX = ".error.json"


@dataclass(frozen=True)
class RankFailure:
    """The failure of a rank.

    Args:
        rank: The number of the rank.
        pid: The number of its process.
        exitcode: Its exit code; after a signal, minus the number of the signal.
        error_file: The path of its error file, which exists only if the rank has reported an error.
        ended: Whether the launcher killed the rank because the run had failed.
    """

    rank: int
    pid: int
    exitcode: int
    error_file: Path
    ended: bool = False


class LaunchedRanks:
    """The ranks of one run on this machine.

    Args:
        works: The work of each rank, by rank.
        logs: The directory of their logs, for this run alone. `logs/<rank>.log` holds the output of
            a rank, and `logs/<rank>.error.json` its error. Rank 0 prints to the output of this
            process.
        preload: The modules that a fork server imports before it forks ranks.
        to_stderr: Whether rank 0 prints to standard error.
    """

    def __init__(
        self,
        works: Sequence[RankWork],
        logs: Path,
        *,
        preload: str,
        to_stderr: bool,
    ) -> None:
        self._preload = preload
        logs.mkdir(parents=True, exist_ok=True)
        for pattern in ("*.log", f"*{ERROR_SUFFIX}"):
            for old in logs.glob(pattern):  # an earlier run may have had more ranks
                old.unlink()
        self._error_files = [logs / f"{work.environment['RANK']}{ERROR_SUFFIX}" for work in works]
        self._works = [
            replace(work, environment={**work.environment, ERROR_FILE: str(path)})
            for work, path in zip(works, self._error_files, strict=True)
        ]
        self._logs = logs
        self._to_stderr = to_stderr
        self._processes: list[Any] = []
        self._running: dict[int, Any] = {}
        self._ended: set[int] = set()

    def start(self, method: str, forwarding: Forwarding) -> None:
        """Start all ranks, and give each rank its work.

        If the fork server fails, print a note and start each rank as a fresh interpreter.

        Args:
            method: `launch.start_method`.
            forwarding: The forwarding of signals, which gets the processes.

        Raises:
            LaunchError: No process can be started.
            Stopped: A signal arrived before all ranks had started.
        """
        context = context_of(method)
        with self._streams() as streams:
            if context.get_start_method() == "forkserver":
                # a second try helps where the server was killed and Python has not noticed yet
                for pause in (LOOK_SECONDS, 0.0):
                    try:
                        return self._start(context, streams, forwarding)
                    except (OSError, EOFError) as error:
                        self.end()
                        reason = _words(error)
                        time.sleep(pause)
                note(
                    f"the fork server cannot be used ({reason}): each rank loads torch for itself, "
                    "which takes longer"
                )
                context = context_of("spawn")
            try:
                self._start(context, streams, forwarding)
            except OSError as error:
                raise LaunchError(
                    f"ranks cannot be started ({_words(error)}): use fewer (trainer.devices), or "
                    "give this machine more memory and processes"
                ) from error

    def _start(
        self, context: BaseContext, streams: list[list[int]], forwarding: Forwarding
    ) -> None:
        if context.get_start_method() == "forkserver":
            ensure_running(self._preload)
        with ExitStack() as pipes:
            orders = []
            for rank in range(len(self._works)):
                receiving, sending = context.Pipe(duplex=False)
                pipes.callback(sending.close)
                with receiving:
                    process = context.Process(  # type: ignore[attr-defined]
                        target=be_rank, args=(receiving, *map(InheritedStream, streams[rank]))
                    )
                    _start_process(context, process)
                self._processes.append(process)
                self._running[rank] = process
                orders.append(sending)
            forwarding.watch(self._running)
            for sending, work in zip(orders, self._works, strict=True):
                with suppress(BrokenPipeError):  # the rank has ended already
                    sending.send(work)

    @contextmanager
    def _streams(self) -> Iterator[list[list[int]]]:
        with ExitStack() as opened:
            streams = [[_duplicate(2 if self._to_stderr else 1), _duplicate(2)]]
            for rank in range(1, len(self._works)):
                log = os.open(
                    log_of(self._logs, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666
                )
                streams.append([log, os.dup(log)])
            for descriptor in [descriptor for pair in streams for descriptor in pair]:
                opened.callback(os.close, descriptor)
            yield streams

    def wait(self, forwarding: Forwarding) -> list[RankFailure]:
        """Wait for the end of all ranks, and return the failures.

        Where a rank ends with an error, send SIGTERM to the other ranks, let those that are stopped
        (SIGSTOP) take it, and kill those that are left when their time is over.
        """
        running = self._running
        patience_ends = float("inf")
        while running:
            wait([process.sentinel for process in running.values()], LOOK_SECONDS)
            ended = [rank for rank, process in running.items() if process.exitcode is not None]
            for rank in ended:
                running.pop(rank).join()
            failed = any(self._processes[rank].exitcode for rank in ended)
            if failed and patience_ends == float("inf"):
                patience_ends = time.monotonic() + PATIENCE_SECONDS
                if not forwarding.number:
                    send_signal(running, signal.SIGTERM)
                    send_signal(running, signal.SIGCONT)
            deadline = forwarding.deadline(one_has_ended=len(running) < len(self._processes))
            if time.monotonic() > min(patience_ends, deadline):
                self._ended |= set(running)
                send_signal(running, signal.SIGKILL)
        return [
            RankFailure(
                rank,
                process.pid,
                process.exitcode,
                self._error_files[rank],
                rank in self._ended,
            )
            for rank, process in enumerate(self._processes)
            if process.exitcode
        ]

    def end(self) -> None:
        """Kill the ranks that still run, and forget all ranks."""
        send_signal(self._running, signal.SIGKILL)
        for process in self._running.values():
            process.join()
        self._running.clear()
        self._processes.clear()


def log_of(logs: Path, rank: int) -> Path:
    """Return the path of a rank's log in the directory of the logs."""
    return logs / f"{rank}.log"


def remove_silent(logs: Path) -> None:
    """Remove the logs of ranks that have printed nothing, and the directory if it is empty then."""
    with suppress(OSError):
        for log in logs.glob("*.log"):
            if not log.stat().st_size:
                log.unlink()
        logs.rmdir()


def _start_process(context: BaseContext, process: Any) -> None:
    """Start a process with signals blocked. A fork server blocks them, and its forks inherit the
    block.
    """
    with without_main_module():
        if context.get_start_method() == "forkserver":
            process.start()  # not blocked here: a signal must end the wait for the server
            return
        resource_tracker.ensure_running()  # the tracker's first call unblocks signals
        with signals_blocked():
            process.start()


def _duplicate(descriptor: int) -> int:
    """Return a second descriptor of standard output (1) or standard error (2) of this process; one
    of the null device where a shell has closed the stream.
    """
    closed = (sys.__stdout__ if descriptor == 1 else sys.__stderr__) is None
    return os.open(os.devnull, os.O_WRONLY) if closed else os.dup(descriptor)


def _words(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
