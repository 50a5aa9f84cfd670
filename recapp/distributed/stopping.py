"""How a rank is told to stop: by SIGINT, SIGTERM, SIGHUP or SIGQUIT, from whoever sends them.

    before training           nothing is lost: `Stopped` is raised where the main thread is
    in training               whoever listens is told (`recapp/trainer/ending.py`), and all ranks stop at the same step
    a second signal           the process ends at once
    no end after some seconds the process ends; a checkpoint that is being written has `launch.grace` seconds

A signal often arrives more than once: a scheduler signals every process of a job, and a launcher among them passes it on. So what
follows within a second of the first one is taken for the same.

A Python handler runs between two lines of the main thread, and a rank whose peers are gone may never come back from a collective.
The kernel's signal wakes a thread at once, which keeps the time and ends the process.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from recapp.distributed.data_workers import prepare_children

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
GRACE_SECONDS = 60.0  # launch.grace, where a stored configuration has none
SAME_SIGNAL_SECONDS = 1.0
SECONDS_BEFORE_TRAINING = 3.0  # for what cleans up after itself
SECONDS_TO_STOP = 8.0  # for the rest of a step and the summary
LOOK_SECONDS = 0.1


class Stopped(SystemExit):
    """A signal has ended the work of this process. The exit code is 128 + its number, as a shell reports it.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number

    def __str__(self) -> str:
        return signal.Signals(self.number).name


class _Told:
    """What this process has been told, and what it is doing."""

    def __init__(self) -> None:
        self.number = 0  # the first signal
        self.listener: Callable[[int], None] | None = None
        self.saving, self.saved_at = False, 0.0
        self.over = False
        self.grace = GRACE_SECONDS
        self.kept: dict[int, Any] = {}  # handlers to be put back by `stop_listening`

    def heard(self, number: int, frame: FrameType | None) -> None:
        """The handler: the first signal counts here, the watching thread sees to the second."""
        if self.number or self.over:
            return
        self.number = number
        if self.listener is None:
            raise Stopped(number)
        self.listener(number)

    def deadline(self, since: float) -> float:
        """Until when the process may go on after a first signal."""
        if self.listener is None:
            return since + SECONDS_BEFORE_TRAINING
        if self.saving:
            return since + self.grace
        return max(since, self.saved_at) + SECONDS_TO_STOP


_told = _Told()


@contextmanager
def stoppable() -> Iterator[None]:
    """While this lasts, signals that would end this process without a word raise `Stopped`: a run is marked, a lock is removed."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    taken = [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in taken:
            if signal.getsignal(number) == stop:
                signal.signal(number, signal.SIG_DFL)


def take_signals(tell: Callable[[BaseException], None]) -> None:
    """Take the signals from here to the end of the process, which is a rank.

    Args:
        tell: called with `Stopped` before the process ends without a word of its main thread.
    """
    _take()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    prepare_children(SIGNALS)
    threading.Thread(target=_watch, args=(reading, tell), name="end after a signal", daemon=True).start()


def _take() -> None:
    for number in SIGNALS:
        if not (number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN):  # nohup
            signal.signal(number, _told.heard)


def _watch(reading: int, tell: Callable[[BaseException], None]) -> None:
    first, since = 0, 0.0
    while True:
        select.select([reading], [], [], LOOK_SECONDS if first else None)
        now = time.monotonic()
        numbers = [number for number in _pending(reading) if number in SIGNALS]
        if not first and numbers:
            first, since = numbers[0], now
        again = numbers and now - since > SAME_SIGNAL_SECONDS and not _told.over
        if first and (again or now > _told.deadline(since)):
            tell(Stopped(first))
            os._exit(128 + first)


def _pending(reading: int) -> bytes:
    return os.read(reading, 64) if select.select([reading], [], [], 0)[0] else b""


def listen(listener: Callable[[int], None], grace: float | None = None) -> None:
    """Have the first signal from now on told to a function, instead of `Stopped` being raised.

    Args:
        listener: called in the main thread, between any two lines of it, with the signal's number.
        grace: seconds after it for a checkpoint that is being written.
    """
    if signal.getsignal(signal.SIGTERM) != _told.heard:
        _told.kept = {number: signal.getsignal(number) for number in SIGNALS}
        _take()
    _told.listener, _told.number = listener, 0
    _told.grace = _told.grace if grace is None else grace


def stop_listening() -> None:
    """Put back the handlers that were there before `listen`; in a rank, which has taken the signals for good, nothing changes."""
    if _told.kept:
        for number, handler in _told.kept.items():
            signal.signal(number, handler)
        _told.kept, _told.listener = {}, None


@contextmanager
def saving() -> Iterator[None]:
    """While this lasts, a checkpoint is written: the process has `launch.grace` seconds after a signal."""
    _told.saving = True
    try:
        yield
    finally:
        _told.saving, _told.saved_at = False, time.monotonic()


def disregard_signals() -> None:
    """All is done that a signal could ask for: the process is about to end by itself."""
    _told.over = True
