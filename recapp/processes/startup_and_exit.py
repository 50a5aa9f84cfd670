"""Save time at the start and at the end of a process that loads torch and Lightning.

Loading them makes hundreds of thousands of objects that stay. The garbage collector visits these
objects again and again, which takes a fifth of the loading time. At the end of a process, the
interpreter deletes all of them, although the system takes the memory back anyway: that costs a rank
one second.
"""

import atexit
import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

_frozen: list[bool] = []


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
