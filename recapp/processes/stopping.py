"""Start, stop and end a process: a rank, a command, a data worker.

A signal (SIGINT, SIGTERM, SIGHUP or SIGQUIT, from any sender) stops it:

    imports of a command      the process holds no run: it prints one line and ends at once
    before training           the handler raises `Stopped` in the main thread; during an import, a
                              `__del__` or the end of a generator, it waits for the end of that
    in training               the handler calls the listener (`EndTogether`), and all ranks stop at
                              the same step
    a second signal           the process ends at once
    no end after some seconds the process ends; a checkpoint that is being written has
                              `launch.grace` seconds

The exception of a handler can get lost: many libraries take any exception of an import for a
missing module, and others raise a different exception as they clean up. So the handler keeps the
signal's number, and `raising_if_stopped` raises `Stopped` even if the handler's exception got lost.

A signal often arrives more than once: a scheduler signals every process of a job, and a launcher
among them passes its signal on. So a signal within a second of the first one counts as the same.

A Python handler runs between two lines of the main thread, and a rank whose peers have ended may
never return from a collective. So the kernel's signal also wakes a thread at once, which measures
the time and ends the process.

Loading torch and Lightning makes hundreds of thousands of objects that stay. The garbage collector
visits these objects again and again, which takes a fifth of the loading time. At the end of a
process, the interpreter deletes all of them, although the system takes the memory back anyway: that
costs a rank one second.

Data workers, of a user's own `DataLoader`, belong to their rank: they ignore signals, and end when
the rank ends. `DataLoader` forks the workers, so a signal to a process group reaches them too. A
worker that died of the signal would leave its rank without batches before the step at which all
ranks stop.
"""

import atexit
import ctypes
import gc
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
GRACE_SECONDS = 60.0  # launch.grace, where stored settings have none
SAME_SIGNAL_SECONDS = 1.0
SECONDS_BEFORE_TRAINING = 3.0  # to clean up before training has begun
SECONDS_TO_STOP = 8.0  # for the rest of a step and the summary
LOOK_SECONDS = 0.1
# the file name that tracebacks give for Python's import functions
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
    """Return words for the end of a run by a signal: `interrupted`, `stopped by SIGTERM`."""
    return "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"


class _SignalState:
    """The signal that this process has received, and the work that the process does."""

    def __init__(self) -> None:
        # the first signal (0 before) and its time
        self.number = 0
        self.since = 0.0
        self.raises = False  # whether to raise `Stopped` after imports that are in progress
        self.holds = False  # whether the process holds a job's directory (`stoppable`)
        self.report: Callable[[BaseException], None] = lambda error: None  # set by `take_signals`
        self.listener: Callable[[int], None] | None = None
        self.saving = False  # whether a checkpoint is being written
        self.saved_at = 0.0
        self.over = False  # whether the process ignores signals
        self.grace = GRACE_SECONDS
        self.seconds_to_stop = SECONDS_TO_STOP
        self.kept: dict[int, Any] = {}  # handlers that `stop_listening` restores

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle the first signal. The watching thread handles a second one."""
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
        """Raise `Stopped`, or try again soon where an exception would do harm.

        That is so in an import, because a module that is half imported breaks its next import; in a
        `__del__` or the end of a deleted generator, because Python prints an exception there and
        drops it; and where LLVM loads a kernel by callbacks, because Python drops an exception
        there, too, and the kernel's memory is then read unloaded.
        """
        if not self.raises:
            return
        if not _imports_or_deletes(frame) and not _closes_a_generator():
            self.stop()
        if not self.holds:  # nothing needs cleaning up, and the import of torch takes seconds
            self.end(self.number)
        signal.signal(signal.SIGALRM, lambda _, frame: self._raise_after_imports(frame))
        # not a thread: the main thread may hold the lock that the start of a thread needs
        signal.setitimer(signal.ITIMER_REAL, LOOK_SECONDS)

    def end(self, number: int) -> NoReturn:
        """Report the signal, and end this process at once."""
        self.report(Stopped(number))
        os._exit(128 + number)

    def stop(self) -> NoReturn:
        """Raise `Stopped` for the received signal."""
        self.raises = False
        raise Stopped(self.number)

    def deadline(self, since: float) -> float:
        """Return the time at which the process must have ended after a first signal at `since`."""
        if self.listener is None:
            return since + SECONDS_BEFORE_TRAINING
        if self.saving:
            return since + self.grace
        return max(since, self.saved_at) + self.seconds_to_stop


_state = _SignalState()


def _imports_or_deletes(frame: FrameType | None) -> bool:
    """Return whether this frame or one of its callers imports a module, deletes an object, or loads
    a kernel.
    """
    while frame is not None:
        if (
            frame.f_code.co_filename == IMPORT_SYSTEM
            or frame.f_code.co_name == "__del__"
            or str(frame.f_globals.get("__name__")).startswith("llvmlite.")
        ):
            return True
        frame = frame.f_back
    return False


def _closes_a_generator() -> bool:
    """Return whether the main thread is closing a generator: it runs a `finally` or the end of a
    `with` there. The signal handler calls this function.

    Python closes a generator that is deleted, and no frame distinguishes that from a generator that
    yields; the `GeneratorExit` in flight does.
    """
    error = sys.exception()
    while error is not None and not isinstance(error, GeneratorExit):
        error = error.__context__
    return error is not None


def end_on_signals() -> None:
    """Make a signal end this process at once, with one line.

    Call this in the first lines of a command, which holds no run yet, and never in a module that
    others import as a library.
    """
    for number in _deadly():
        signal.signal(number, _end)


def _deadly() -> list[int]:
    """Return the signals whose handler would end this process at once: those of the system and of
    Python, and `_end`.
    """
    return [
        number
        for number in SIGNALS
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler, _end)
    ]


def _end(number: int, frame: FrameType | None) -> NoReturn:
    with suppress(OSError):  # not `print`: the signal may have interrupted a `print`
        os.write(2, f"{describe_stop(number)}\n".encode())
    os._exit(128 + number)


@contextmanager
def stoppable() -> Iterator[None]:
    """Make signals that would end this process raise `Stopped` inside the `with`.

    So the caller can mark a run as stopped and remove its lock. A second signal, more than a second
    later, ends the process at once.
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
    """Raise `Stopped` at the start or the end of the `with` if a signal has arrived, even if the
    exception of the handler got lost.
    """
    raise_if_stopped()
    try:
        yield
    except Exception:
        raise_if_stopped()
        raise
    raise_if_stopped()


def raise_if_stopped() -> None:
    """Raise `Stopped` if a signal has arrived, unless a listener handles signals."""
    if _state.number and _state.listener is None:
        _state.stop()


def take_signals(report: Callable[[BaseException], None]) -> None:
    """Handle signals until the end of this process, which is a rank.

    Args:
        report: A function that gets `Stopped` before another thread than the main one ends the
            process.
    """
    _state.report = report
    _take()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    prepare_children(SIGNALS)
    threading.Thread(target=_watch, args=(reading,), name="end after a signal", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # a launched rank starts with them blocked


def _take() -> None:
    for number in SIGNALS:
        if not (number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN):  # nohup
            signal.signal(number, _state.on_signal)


def _watch(reading: int) -> None:
    """End the process after a second signal, or when the time after the first signal is over.

    Args:
        reading: The read end of the pipe that gets the numbers of the signals.
    """
    first = 0
    since = 0.0
    while True:
        select.select([reading], [], [], LOOK_SECONDS if first else None)
        now = time.monotonic()
        arrived = os.read(reading, 64) if select.select([reading], [], [], 0)[0] else b""
        numbers = [number for number in arrived if number in SIGNALS]
        if not first and numbers:
            first = numbers[0]
            since = now
        again = numbers and now - since > SAME_SIGNAL_SECONDS and not _state.over
        if first and (again or now > _state.deadline(since)):
            _state.end(first)


def listen(
    listener: Callable[[int], None],
    grace: float | None = None,
    seconds_to_stop: float | None = None,
) -> None:
    """Make the next signal call a function instead of raising `Stopped`.

    Args:
        listener: A function that gets the signal's number. The main thread calls it between any two
            of its lines.
        grace: The seconds after the signal for a checkpoint that is being written.
        seconds_to_stop: The seconds after the signal for any other work; None: the time of a
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
    """Restore the handlers from before `listen`.

    Nothing changes in a rank, which handles signals to its end.
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
    """Ignore all later signals: the process is about to end by itself."""
    _state.over = True


# ---- start and end

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def prepare_children(signals: Sequence[int]) -> None:
    """Make each later fork of this process behave as a data worker.

    Args:
        signals: The signals that the forks ignore.
    """

    def in_child() -> None:
        signal.set_wakeup_fd(-1)
        for number in signals:
            signal.signal(number, signal.SIG_IGN)
        die_with_parent()

    os.register_at_fork(after_in_child=in_child)


def end_children() -> None:
    """Kill the data workers that still run."""
    from multiprocessing import active_children

    for child in active_children():
        with suppress(OSError, ValueError):
            child.kill()


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Make the kernel signal this process when its parent ends, for any reason. Only Linux can.

    Args:
        number: The signal; SIGKILL by default.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)


@contextmanager
def redirected(descriptor: int, target: int) -> Iterator[None]:
    """Let a descriptor of this process lead where another one leads, until the `with` ends."""
    kept = os.dup(descriptor)
    os.dup2(target, descriptor)
    try:
        yield
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)


@contextmanager
def loading() -> Iterator[None]:
    """Pause the garbage collector inside the `with`, during the import of modules or forks."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@cache
def freeze_loaded_objects() -> None:
    """Make the garbage collector ignore all objects that exist now.

    Only the first call in a process does so: a later call would keep the garbage of an earlier run.
    """
    gc.freeze()


def end_process(code: int) -> NoReturn:
    """End the process as `sys.exit` does, but do not delete its objects.

    Wait for threads and run exit hooks first.
    """
    # waits for threads that are not daemons, and for threads of executors
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    end_at_once(code)


def end_at_once(code: int) -> NoReturn:
    """End the process after flushing its output, and wait for nothing."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # a shell may have closed it
            with suppress(BrokenPipeError):  # its reader has ended
                stream.flush()
    os._exit(code)
