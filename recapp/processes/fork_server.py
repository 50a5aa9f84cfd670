"""Start ranks as forks of one process that has loaded all modules, or as fresh interpreters.

    command       settings, checks of the data
      fork server torch, Lightning, other modules of ranks    one thread, no OpenMP region, no CUDA
        rank 0    a fork of the server, ready in hundredths of a second
        rank 1    another fork

Importing torch and Lightning takes seconds of a core. The first lines of a command start Python's
own fork server (`multiprocessing.forkserver`), so one process imports for all ranks while the
command composes its settings. A sweep keeps the server for all jobs. All ranks share the memory
pages of the imported code.

A fork copies one thread, so the server must have only one. The server's environment keeps libraries
that start threads when they load (OpenBLAS, Arrow's jemalloc) from doing so, and each rank sets its
own number of threads after the fork (`rank_process.py`). The server blocks signals, and so does a
rank until its handlers are installed: no signal is lost, and none ends a process before that.

Where there is no fork server (macOS, Windows, `launch.start_method=spawn`) or it fails, each rank
is a fresh interpreter, as Python's method `spawn` starts it.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import BaseContext
from types import ModuleType

from recapp.processes.rank_environment import PARENT_PID, PRINTING_FLAGS, external_rank
from recapp.processes.stopping import SIGNALS, end_on_signals

# for the server: the modules to import, and the directory to remove if the command cannot
PRELOADED = "RECAPP_FORK_SERVER_MODULES"
SOCKET_FOLDER = "RECAPP_FORK_SERVER_FOLDER"
SERVER_MODULE = "recapp.processes.fork_server_process"
# The modules of ranks that train, evaluate or predict.
MODULES_OF_TRAINING = "recapp.cli.training_modules recapp.train recapp.eval recapp.predict"
# The server's own values of variables. No rank inherits these values.
OWN_VARIABLES = {
    # else a library starts threads when it loads, or sizes a pool for one process
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    # else counting GPUs makes a CUDA context, which a fork cannot use
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
# Variables that libraries of a rank read when they load. A value of the user has priority.
DEFAULTS = {
    # else sums depend on the load of the machine, and two runs of a seed differ
    "MKL_DYNAMIC": "FALSE",
    # else pyarrow's allocator reserves 1 GiB at once, and a memory limit counts unused memory too
    "MIMALLOC_ARENA_RESERVE": "65536",
}

# The environment of this process when it started the server. The server's libraries read it.
_environment: dict[str, str] = {}


def start_early(preload: str = MODULES_OF_TRAINING) -> None:
    """Begin a command that may start ranks: a signal ends it at once (`end_on_signals`), and the
    fork server imports the modules of ranks meanwhile, if the command will start some.

    Raise nothing and print nothing: the start of the ranks reports a server that cannot start.

    Args:
        preload: The modules that the server imports, separated by blanks.
    """
    end_on_signals()
    needless = {*PRINTING_FLAGS, "launch.start_method=spawn"} & set(sys.argv[1:])
    if not needless and has_fork_server() and external_rank() is None:
        with suppress(OSError):
            ensure_running(preload)


def has_fork_server() -> bool:
    """Return whether ranks can be forked on this system. Python has a fork server on macOS too, but
    system libraries do not survive a fork there.
    """
    return sys.platform == "linux"


def context_of(method: str) -> BaseContext:
    """Return the multiprocessing context that starts ranks.

    Args:
        method: `launch.start_method`: `auto`, `forkserver` or `spawn`.
    """
    if method == "auto":
        # the server's libraries have read the old values; `hydra.job.env_set` sets others
        changed = dict(set(os.environ.items()) ^ set(_environment.items()))
        has_changed = _environment and any(not name.startswith("HYDRA_") for name in changed)
        method = "forkserver" if has_fork_server() and not has_changed else "spawn"
    return multiprocessing.get_context(method)


def ensure_running(preload: str) -> None:
    """Start the fork server of this process, unless it runs already.

    Args:
        preload: The modules that the server imports, separated by blanks.

    Raises:
        OSError: The server cannot start.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([SERVER_MODULE])
    environment = dict(os.environ)
    here = {
        PARENT_PID: str(os.getpid()),
        PRELOADED: preload,
        SOCKET_FOLDER: util.get_temp_dir(),  # made now: the command removes it, too
    }
    # the tracker's first call unblocks signals, so it must stand before `signals_blocked`
    resource_tracker.ensure_running()
    of_server = {**DEFAULTS, **environment, **OWN_VARIABLES, **here}
    with signals_blocked(), without_main_module(), variables(of_server):
        forkserver.ensure_running()
    if not _environment:
        _environment.update(environment)


@contextmanager
def variables(environment: Mapping[str, str]) -> Iterator[None]:
    """Replace the environment of this process inside the `with`."""
    kept = dict(os.environ)
    replace_environment(environment)
    try:
        yield
    finally:
        replace_environment(kept)


def replace_environment(environment: Mapping[str, str]) -> None:
    """Replace the environment of this process by `environment`."""
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block signals inside the `with`. A process that starts there inherits the blocked signals.

    The kernel delivers a signal that arrives meanwhile at the end of the `with`.
    """
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept)


@contextmanager
def without_main_module() -> Iterator[None]:
    """Hide the command's `__main__` inside the `with`, because multiprocessing makes every rank
    import `__main__` again, and Hydra with it.
    """
    kept = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = kept
