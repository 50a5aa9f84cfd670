"""Start and end of a process that loads torch, and of the data workers that are forked from it.

Loading torch and Lightning makes hundreds of thousands of objects that stay. The garbage collector
visits these objects again and again, which takes a fifth of the loading time. At the end of a
process, the interpreter deletes all of them, although the system takes the memory back anyway: that
costs a rank one second.

Data workers belong to their rank: they ignore signals, end when the rank ends, and report a batch
that they cannot send. `DataLoader` forks the workers, so a signal to a process group reaches them
too. A worker that died of the signal would leave its rank without batches before the step at which
all ranks stop.
"""

import atexit
import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

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
        if queues := sys.modules.get("multiprocessing.queues"):
            queues.Queue._on_queue_feeder_error = _report_to_rank

    os.register_at_fork(after_in_child=in_child)


def _report_to_rank(queue: Any, error: Exception, item: Any) -> None:
    """Send the rank the error of a batch that cannot be sent, and the number of the batch.

    Without the error, for example when shared memory is full, the rank would wait for the batch for
    ever.
    """
    from torch._utils import ExceptionWrapper

    number, _ = item
    raised = (type(error), error, error.__traceback__)
    wrapper = ExceptionWrapper(raised, "in a data worker")  # type: ignore[no-untyped-call]
    queue.put((number, wrapper))


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


_frozen: list[bool] = []


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
    """Pause the garbage collector inside the `with`, during the import of modules."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def freeze_loaded_objects() -> None:
    """Make the garbage collector ignore all objects that exist now.

    Only the first call in a process does so: a later call would keep the garbage of an earlier run.
    """
    if not _frozen:  # a flag, because `gc.get_freeze_count` counts the objects, which takes .06 s
        gc.freeze()
        _frozen.append(True)


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
