"""What Python itself costs a process that loads torch and Lightning, at its start and at its end.

Loading them makes hundreds of thousands of objects that stay, and the garbage collector goes over
them again and again: a fifth of the time. When the process ends, the interpreter takes all of them
apart, for memory that the system takes back anyway: a second of a rank.
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
    """Pause the garbage collector inside the `with`, where modules are imported."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def freeze_loaded_objects() -> None:
    """Have the garbage collector pass over all objects that are there now.

    Only the first call in a process does so: a later one would keep the garbage of the run before.
    """
    if not _frozen:  # asking the collector takes .06 s, as it counts them
        gc.freeze()
        _frozen.append(True)


def end_process(code: int) -> NoReturn:
    """End the process as `sys.exit` does, but leave its objects to the system.

    Threads are waited for and exit hooks are run.
    """
    # waits for threads that are not daemons, and for those of executors
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
