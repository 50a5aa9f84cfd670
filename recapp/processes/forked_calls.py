"""A function that runs in forks of this process, one for each rank, and what they return.

    caller   call_in_forks([f, g])       waits for answers, prints what ranks print
      rank 0    f()  -> pickle -> pipe   its standard output and error are pipes to the caller
      rank 1    g()  -> pickle -> pipe

A fork has all that the caller has, so the functions may be those of a notebook's cells, and nothing
is imported again. What a fork has not are the caller's threads: a rank computes on one thread,
because it would wait for ever for those of OpenMP. Only results are pickled; ranks and caller are
one program, so reading them is no matter of trust. Ranks stay until all have answered, as the
others may still need them, and die with the caller.
"""

import math
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, NoReturn, TextIO, TypeVar

import torch
from setproctitle import setproctitle

from recapp.errors import LaunchError, RecappError
from recapp.processes.data_workers import die_with_parent, end_children
from recapp.processes.faults import explain_error
from recapp.processes.startup_and_exit import end_at_once, freeze_loaded_objects

SECONDS_TO_END = 5.0  # for ranks that have answered
SECONDS_FOR_THE_SOURCE = 2.0  # for the rank whose own error it is, where others fail for want of it
READ_BYTES = 1 << 16

Result = TypeVar("Result")


@dataclass(frozen=True)
class RaisedInRank:
    """What a rank sends where its function has raised something."""

    pickled: bytes | None
    """The exception; None where it cannot be pickled."""
    text: str
    """Its type and its text."""
    traceback: str
    secondhand: bool
    """Whether it only says that another rank has ended or is silent."""


class RankOutput:
    """What a rank writes on one of its streams, line by line on a stream of the caller.

    Args:
        descriptor: The end of the pipe that is read.
        stream: The stream of the caller.
    """

    def __init__(self, descriptor: int, stream: TextIO | None) -> None:
        self.descriptor = descriptor
        self._stream = stream
        self._begun = b""
        os.set_blocking(descriptor, False)

    def fileno(self) -> int:
        """Return the descriptor, by which it is waited for."""
        return self.descriptor

    def read(self) -> bool:
        """Print the lines that have come; return whether more may come."""
        while True:
            try:
                read = os.read(self.descriptor, READ_BYTES)
            except BlockingIOError:
                return True
            lines, end, self._begun = (self._begun + read).rpartition(b"\n")
            self._print(lines + end)
            if not read:
                self._print(self._begun)
                self._begun = b""
                return False

    def close(self) -> None:
        """Print what has come, a line that is not ended, too, and read no more."""
        if self.read():
            self._print(self._begun)
        os.close(self.descriptor)

    def _print(self, text: bytes) -> None:
        if text and self._stream is not None:  # a shell may have closed it
            self._stream.write(text.decode(errors="replace"))
            self._stream.flush()


class ForkedRank:
    """A fork of this process that calls a function and sends what it returns.

    Args:
        number: The number of the rank, for its name and for errors.
        world: The number of ranks.
        function: The function.
    """

    def __init__(self, number: int, world: int, function: Callable[[], Any]) -> None:
        self.name = f"rank {number} of {world}"
        self.answer: Any = None
        self.failed = False
        context = get_context("fork")
        self.pipe, there = context.Pipe()
        (out, err), ends = zip(os.pipe(), os.pipe(), strict=True)
        self.outputs = [RankOutput(out, sys.stdout), RankOutput(err, sys.stderr)]
        self.process: ForkProcess = context.Process(
            target=_be_rank, args=(self.name, function, there, ends)
        )
        with warnings.catch_warnings():  # of threads, which the fork does without
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        there.close()
        for end in ends:
            os.close(end)

    def take_answer(self) -> None:
        """Read what the rank has sent; where it has died instead, note how."""
        try:
            self.failed, sent = _unpickled(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join()
            self.failed = True
            sent = RaisedInRank(None, _how(self.process.exitcode), "", False)
        self.answer = sent

    def let_go(self) -> None:
        """Tell the rank that all have answered, so that it may end."""
        with suppress(OSError):  # it has ended already
            self.pipe.send_bytes(b"")

    def end(self) -> None:
        """End the process where it is still there, and print the rest of its output."""
        self.process.kill()
        self.process.join()
        for output in self.outputs:
            output.close()
        self.pipe.close()
        self.process.close()


def call_in_forks(
    functions: Sequence[Callable[[], Result]], timeout: float | None = None
) -> list[Result]:
    """Call each function in a fork of this process, all at the same time.

    Args:
        functions: What each rank calls.
        timeout: The seconds for all of it; None: as long as it takes.

    Returns:
        What the functions have returned, in their order.

    Raises:
        RecappError: A rank has raised it; its number stands before the text.
        LaunchError: A rank has raised something else, which is the cause; or one has died, or
            time was up.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # before what ranks print, and not once more by each of them
    ranks: list[ForkedRank] = []
    try:
        for number, function in enumerate(functions):
            ranks.append(ForkedRank(number, len(functions), function))
        _wait_for_answers(ranks, timeout)
        for rank in ranks:
            rank.let_go()
        _wait_for_end(ranks)
    finally:
        for rank in ranks:
            rank.end()
    return [rank.answer for rank in ranks]


def _wait_for_answers(ranks: Sequence[ForkedRank], timeout: float | None) -> None:
    """Wait until all ranks have answered; raise where one has failed or time is up."""
    end = time.monotonic() + (math.inf if timeout is None else timeout)
    waiting = {rank.pipe: rank for rank in ranks}
    outputs = {output for rank in ranks for output in rank.outputs}
    second: ForkedRank | None = None
    while waiting:
        left = None if end == math.inf else max(0.0, end - time.monotonic())
        both: list[Any] = [*waiting, *outputs]
        found: list[Any] = wait(both, left)
        for ready in found:
            if isinstance(ready, RankOutput):
                if not ready.read():
                    outputs.discard(ready)
                continue
            rank = waiting.pop(ready)
            rank.take_answer()
            if rank.failed and not rank.answer.secondhand:
                _raise_what(rank)
            if rank.failed and second is None:
                second = rank
                end = min(end, time.monotonic() + SECONDS_FOR_THE_SOURCE)
        if not found:
            break
    if second is not None:
        _raise_what(second)
    if waiting:
        names = " and ".join(rank.name for rank in waiting.values())
        raise LaunchError(
            f"timeout={timeout}: {names} took longer than these seconds; give more, or None"
        )


def _wait_for_end(ranks: Sequence[ForkedRank]) -> None:
    """Wait until ranks that have answered have ended by themselves, and print what they print."""
    end = time.monotonic() + SECONDS_TO_END
    waiting: set[Any] = {item for rank in ranks for item in (rank.process.sentinel, *rank.outputs)}
    while waiting and (found := wait(waiting, max(0.0, end - time.monotonic()))):
        for ready in found:
            if not isinstance(ready, RankOutput) or not ready.read():
                waiting.discard(ready)


def _raise_what(rank: ForkedRank) -> NoReturn:
    """Raise in the caller what a rank has raised: recapp's own errors as what they are."""
    raised: RaisedInRank = rank.answer
    cause = None
    with suppress(Exception):  # a class may take other arguments than it keeps
        cause = pickle.loads(raised.pickled) if raised.pickled else None
    if isinstance(cause, RecappError):
        error: RecappError = type(cause)(f"{rank.name}: {cause}")
    else:
        error = LaunchError(f"{rank.name} {raised.text}")
    if raised.traceback:
        error.add_note(f"in {rank.name}:\n{raised.traceback}")
    raise error from cause


def _unpickled(answer: bytes) -> tuple[bool, Any]:
    """Return what a rank has sent; what cannot be read is a failure of that rank."""
    try:
        failed, sent = pickle.loads(answer)
    except Exception as error:  # the class of a result may raise whatever it likes
        text = (
            f"returned what cannot be read here ({type(error).__name__}: {error}); return numbers, "
            "text, tensors, or lists and dicts of these"
        )
        return True, RaisedInRank(None, text, "", False)
    return failed, sent


def _how(code: int | None) -> str:
    """Return in words how a rank has ended without an answer."""
    if code is None or code >= 0:
        return f"ended with exit code {code} before its function returned"
    said = f"was ended by {signal.Signals(-code).name}"
    if code == -signal.SIGKILL:
        return f"{said}; the system does that to a process when memory runs out"
    if code == -signal.SIGTERM:
        return (
            f"{said}; GNU's OpenMP does that to a fork where it was used before the fork (in "
            "numba, NUMBA_THREADING_LAYER=workqueue does without it)"
        )
    return said


def _be_rank(
    name: str, function: Callable[[], Any], pipe: Connection, streams: tuple[int, int]
) -> NoReturn:
    """Call a function in a process that was just forked, send what it returns, and end."""
    die_with_parent()
    signal.set_wakeup_fd(-1)  # the caller's
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the caller ends its ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    inherited = _take_streams(streams)
    setproctitle(f"recapp.run_ranks {name}")
    freeze_loaded_objects()
    torch.set_num_threads(1)
    answer = _answer_of(name, function)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the function may have closed or replaced it
            stream.flush()
    with suppress(OSError, EOFError):  # the caller has gone
        pipe.send_bytes(answer)
        pipe.recv_bytes()
    end_children()
    del inherited
    end_at_once(0)


def _take_streams(streams: tuple[int, int]) -> list[Any]:
    """Make two pipes standard output and standard error.

    Returns:
        The streams of before: if they were forgotten here, they would write once more what the
        caller has not flushed.
    """
    inherited = [sys.stdout, sys.stderr]
    for number, descriptor in enumerate(streams, 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", buffering=1, closefd=False, errors="replace") for number in (1, 2)
    )
    return inherited


def _answer_of(name: str, function: Callable[[], Any]) -> bytes:
    """Return the pickle of whether a function has failed, and of what it has returned or raised."""
    try:
        result = function()
    except BaseException as error:  # sys.exit, too
        return pickle.dumps((True, _described(name, error)))
    try:
        return pickle.dumps((False, result))
    except Exception as error:
        text = (
            f"returned a {type(result).__name__}, which cannot be sent back ({error}); return "
            "numbers, text, tensors, or lists and dicts of these"
        )
        return pickle.dumps((True, RaisedInRank(None, text, "", False)))


def _described(name: str, error: BaseException) -> RaisedInRank:
    pickled = None
    with suppress(Exception):
        pickled = pickle.dumps(error)
    explained = explain_error(error, 0) if isinstance(error, Exception) else error
    return RaisedInRank(
        pickled,
        f"raised {type(error).__name__}: {error}",
        "".join(traceback.format_exception(error)),
        getattr(explained, "secondhand", False),
    )
