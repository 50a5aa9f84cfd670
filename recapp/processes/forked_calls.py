"""Call functions in forks of this process, one for each rank, and return the results.

    caller   call_in_forks([f, g])       waits for answers, prints the output of the ranks
      rank 0    f()  -> pickle -> pipe   its standard output and error are pipes to the caller
      rank 1    g()  -> pickle -> pipe

A fork has all objects of the caller, so a notebook's cell may define the functions, and no module
is imported again. But a fork lacks the caller's threads: a rank computes on one thread, because it
would wait for ever for the threads of OpenMP. Only results are pickled. Ranks and caller are one
program, so it is safe to unpickle them. A rank stays until all have answered, because other ranks
may still need it, and it dies with the caller.
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
from recapp.processes.faults import explain_error
from recapp.processes.start_and_end import (
    die_with_parent,
    end_at_once,
    end_children,
    freeze_loaded_objects,
)

SECONDS_TO_END = 5.0  # for ranks that have answered
SECONDS_FOR_THE_SOURCE = 2.0  # for the rank with an error of its own, after a peer that lost it
READ_BYTES = 1 << 16

Result = TypeVar("Result")


@dataclass(frozen=True)
class RaisedInRank:
    """The answer of a rank whose function has raised an exception.

    Args:
        text: The exception's type and text.
        pickled: The exception; None where it cannot be pickled.
        traceback: Its traceback.
        secondhand: Whether it only reports that another rank has ended or is silent.
    """

    text: str
    pickled: bytes | None = None
    traceback: str = ""
    secondhand: bool = False


class RankOutput:
    """The output of a rank on one of its streams. The caller prints it line by line.

    Args:
        descriptor: The read end of the pipe.
        stream: The stream of the caller.
    """

    def __init__(self, descriptor: int, stream: TextIO | None) -> None:
        self.descriptor = descriptor
        self._stream = stream
        self._begun = b""
        os.set_blocking(descriptor, False)

    def fileno(self) -> int:
        """Return the descriptor, so that `wait` can wait for this output."""
        return self.descriptor

    def read(self) -> bool:
        """Print the lines that have arrived, and return whether more may arrive."""
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
        """Print the rest, with a last line that has no end, and close the pipe."""
        if self.read():
            self._print(self._begun)
        os.close(self.descriptor)

    def _print(self, text: bytes) -> None:
        if text and self._stream is not None:  # a shell may have closed it
            self._stream.write(text.decode(errors="replace"))
            self._stream.flush()


class ForkedRank:
    """A fork of this process that calls a function and sends its result.

    Args:
        number: The number of the rank, for its name and for errors.
        world: The number of ranks.
        function: The function.
    """

    def __init__(self, number: int, world: int, function: Callable[[], Any]) -> None:
        self.name = f"rank {number} of {world}"
        self.answer: Any = None
        context = get_context("fork")
        self.pipe, there = context.Pipe()
        (out, err), ends = zip(os.pipe(), os.pipe(), strict=True)
        self.outputs = [RankOutput(out, sys.stdout), RankOutput(err, sys.stderr)]
        self.process: ForkProcess = context.Process(
            target=_be_rank, args=(self.name, function, there, ends)
        )
        with warnings.catch_warnings():  # Python warns of threads, which the fork does not need
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        there.close()
        for end in ends:
            os.close(end)

    def take_answer(self) -> None:
        """Read the answer of the rank; if the rank has died, its exit is the answer."""
        try:
            self.answer = _unpickled(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join()
            self.answer = RaisedInRank(_how(self.process.exitcode))

    def end(self) -> None:
        """Kill the process if it still runs, and print the rest of its output."""
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
    ranks: list[ForkedRank] = []
    try:
        for number, function in enumerate(functions):
            ranks.append(ForkedRank(number, len(functions), function))
        _wait_for_answers(ranks, timeout)
        for rank in ranks:
            with suppress(OSError):  # the rank has ended already
                rank.pipe.send_bytes(b"")  # all have answered, so it may end
        _wait_for_end(ranks)
    finally:
        for rank in ranks:
            rank.end()
    return [rank.answer for rank in ranks]


def _wait_for_answers(ranks: Sequence[ForkedRank], timeout: float | None) -> None:
    """Wait until all ranks have answered; raise if one has failed or the time is up."""
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
            failed = isinstance(rank.answer, RaisedInRank)
            if failed and not rank.answer.secondhand:
                _raise_what(rank)
            if failed and second is None:
                second = rank
                end = min(end, time.monotonic() + SECONDS_FOR_THE_SOURCE)
        if not found:
            break
    if second is not None:
        _raise_what(second)
    if waiting:
        names = " and ".join(rank.name for rank in waiting.values())
        raise LaunchError(
            f"timeout={timeout}: {names} took longer; give more seconds, or None for no limit"
        )


def _wait_for_end(ranks: Sequence[ForkedRank]) -> None:
    """Wait until ranks that have answered end by themselves, and print their output."""
    end = time.monotonic() + SECONDS_TO_END
    waiting: set[Any] = {item for rank in ranks for item in (rank.process.sentinel, *rank.outputs)}
    while waiting and (found := wait(waiting, max(0.0, end - time.monotonic()))):
        for ready in found:
            if not isinstance(ready, RankOutput) or not ready.read():
                waiting.discard(ready)


def _raise_what(rank: ForkedRank) -> NoReturn:
    """Raise the exception of a rank in the caller: an error of recapp in its own class, any other
    as the cause of a `LaunchError`.
    """
    raised: RaisedInRank = rank.answer
    cause = None
    with suppress(Exception):  # unpickling fails if `__init__` takes other arguments than `args`
        cause = pickle.loads(raised.pickled) if raised.pickled else None
    if isinstance(cause, RecappError):
        error: RecappError = type(cause)(f"{rank.name}: {cause}")
    else:
        error = LaunchError(f"{rank.name} {raised.text}")
    if raised.traceback:
        error.add_note(f"in {rank.name}:\n{raised.traceback}")
    raise error from cause


def _unpickled(answer: bytes) -> Any:
    """Return the result of a rank, or a `RaisedInRank`. An answer that cannot be unpickled is a
    failure of the rank.
    """
    try:
        return pickle.loads(answer)
    except Exception as error:  # the class of a result may raise any exception
        text = (
            f"returned what cannot be read here ({type(error).__name__}: {error}); return numbers, "
            "text, tensors, or lists and dicts of these"
        )
        return RaisedInRank(text)


def _how(code: int | None) -> str:
    """Return words for the end of a rank that sent no answer."""
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
    """Call a function in a new fork, send its result, and end the process."""
    die_with_parent()
    signal.set_wakeup_fd(-1)  # the descriptor belongs to the caller
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C, the caller ends its ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    inherited = _take_streams(streams)
    setproctitle(f"recapp.run_ranks {name}")
    freeze_loaded_objects()
    torch.set_num_threads(1)
    answer = _answer_of(function)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the function may have closed or replaced it
            stream.flush()
    with suppress(OSError, EOFError):  # the caller has ended
        pipe.send_bytes(answer)
        pipe.recv_bytes()
    end_children()
    del inherited
    end_at_once(0)


def _take_streams(streams: tuple[int, int]) -> list[Any]:
    """Make two pipes standard output and standard error.

    Returns:
        The former streams. Keep them until the end: deleted earlier, they would write text that the
        caller has not flushed a second time.
    """
    inherited = [sys.stdout, sys.stderr]
    for number, descriptor in enumerate(streams, 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", buffering=1, closefd=False, errors="replace") for number in (1, 2)
    )
    return inherited


def _answer_of(function: Callable[[], Any]) -> bytes:
    """Call a function, and return the pickle of its result or of a `RaisedInRank`."""
    try:
        result = function()
    except BaseException as error:  # includes `sys.exit`
        return pickle.dumps(_described(error))
    try:
        return pickle.dumps(result)
    except Exception as error:
        text = (
            f"returned a {type(result).__name__}, which cannot be sent back ({error}); return "
            "numbers, text, tensors, or lists and dicts of these"
        )
        return pickle.dumps(RaisedInRank(text))


def _described(error: BaseException) -> RaisedInRank:
    pickled = None
    with suppress(Exception):
        pickled = pickle.dumps(error)
    explained = explain_error(error, 0) if isinstance(error, Exception) else error
    return RaisedInRank(
        f"raised {type(error).__name__}: {error}",
        pickled,
        "".join(traceback.format_exception(error)),
        getattr(explained, "secondhand", False),
    )
