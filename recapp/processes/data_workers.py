"""Data workers belong to their rank: they ignore signals, end when the rank ends, and report a
batch that they cannot send.

`DataLoader` forks the workers, so a signal to a process group reaches them too. A worker that died
of the signal would leave its rank without batches before the step at which all ranks stop.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

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
