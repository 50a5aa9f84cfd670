"""How a rank is told to stop: by SIGINT, SIGTERM, SIGHUP or SIGQUIT, from whoever sends them.

    a command is imported     nothing is held: it says one line and ends where it is
    before training           nothing is lost: `Stopped` is raised where the main thread is; of an
                              import, at its end
    in training               whoever listens is told (`recapp/trainer/ending.py`), and all ranks
                              stop at the same step
    a second signal           the process ends at once
    no end after some seconds the process ends; a checkpoint that is being written has
                              `launch.grace` seconds

An exception that a handler raises can get lost: many a library takes whatever an import raises for
the absence of a module, others raise something else on their way out. So the number is kept, and
`heeding` raises `Stopped` whatever has become of the handler's exception.

A signal often arrives more than once: a scheduler signals every process of a job, and a launcher
among them passes it on. So what follows within a second of the first one is taken for the same.

A Python handler runs between two lines of the main thread, and a rank whose peers are gone may
never come back from a collective. The kernel's signal wakes a thread at once, which keeps the time
and ends the process.
"""

import os
import select
import signal
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
SECONDS_BEFORE_TRAINING = 3.0  # for what cleans up after itself
SECONDS_TO_STOP = 8.0  # for the rest of a step and the summary
LOOK_SECONDS = 0.1
# of the functions that import a module, as tracebacks name it
IMPORT_SYSTEM = "<frozen importlib._bootstrap>"


class Stopped(SystemExit):
    """A signal has ended the work of this process. The exit code is 128 + its number, as a shell
    reports it.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number

    def __str__(self) -> str:
        return signal.Signals(self.number).name


def in_words(number: int) -> str:
    """What is said of a run that a signal has ended."""
    return "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"


class _Told:
    """What this process has been told, and what it is doing."""

    def __init__(self) -> None:
        # the first signal, and when it came
        self.number = 0
        self.since = 0.0
        self.raises = False  # `Stopped`, as soon as nothing is imported
        self.holds = False  # a job's directory: `stoppable`
        self.tell: Callable[[BaseException], None] = lambda error: None  # `take_signals`
        self.listener: Callable[[int], None] | None = None
        self.saving = False
        self.saved_at = 0.0
        self.over = False
        self.grace = GRACE_SECONDS
        self.kept: dict[int, Any] = {}  # handlers to be put back by `stop_listening`

    def heard(self, number: int, frame: FrameType | None) -> None:
        """The handler: the first signal counts here, the watching thread sees to the second."""
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
        """Raise `Stopped`. While a module is imported, look again soon: half of one is of no
        use.
        """
        if not self.raises:
            return
        if not _imports(frame):
            self.stop()
        if not self.holds:  # there is nothing to clean up, and torch takes seconds to import
            self.end(self.number)
        signal.signal(signal.SIGALRM, lambda _, frame: self._raise_after_imports(frame))
        # not a thread: the main one may hold the lock under which threads are started
        signal.setitimer(signal.ITIMER_REAL, LOOK_SECONDS)

    def end(self, number: int) -> NoReturn:
        self.tell(Stopped(number))
        os._exit(128 + number)

    def stop(self) -> NoReturn:
        self.raises = False
        raise Stopped(self.number)

    def deadline(self, since: float) -> float:
        """Until when the process may go on after a first signal."""
        if self.listener is None:
            return since + SECONDS_BEFORE_TRAINING
        if self.saving:
            return since + self.grace
        return max(since, self.saved_at) + SECONDS_TO_STOP


_told = _Told()


def _imports(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == IMPORT_SYSTEM:
            return True
        frame = frame.f_back
    return False


def end_on_signals() -> None:
    """From here on a signal ends this process at once, with one line.

    For the first lines of a command, which holds nothing yet; never for what is imported as a
    library.
    """
    for number in _deadly():
        signal.signal(number, _end)


def _deadly() -> list[int]:
    """The signals that would end this process without a word, or with a traceback."""
    return [
        number
        for number in SIGNALS
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler, _end)
    ]


def _end(number: int, frame: FrameType | None) -> NoReturn:
    with suppress(OSError):
        os.write(2, f"{in_words(number)}\n".encode())  # `print` may be where the signal has come
    os._exit(128 + number)


@contextmanager
def stoppable() -> Iterator[None]:
    """While this lasts, signals that would end this process raise `Stopped`: a run is marked, a
    lock is removed. A second one, after more than a second, ends the process at once.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        if _told.number and time.monotonic() - _told.since > SAME_SIGNAL_SECONDS:
            _end(_told.number, frame)
        _told.heard(number, frame)

    taken = {number: signal.getsignal(number) for number in _deadly()}
    try:
        _told.holds = True
        for number in taken:
            signal.signal(number, stop)
        with heeding():
            yield
    finally:
        _told.holds = False
        for number, handler in taken.items():
            if signal.getsignal(number) == stop:  # else this process has become a rank
                signal.signal(number, handler)
                _told.number = 0
                _told.raises = False


@contextmanager
def heeding() -> Iterator[None]:
    """Raise `Stopped` at both ends of this where a signal has come, whatever its exception
    became.
    """
    heed()
    try:
        yield
    except Exception:
        heed()
        raise
    heed()


def heed() -> None:
    """Raise `Stopped` where a signal has come, unless training has been told of it."""
    if _told.number and _told.listener is None:
        _told.stop()


def take_signals(tell: Callable[[BaseException], None]) -> None:
    """Take the signals from here to the end of the process, which is a rank.

    Args:
        tell: called with `Stopped` before the process ends without a word of its main thread.
    """
    _told.tell = tell
    _take()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    prepare_children(SIGNALS)
    threading.Thread(target=_watch, args=(reading,), name="end after a signal", daemon=True).start()


def _take() -> None:
    for number in SIGNALS:
        if not (number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN):  # nohup
            signal.signal(number, _told.heard)


def _watch(reading: int) -> None:
    first = 0
    since = 0.0
    while True:
        select.select([reading], [], [], LOOK_SECONDS if first else None)
        now = time.monotonic()
        numbers = [number for number in _pending(reading) if number in SIGNALS]
        if not first and numbers:
            first = numbers[0]
            since = now
        again = numbers and now - since > SAME_SIGNAL_SECONDS and not _told.over
        if first and (again or now > _told.deadline(since)):
            _told.end(first)


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
    _told.listener = listener
    _told.number = 0
    _told.grace = _told.grace if grace is None else grace


def stop_listening() -> None:
    """Put back the handlers that were there before `listen`; in a rank, which has taken the signals
    for good, nothing changes.
    """
    if _told.kept:
        for number, handler in _told.kept.items():
            signal.signal(number, handler)
        _told.kept = {}
        _told.listener = None
        _told.number = 0


@contextmanager
def saving() -> Iterator[None]:
    """While this lasts, a checkpoint is written: the process has `launch.grace` seconds after a
    signal.
    """
    _told.saving = True
    try:
        yield
    finally:
        _told.saving = False
        _told.saved_at = time.monotonic()


def disregard_signals() -> None:
    """All is done that a signal could ask for: the process is about to end by itself."""
    _told.over = True
