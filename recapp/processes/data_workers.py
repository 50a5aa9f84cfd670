"""Data workers belong to their rank: they ignore signals, end with it, and report to it what they
cannot send.

`DataLoader` forks them, and a signal to a whole group of processes reaches them as well: without
them the rank could not get to the step at which all ranks stop.
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
    """Have processes that are forked from this one from now on behave as data workers.

    Args:
        signals: The signals that they ignore.
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
    """Send the rank the number of a batch that cannot be sent, with the error.

    Without that the rank would wait for the batch without end, for example where shared memory has
    run out.
    """
    from torch._utils import ExceptionWrapper

    number, _ = item
    raised = (type(error), error, error.__traceback__)
    wrapper = ExceptionWrapper(raised, "in a data worker")  # type: ignore[no-untyped-call]
    queue.put((number, wrapper))


def end_children() -> None:
    """Kill the data workers that are still there."""
    from multiprocessing import active_children

    for child in active_children():
        with suppress(OSError, ValueError):
            child.kill()


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent is gone, whatever ended that. Only Linux
    does so.

    Args:
        number: The signal; by default the one that kills.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
