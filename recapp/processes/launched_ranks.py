"""The processes of the ranks that this process has started: their start, their watch and their end.

Python's multiprocessing starts them, by a fork server or as fresh interpreters
(`fork_server.py`). Each has a pipe from here that brings its work once all are there, so a launcher
that is stopped in between leaves none that computes.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from recapp.console import note
from recapp.errors import LaunchError
from recapp.processes.fork_server import (
    context_of,
    ensure_running,
    signals_blocked,
    without_main_module,
)
from recapp.processes.forwarding import LOOK_SECONDS, Forwarding, send_signal
from recapp.processes.process_status import SecondsSeen, is_stopped
from recapp.processes.rank_process import ERROR_FILE, InheritedStream, Work, be_rank

PATIENCE_SECONDS = 30.0  # with the peers of a rank that failed, which may be saving
STOPPED_SECONDS = 2.0  # with all where one is stopped, without which they can save nothing
ERROR_SUFFIX = ".error.json"


@dataclass(frozen=True)
class RankFailure:
    """How a rank has failed.

    Args:
        rank: Its number.
        pid: Its process.
        exitcode: Its exit code; minus the number of the signal that ended it.
        error_file: Where it has told of its error, if it has.
        ended: Whether it was killed because the run had failed.
        stopped: Whether it was stopped when that was found.
    """

    rank: int
    pid: int
    exitcode: int
    error_file: Path
    ended: bool = False
    stopped: bool = False


class LaunchedRanks:
    """The ranks of one run on this machine.

    Args:
        works: What each rank has to do, by rank.
        logs: The directory of their logs, of this run alone: `logs/<rank>.log` is what a rank has
            printed, `logs/<rank>.error.json` how it has failed. What rank 0 prints goes where this
            process prints.
        preload: The modules that a fork server imports before it forks ranks.
        to_stderr: Whether what rank 0 prints goes to standard error.
        timeout: The seconds for which a rank may be stopped.
    """

    def __init__(
        self,
        works: Sequence[Work],
        logs: Path,
        *,
        preload: str,
        to_stderr: bool,
        timeout: float,
    ) -> None:
        self._preload = preload
        _make_empty(logs)
        self._works = [_with_error_file(work, logs) for work in works]
        self._logs = logs
        self._to_stderr = to_stderr
        self._timeout = timeout
        self._processes: list[Any] = []
        self._running: dict[int, Any] = {}
        self._ended: set[int] = set()
        self._stopped: set[int] = set()

    def start(self, method: str, forwarding: Forwarding) -> None:
        """Start all ranks, and give each its work.

        A fork server that cannot be used is noted, and each rank is a fresh interpreter then.

        Args:
            method: `launch.start_method`.
            forwarding: Is told of the processes.

        Raises:
            LaunchError: No process can be started.
            Stopped: A signal has come before all were there.
        """
        context = context_of(method)
        with self._streams() as streams:
            if context.get_start_method() == "forkserver":
                if self._forked(context, streams, forwarding):
                    return
                context = context_of("spawn")
            try:
                self._start(context, streams, forwarding)
            except OSError as error:
                raise LaunchError(
                    f"ranks cannot be started ({_words(error)}): use fewer (trainer.devices), or "
                    "give this machine more memory and processes"
                ) from error

    def _forked(
        self, context: BaseContext, streams: list[list[int]], forwarding: Forwarding
    ) -> bool:
        """Start all ranks by the fork server, and return whether it could; it is noted where not.

        A second try is for a server that was killed and is not known to be gone yet.
        """
        for pause in (LOOK_SECONDS, 0.0):
            try:
                self._start(context, streams, forwarding)
                return True
            except (OSError, EOFError) as error:
                self.end()
                reason = _words(error)
                time.sleep(pause)
        note(
            f"the fork server cannot be used ({reason}): each rank loads torch for itself, which "
            "takes longer"
        )
        return False

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
                with suppress(BrokenPipeError):  # it has ended already
                    sending.send(work)

    @contextmanager
    def _streams(self) -> Iterator[list[list[int]]]:
        """Open what becomes the standard output and standard error of each rank."""
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
        """Wait for the end of all ranks; return how those have failed that have.

        A rank fails that ends with an error, or is stopped for too long. Then the others get
        SIGTERM, and are killed when their time is over. One that is stopped hears no signal, and is
        killed at once.
        """
        running = self._running
        seen = SecondsSeen()
        patience_ends = None
        while running:
            wait([process.sentinel for process in running.values()], LOOK_SECONDS)
            gone = [rank for rank, process in running.items() if process.exitcode is not None]
            for rank in gone:
                running.pop(rank).join()
            stopped = seen.look([rank for rank, one in running.items() if is_stopped(one.pid)])
            failed = any(self._processes[rank].exitcode for rank in gone)
            too_long = any(seconds >= self._timeout for seconds in stopped.values())
            if (failed or too_long) and patience_ends is None:
                self._stopped = set(stopped)
                patience = STOPPED_SECONDS if stopped else PATIENCE_SECONDS
                patience_ends = time.monotonic() + patience
                if not forwarding.number:
                    send_signal(running, signal.SIGTERM)
            deadline = forwarding.deadline(one_has_ended=len(running) < len(self._processes))
            if time.monotonic() > min(patience_ends or deadline, deadline):
                self._kill(running)
            elif patience_ends:
                self._kill({rank: running[rank] for rank in stopped})
        return [
            RankFailure(
                rank,
                process.pid,
                process.exitcode,
                Path(self._works[rank].environment[ERROR_FILE]),
                rank in self._ended,
                rank in self._stopped,
            )
            for rank, process in enumerate(self._processes)
            if process.exitcode
        ]

    def _kill(self, ranks: Mapping[int, Any]) -> None:
        self._ended |= set(ranks)
        send_signal(ranks, signal.SIGKILL)

    def end(self) -> None:
        """Kill what is left of the ranks, and forget them."""
        send_signal(self._running, signal.SIGKILL)
        for process in self._running.values():
            process.join()
        self._running.clear()
        self._processes.clear()


def log_of(logs: Path, rank: int) -> Path:
    """Return the file of what a rank prints, in the directory of the logs."""
    return logs / f"{rank}.log"


def remove_silent(logs: Path) -> None:
    """Remove the logs of ranks that have printed nothing, and the directory where none is left."""
    with suppress(OSError):
        for log in logs.glob("*.log"):
            if not log.stat().st_size:
                log.unlink()
        logs.rmdir()


def _make_empty(logs: Path) -> None:
    """Make the directory of logs; an earlier run has left its own there, maybe of more ranks."""
    logs.mkdir(parents=True, exist_ok=True)
    for pattern in ("*.log", f"*{ERROR_SUFFIX}"):
        for old in logs.glob(pattern):
            old.unlink()


def _with_error_file(work: Work, logs: Path) -> Work:
    path = logs / f"{work.environment['RANK']}{ERROR_SUFFIX}"
    return Work(work.module, work.config, {**work.environment, ERROR_FILE: str(path)})


def _start_process(context: BaseContext, process: Any) -> None:
    """Start a process. A fork server has its signals blocked, and so have those forked from it."""
    with without_main_module():
        if context.get_start_method() == "forkserver":
            process.start()  # waits for the server, and a signal ends that
            return
        resource_tracker.ensure_running()  # its first call unblocks signals
        with signals_blocked():
            process.start()


def _duplicate(descriptor: int) -> int:
    """Return a second descriptor of this process's standard output (1) or standard error (2); where
    a shell has closed it, one that takes everything and keeps nothing.
    """
    closed = (sys.__stdout__ if descriptor == 1 else sys.__stderr__) is None
    return os.open(os.devnull, os.O_WRONLY) if closed else os.dup(descriptor)


def _words(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
