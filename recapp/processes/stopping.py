"""How a process stops after a signal: SIGINT, SIGTERM, SIGHUP or SIGQUIT, from whoever sends it.

    a command is imported     nothing is held: it prints one line and ends where it is
    before training           nothing is lost: `Stopped` is raised where the main thread is; during
                              an import, a `__del__` or the end of a generator, after that
    in training               the listener is called (`recapp/trainer/ending.py`), and all ranks
                              stop at the same step
    a second signal           the process ends at once
    no end after some seconds the process ends; a checkpoint that is being written has
                              `launch.grace` seconds

An exception that a handler raises can get lost: many a library takes whatever an import raises for
the absence of a module, others raise something else on their way out. So the signal's number is
kept, and `raising_if_stopped` raises `Stopped` even if the handler's exception got lost.

A signal often arrives more than once: a scheduler signals every process of a job, and a launcher
among them passes it on. So one that follows within a second of the first is taken for the first.

A Python handler runs between two lines of the main thread, and a rank whose peers are gone may
never come back from a collective. The kernel's signal wakes a thread at once, which keeps the time
and ends the process.
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from recapp.processes.data_workers import prepare_children

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
GRACE_SECONDS = 60.0  # launch.grace, where a stored configuration has none
SAME_SIGNAL_SECONDS = 1.0
SECONDS_BEFORE_TRAINING = 3.0  # to clean up, where training has not begun
SECONDS_TO_STOP = 8.0  # for the rest of a step and the summary
LOOK_SECONDS = 0.1
# the file of the functions that import a module, as tracebacks name it
IMPORT_SYSTEM = "<frozen importlib._bootstrap>"


class Stopped(SystemExit):
    """A signal has ended the work of this process.

    The exit code is 128 + the signal's number, as a shell reports it.

    Args:
        number: The number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number

    def __str__(self) -> str:
        return signal.Signals(self.number).name


def describe_stop(number: int) -> str:
    """Return how a signal has ended a run, in words: `interrupted`, `stopped by SIGTERM`."""
    return "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"


class _SignalState:
    """The signal that has come to this process, and what the process is doing."""

    def __init__(self) -> None:
        # the first signal (0 before), and when it came
        self.number = 0
        self.since = 0.0
        self.raises = False  # whether to raise `Stopped` as soon as nothing is imported
        self.holds = False  # whether a job's directory is held (`stoppable`)
        self.report: Callable[[BaseException], None] = lambda error: None  # of `take_signals`
        self.listener: Callable[[int], None] | None = None
        self.saving = False  # whether a checkpoint is being written
        self.saved_at = 0.0
        self.over = False  # whether signals are disregarded
        self.grace = GRACE_SECONDS
        self.seconds_to_stop = SECONDS_TO_STOP
        self.kept: dict[int, Any] = {}  # handlers to be put back by `stop_listening`

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: the first one counts here, the watching thread sees to the second."""
        if self.number or self.over:
            return
        self.number = number
        self.since = time.monotonic()
        if self.listener is not None:
            self.listener(number)
            return
        self.raises = True
        self._raise_after_imports(frame)

    def _raise_after_imports(self, frame: FrameType | None) -> None:
        """Raise `Stopped`, or try again soon: while a module is imported, because one that is half
        imported is of no use to whoever imports it next, and in a `__del__` or a generator that is
        deleted, from which Python prints an exception and drops it.
        """
        if not self.raises:
            return
        if not _imports_or_deletes(frame) and not _closes_a_generator():
            self.stop()
        if not self.holds:  # there is nothing to clean up, and torch takes seconds to import
            self.end(self.number)
        signal.signal(signal.SIGALRM, lambda _, frame: self._raise_after_imports(frame))
        # not a thread: the main one may hold the lock under which threads are started
        signal.setitimer(signal.ITIMER_REAL, LOOK_SECONDS)

    def end(self, number: int) -> NoReturn:
        """Report that a signal ends this process, and end it at once."""
        self.report(Stopped(number))
        os._exit(128 + number)

    def stop(self) -> NoReturn:
        """Raise `Stopped` for the signal that has come."""
        self.raises = False
        raise Stopped(self.number)

    def deadline(self, since: float) -> float:
        """Return until when the process may go on after a first signal that came at `since`."""
        if self.listener is None:
            return since + SECONDS_BEFORE_TRAINING
        if self.saving:
            return since + self.grace
        return max(since, self.saved_at) + self.seconds_to_stop


_state = _SignalState()


def _imports_or_deletes(frame: FrameType | None) -> bool:
    """Return whether a module is imported or an object deleted in this frame or one of its
    callers.
    """
    while frame is not None:
        if frame.f_code.co_filename == IMPORT_SYSTEM or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _closes_a_generator() -> bool:
    """Return whether the main thread, whose signal handler calls this, is in the `finally` or the
    end of a `with` of a generator that is closed. Python closes one that is deleted, and no frame
    tells that from a generator that yields.
    """
    error = sys.exception()
    while error is not None and not isinstance(error, GeneratorExit):
        error = error.__context__
    return error is not None


def end_on_signals() -> None:
    """Have a signal end this process at once, with one line, from here on.

    For the first lines of a command, which holds nothing yet; never call it where a module is
    imported as a library.
    """
    for number in _deadly():
        signal.signal(number, _end)


def _deadly() -> list[int]:
    """Return the signals that would end this process without a message, or with a traceback."""
    return [
        number
        for number in SIGNALS
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler, _end)
    ]


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Print one line on a signal and end the process at once."""
    with suppress(OSError):  # not `print`, inside which the signal may have come
        os.write(2, f"{describe_stop(number)}\n".encode())
    os._exit(128 + number)


@contextmanager
def stoppable() -> Iterator[None]:
    """Have signals that would end this process raise `Stopped` inside the `with`.

    So a run can be marked as stopped and its lock removed. A second signal, after more than a
    second, ends the process at once.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        if _state.number and time.monotonic() - _state.since > SAME_SIGNAL_SECONDS:
            _end(_state.number, frame)
        _state.on_signal(number, frame)

    taken = {number: signal.getsignal(number) for number in _deadly()}
    try:
        _state.holds = True
        for number in taken:
            signal.signal(number, stop)
        with raising_if_stopped():
            yield
    finally:
        _state.holds = False
        for number, handler in taken.items():
            if signal.getsignal(number) == stop:  # else this process has become a rank
                signal.signal(number, handler)
                _state.number = 0
                _state.raises = False


@contextmanager
def raising_if_stopped() -> Iterator[None]:
    """Raise `Stopped` at both ends of the `with` where a signal has come.

    It does so whatever has become of the exception that the handler raised.
    """
    raise_if_stopped()
    try:
        yield
    except Exception:
        raise_if_stopped()
        raise
    raise_if_stopped()


def raise_if_stopped() -> None:
    """Raise `Stopped` where a signal has come, unless a listener has been called with it."""
    if _state.number and _state.listener is None:
        _state.stop()


def take_signals(report: Callable[[BaseException], None]) -> None:
    """Handle the signals from here to the end of the process, which is a rank.

    Args:
        report: Called with `Stopped` before the process ends without its main thread.
    """
    _state.report = report
    _take()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    prepare_children(SIGNALS)
    threading.Thread(target=_watch, args=(reading,), name="end after a signal", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # a launched rank is born with them blocked


def _take() -> None:
    for number in SIGNALS:
        if not (number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN):  # nohup
            signal.signal(number, _state.on_signal)


def _watch(reading: int) -> None:
    """End the process after a second signal, or when the time after the first one is over.

    Args:
        reading: The end of the pipe into which the kernel's signals are written.
    """
    first = 0
    since = 0.0
    while True:
        select.select([reading], [], [], LOOK_SECONDS if first else None)
        now = time.monotonic()
        numbers = [number for number in _pending(reading) if number in SIGNALS]
        if not first and numbers:
            first = numbers[0]
            since = now
        again = numbers and now - since > SAME_SIGNAL_SECONDS and not _state.over
        if first and (again or now > _state.deadline(since)):
            _state.end(first)


def _pending(reading: int) -> bytes:
    return os.read(reading, 64) if select.select([reading], [], [], 0)[0] else b""


def listen(
    listener: Callable[[int], None],
    grace: float | None = None,
    seconds_to_stop: float | None = None,
) -> None:
    """Have the first signal from now on call a function instead of raising `Stopped`.

    Args:
        listener: Called with the signal's number in the main thread, between any two of its lines.
        grace: The seconds after the signal for a checkpoint that is being written.
        seconds_to_stop: The seconds after it for what is being done otherwise; None: those for a
            training step and the summary.
    """
    if signal.getsignal(signal.SIGTERM) != _state.on_signal:
        _state.kept = {number: signal.getsignal(number) for number in SIGNALS}
        _take()
    _state.listener = listener
    _state.number = 0
    _state.grace = _state.grace if grace is None else grace
    _state.seconds_to_stop = SECONDS_TO_STOP if seconds_to_stop is None else seconds_to_stop


def stop_listening() -> None:
    """Put back the handlers that were there before `listen`.

    In a rank, which handles the signals to its end, nothing changes.
    """
    if _state.kept:
        for number, handler in _state.kept.items():
            signal.signal(number, handler)
        _state.kept = {}
        _state.listener = None
        _state.number = 0


@contextmanager
def saving() -> Iterator[None]:
    """Mark that a checkpoint is being written inside the `with`.

    The process then has `launch.grace` seconds after a signal.
    """
    _state.saving = True
    try:
        yield
    finally:
        _state.saving = False
        _state.saved_at = time.monotonic()


def disregard_signals() -> None:
    """Let signals have no effect from now on: the process is about to end by itself."""
    _state.over = True
