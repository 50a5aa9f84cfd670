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


@contextmanager
def loading() -> Iterator[None]:
    """Inside, modules are imported, and the garbage collector rests."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def keep_what_is_loaded() -> None:
    """Has the collector pass over what is there now. Once in a process: the next run in it would
    keep the garbage of the one before.
    """
    if not gc.get_freeze_count():
        gc.freeze()


def end_process(code: int) -> NoReturn:
    """Ends the process as `sys.exit` does, threads and exit hooks included, but leaves its objects
    to the system.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons, and for those of executors
    atexit._run_exitfuncs()
    end_at_once(code)


def end_at_once(code: int) -> NoReturn:
    """Ends the process with all that it has said, and waits for nothing."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # a shell may have closed it
            with suppress(BrokenPipeError):  # whoever read it has seen enough
                stream.flush()
    os._exit(code)
