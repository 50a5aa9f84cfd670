"""Where ranks come from: copies of one process that has loaded everything, or fresh interpreters.

    command       settings, checks of the data
      fork server torch, Lightning, what ranks import     one thread, no OpenMP region, no CUDA
        rank 0    a fork of it, there in hundredths of a second
        rank 1    another

Importing torch and Lightning takes seconds of a core. A command starts Python's own fork server
(`multiprocessing.forkserver`) with its first lines, so that one process imports for all ranks while
the command composes its settings; a sweep keeps it for all jobs. Pages of the imported code are
shared by all ranks.

A fork copies one thread, so the server must not have more: what starts threads when it is loaded
(OpenBLAS, Arrow's jemalloc) is told not to by the server's environment, and each rank takes its own
number of threads after the fork (`rank_process.py`). Signals are blocked in the server and in a
rank until it has handlers, so none is lost and none ends them before that.

Where there is no fork server (macOS, Windows, `launch.start_method=spawn`) or it cannot be used,
each rank is a fresh interpreter, as Python's method `spawn` starts it.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import BaseContext
from types import ModuleType

from recapp.processes.rank_environment import started_externally
from recapp.processes.stopping import SIGNALS

PARENT_PID = "RECAPP_PARENT_PID"  # the command's, for the server and for ranks
# of the server: what it imports, and the directory that it removes if the command cannot
PRELOADED = "RECAPP_FORK_SERVER_MODULES"
SOCKET_FOLDER = "RECAPP_FORK_SERVER_FOLDER"
MOST_ADDRESS_BYTES = 107  # of a socket (unix(7)), without the zero at its end
SOCKET = "/pymp-12345678/listener-12345678"  # how Python calls one, behind the directory
SERVER_MODULE = "recapp.processes.fork_server_process"
MODULES_OF_TRAINING = "recapp.app.training_modules recapp.worker"
"""What ranks need that train, evaluate or predict."""
OWN_VARIABLES = {
    # else threads are started when a library is loaded, or a pool is sized for one process
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    # else asking for GPUs makes a CUDA context, which a fork cannot use
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""The server's environment, where it differs from the command's. It is never a rank's."""
DEFAULTS = {
    # else sums depend on how busy the machine is, and two runs of a seed differ
    "MKL_DYNAMIC": "FALSE",
    # else pyarrow's allocator takes 1 GiB at once, which a limit on memory counts whether used or
    # not
    "MIMALLOC_ARENA_RESERVE": "65536",
}
"""What libraries of a rank read when they are loaded, where the user has not set it."""
NO_RUN = ("--help", "-h", "--cfg", "-c", "--info", "-i", "--hydra-help", "--shell-completion")

_environment: dict[str, str] = {}
"""The environment of this process when it started the server: what the server's libraries read."""


def start_early(preload: str = MODULES_OF_TRAINING, arguments: Sequence[str] | None = None) -> None:
    """Start the fork server of a command with its first lines, if the command will start ranks.

    Nothing is raised and nothing is printed: a server that cannot be started is found, and said,
    when ranks are.

    Args:
        preload: The modules that the server imports, with blanks between them.
        arguments: The command line, by default that of this process.
    """
    given = sys.argv[1:] if arguments is None else arguments
    wanted = not set(NO_RUN) & set(given) and "launch.start_method=spawn" not in given
    if wanted and has_fork_server() and not started_externally():
        try:
            ensure_running(preload)
        except OSError:
            return


def has_fork_server() -> bool:
    """Return whether ranks can be forked here. Python offers it on macOS too, where libraries of
    the system do not survive a fork.
    """
    return sys.platform == "linux"


def context_of(method: str) -> BaseContext:
    """Return the multiprocessing context that starts ranks.

    Args:
        method: `launch.start_method`: `auto`, `forkserver` or `spawn`.
    """
    if method == "auto":
        method = "forkserver" if has_fork_server() and not _environment_has_changed() else "spawn"
    return multiprocessing.get_context(method)


def _environment_has_changed() -> bool:
    """Return whether variables were set since the server was started, such as by
    `hydra.job.env_set`: its libraries have read the old ones.
    """
    changed = dict(set(os.environ.items()) ^ set(_environment.items()))
    return bool(_environment) and any(not name.startswith("HYDRA_") for name in changed)


def ensure_running(preload: str) -> None:
    """Start the fork server of this process, unless it runs.

    Args:
        preload: The modules that the server imports, with blanks between them.

    Raises:
        OSError: It cannot be started.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([SERVER_MODULE])
    make_socket_folder()
    # its first call unblocks signals, so it comes first
    resource_tracker.ensure_running()
    environment = dict(os.environ)
    with signals_blocked(), without_main_module(), _variables(_of_server(environment, preload)):
        forkserver.ensure_running()
    if not _environment:
        _environment.update(environment)


def make_socket_folder() -> str:
    """Return Python's own directory of sockets, which is made by the first call.

    It lies below `TMPDIR`, or below `/tmp` where the address of a socket would be too long.

    Raises:
        OSError: There is no place for it.
    """
    kept = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > MOST_ADDRESS_BYTES - len(SOCKET):
        tempfile.tempdir = "/tmp"
    try:
        return util.get_temp_dir()
    finally:
        tempfile.tempdir = kept


def _of_server(environment: Mapping[str, str], preload: str) -> dict[str, str]:
    here = {
        PARENT_PID: str(os.getpid()),
        PRELOADED: preload,
        SOCKET_FOLDER: make_socket_folder(),
    }
    return {**DEFAULTS, **environment, **OWN_VARIABLES, **here}


@contextmanager
def _variables(environment: Mapping[str, str]) -> Iterator[None]:
    """Exchange the environment of this process inside the `with`."""
    kept = dict(os.environ)
    replace_environment(environment)
    try:
        yield
    finally:
        replace_environment(kept)


def replace_environment(environment: Mapping[str, str]) -> None:
    """Make `environment` that of this process."""
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block signals inside the `with`: processes that are started there are born with them blocked.

    A signal that comes meanwhile is delivered at the end.
    """
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept)


@contextmanager
def without_main_module() -> Iterator[None]:
    """Hide the command's `__main__` inside the `with`: multiprocessing would have every rank import
    it again, and Hydra with it.
    """
    kept = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = kept
