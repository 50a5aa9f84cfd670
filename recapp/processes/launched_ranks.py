"""Start, watch and end the processes of the ranks on this machine.

Python's multiprocessing starts them, by a fork server or as fresh interpreters
(`fork_server.py`). Each rank gets its work through a pipe once all ranks have started, so a
launcher that is stopped before that leaves no rank that computes.

The launcher forwards signals to the ranks: the first one asks them to stop, the second ends them.

    Ctrl-C -> this process -> SIGINT to each rank -> they stop at the same step, save and leave
           -> this process leaves with code 130

Each rank has a session of its own, so a terminal's Ctrl-C reaches only this process, and each rank
gets the signal once. A rank that is still starting blocks signals. It gets the signal as soon as it
handles signals, and leaves with nothing to save.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from pathlib import Path
from types import FrameType
from typing import Any

from recapp.console import note
from recapp.errors import LaunchError
from recapp.processes.fork_server import (
    context_of,
    ensure_running,
    signals_blocked,
    without_main_module,
)
from recapp.processes.rank_process import ERROR_FILE, InheritedStream, RankWork, be_rank
from recapp.processes.stopping import SIGNALS, Stopped, raise_if_stopped

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
        """Open a pair of file descriptors for each rank: its standard output and standard error."""
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
