"""The fork server's process: it imports the modules of the ranks, and ends with its command.

Only the server imports this module, and the import does all of its work: the last two lines call
`serve_one_command` and `preload`. Then Python's own loop runs (`multiprocessing.forkserver.main`).
"""

import atexit
import os
import shutil
import signal
import time
from importlib import import_module
from types import FrameType

from setproctitle import setproctitle

from recapp.processes.fork_server import PRELOADED, SOCKET_FOLDER
from recapp.processes.rank_environment import PARENT_PID
from recapp.processes.stopping import (
    die_with_parent,
    freeze_loaded_objects,
    loading,
    redirected,
)

# not a signal that stops a run: the server keeps those blocked, so that its ranks inherit the block
COMMAND_IS_GONE = signal.SIGUSR1
LAST_SECONDS = 5.0


def serve_one_command() -> None:
    """Make this process end when the command ends, for any reason, and remove its files then.

    The ranks end with this process. Only the command gets a terminal's signals: this process and
    its ranks have a session of their own.
    """
    command = int(os.environ[PARENT_PID])
    server = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() == server and os.getppid() != command:
            shutil.rmtree(os.environ[SOCKET_FOLDER], ignore_errors=True)
            os._exit(128 + number)

    signal.signal(COMMAND_IS_GONE, end)
    # Python's loop ends by itself where the command ends before the first rank: the kernel closes
    # the command's files before it sends the signal, and the signal must still find this process
    atexit.register(lambda: time.sleep(LAST_SECONDS) if os.getpid() == server else None)
    die_with_parent(COMMAND_IS_GONE)
    end(COMMAND_IS_GONE, None)  # the command may have ended before `die_with_parent`
    os.setsid()
    setproctitle(f"recapp: ranks of process {command} are forked from this one")


def preload() -> None:
    """Import the modules that the command has named, and keep their memory pages shared.

    If an import fails, or a library aborts because memory is short, end this process without a
    message: ranks then start as fresh interpreters, and they report the error.
    """
    with open(os.devnull, "w") as nobody, redirected(2, nobody.fileno()):
        try:
            with loading():
                for name in os.environ[PRELOADED].split():
                    import_module(name)
        except Exception:
            os._exit(1)
    freeze_loaded_objects()


serve_one_command()
preload()
