"""The fork server itself: it ends with its command, and has imported what ranks need.

Only the server imports this module, which makes it one; then it runs Python's own loop
(`multiprocessing.forkserver.main`).
"""

import atexit
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType

from setproctitle import setproctitle

from recapp.processes.data_workers import die_with_parent
from recapp.processes.fork_server import PARENT_PID, PRELOADED, SOCKET_FOLDER
from recapp.processes.startup_and_exit import freeze_loaded_objects, loading

# Not one of those that stop a run: they stay blocked in the server, as its ranks inherit that.
COMMAND_IS_GONE = signal.SIGUSR1
LAST_SECONDS = 5.0


def serve_one_command() -> None:
    """End this process when the command is gone, whatever ended that, and leave nothing behind.

    The ranks end with this process. A terminal's signals are for the command alone: this process
    and its ranks are a session of their own.
    """
    command = int(os.environ[PARENT_PID])
    server = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() == server and os.getppid() != command:
            shutil.rmtree(os.environ[SOCKET_FOLDER], ignore_errors=True)
            os._exit(128 + number)

    signal.signal(COMMAND_IS_GONE, end)
    # Python's loop ends by itself where the command goes before there are ranks: files are closed
    # before the signal is sent, which then has to find this process
    atexit.register(lambda: time.sleep(LAST_SECONDS) if os.getpid() == server else None)
    die_with_parent(COMMAND_IS_GONE)
    end(COMMAND_IS_GONE, None)  # it may have gone before the kernel knew
    os.setsid()
    setproctitle(f"recapp: ranks of process {command} are forked from this one")


def preload() -> None:
    """Import the modules that the command has named, and leave their pages to be shared.

    A module that cannot be imported ends this process without a word, also where its library aborts
    for want of memory: ranks that are started otherwise say what is wrong.
    """
    with stderr_to_nobody():
        try:
            with loading():
                for name in os.environ[PRELOADED].split():
                    import_module(name)
        except Exception:
            os._exit(1)
    freeze_loaded_objects()


@contextmanager
def stderr_to_nobody() -> Iterator[None]:
    """Drop what this process and its libraries write on standard error inside the `with`."""
    kept = os.dup(2)
    nobody = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nobody, 2)
    os.close(nobody)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


serve_one_command()
preload()
