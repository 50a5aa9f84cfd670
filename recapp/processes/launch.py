"""The launcher: it starts ranks on this machine, ends them all, and reports which one failed.

    python -m recapp.train       this process: settings, the launcher
      fork server                imports what ranks need, while this process composes settings
        recapp.worker rank 0     its output is ours, so that a progress bar finds the terminal
        recapp.worker rank 1     its output is in JOB/ranks/1.log

A job has fresh processes, so a sweep never nests and a job that fails leaves nothing behind.
Python's multiprocessing starts them (`fork_server.py`, `launched_ranks.py`). This file says what
they find around them: the environment that torchrun would give them and nothing of an outer
launcher, and a port that nobody else takes; signals ask them to stop (`forwarding.py`), and of
several that failed the first one is told from those that failed because of it
(`first_failure.py`). The ranks' side is `rank_process.py`.
"""

import os
import socket
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recapp.console import note
from recapp.errors import ConfigError, LaunchError, RecappError
from recapp.processes.faults import FULL, full_disk_error
from recapp.processes.first_failure import explain_failures
from recapp.processes.fork_server import PARENT_PID
from recapp.processes.forwarding import Forwarding
from recapp.processes.launched_ranks import LaunchedRanks, remove_silent
from recapp.processes.rank_process import Work
from recapp.processes.stopping import GRACE_SECONDS, Stopped

# a number: the names of hosts in containers often do not resolve
ADDRESS = "127.0.0.1"
CPU_RANKS = 2  # where there is no GPU and `trainer.devices` is auto
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RANK_PREFIXES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "TORCHELASTIC_")


def rank_count(devices: int | str, accelerator: str = "auto") -> int:
    """Return how many ranks `trainer.devices` asks for.

    Torch is asked for GPUs only where the machine shows a sign of one: it takes seconds to import.

    Args:
        devices: A number of ranks, or `auto`: one for each GPU, two on the CPU.
        accelerator: `trainer.accelerator`; `auto` uses GPUs where there are any.

    Raises:
        ConfigError: `devices` is neither, or there are fewer GPUs.
    """
    automatic = devices == "auto"
    if not automatic and not (str(devices).isdecimal() and int(devices) > 0):
        raise ConfigError(
            f"trainer.devices={devices}: give a number of ranks, or auto: one for each GPU, "
            f"{CPU_RANKS} on the CPU"
        )
    wants_gpu = accelerator in ("gpu", "cuda")
    gpus = gpu_count() if accelerator == "auto" or wants_gpu else 0
    if wants_gpu and gpus == 0:
        raise ConfigError(
            f"trainer.accelerator={accelerator}: there is no GPU here; use auto or cpu"
        )
    if automatic:
        return gpus or CPU_RANKS
    if gpus and int(devices) > gpus:
        raise ConfigError(
            f"trainer.devices={devices}: there are {gpus} GPUs here; use at most that, or "
            "trainer.accelerator=cpu"
        )
    return int(devices)


def gpu_count() -> int:
    """Return how many GPUs torch has here, which is asked only where there is a sign of one."""
    if not any(Path(sign).exists() for sign in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")):
        return 0
    import torch

    return torch.cuda.device_count()


def launch(
    config_path: Path,
    ranks: int,
    *,
    module: str = "recapp.worker",
    preload: str | None = None,
    method: str = "auto",
    port: int = 0,
    to_stderr: bool = False,
    grace: float = GRACE_SECONDS,
    timeout: float = float("inf"),
    timeout_setting: str = "",
    reloads: bool = False,
) -> None:
    """Run a module's `run(settings, job directory)` as `ranks` processes on this machine and wait
    for them.

    Args:
        config_path: The file of the job's settings, in the job's directory; the ranks' logs lie
            below that.
        ranks: The number of processes.
        module: The module.
        preload: The modules that a fork server imports before it forks ranks, with blanks between
            them, unless it runs already; None: `module`.
        method: `launch.start_method`.
        port: The port at which the ranks meet; 0 takes a free one.
        to_stderr: Whether what rank 0 prints goes to standard error, because standard output is to
            be a document.
        grace: The seconds that ranks have to finish a checkpoint after a signal.
        timeout: The seconds for which a rank may be stopped before the run fails.
        timeout_setting: The name of the setting that says so; empty where none does.
        reloads: Whether SIGHUP is a message for rank 0, as of a server, and stops nothing.

    Raises:
        RecappError: The error that a rank raised; its notes may hold a traceback.
        LaunchError: A rank died of something else, one was stopped, or the port is taken.
        Stopped: A signal to this process or to a rank has ended the run; all ranks are gone.
    """
    run = uuid.uuid4().hex[:8]
    logs = config_path.parent / "ranks"
    forwarding = Forwarding(grace, reloads)
    with meeting_point(port) as port:
        works = [
            Work(module, config_path, environment)
            for environment in environments_of_ranks(ranks, port, run)
        ]
        if sys.stdout is not None:  # a shell may have closed it
            sys.stdout.flush()  # before what ranks print
        try:
            launched = LaunchedRanks(
                works, logs, preload=preload or module, to_stderr=to_stderr, timeout=timeout
            )
            with forwarding:
                try:
                    launched.start(method, forwarding)
                    failures = launched.wait(forwarding)
                finally:
                    launched.end()
        except OSError as error:
            if error.errno in FULL:
                raise full_disk_error(logs) from error
            raise
        finally:
            if forwarding.number:
                _show_cursor()
    limit = f"{timeout_setting}={timeout:g}" if timeout_setting else f"{timeout:g} seconds"
    failed = explain_failures(failures, logs, limit) if failures else None
    remove_silent(logs)
    _raise_what_ended(forwarding.number, failed)


def _raise_what_ended(signal_number: int, failed: RecappError | Stopped | None) -> None:
    """Raise `Stopped` if a signal has ended the run, else the error of the rank that failed.

    A failure beside a signal is printed as a note. Nothing is raised if all ended well.
    """
    if not signal_number:
        if failed is not None:
            raise failed
        return
    if isinstance(failed, RecappError) and not failed.secondhand:
        note(f"while the run was stopped: {failed}")
    raise Stopped(signal_number)


@contextmanager
def meeting_point(port: int) -> Iterator[int]:
    """Hold a port for rank 0 inside the `with`, so that nobody else gets it before that listens
    there.

    A port may be bound twice as long as nobody listens, if both say so (SO_REUSEADDR), as the store
    of torch does.

    Args:
        port: The port; 0 takes a free one.

    Yields:
        The number of the port.

    Raises:
        ConfigError: It is no port.
        LaunchError: It is taken.
    """
    if not isinstance(port, int) or not 0 <= port < 65536:
        raise ConfigError(f"launch.port={port}: give a number below 65536; 0 takes a free port")
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((ADDRESS, port))
        except OSError as error:
            raise LaunchError(
                f"launch.port={port}: {error.strerror}; choose another, or 0 for a free one"
            ) from None
        yield held.getsockname()[1]


def environments_of_ranks(ranks: int, port: int, run: str) -> list[dict[str, str]]:
    """Return all variables of each rank: this process's, and those that torchrun would set.

    Args:
        ranks: The number of ranks.
        port: The port at which they meet.
        run: The run id.
    """
    shared = {
        name: value
        for name, value in os.environ.items()
        if name not in RANK_VARIABLES and not name.startswith(RANK_PREFIXES)
    }
    if not shared.get("OMP_NUM_THREADS"):
        shared["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    if not _resolves(socket.gethostname()):
        shared.setdefault("GLOO_SOCKET_IFNAME", "lo")
    shared |= {
        PARENT_PID: str(os.getpid()),
        "TORCHELASTIC_RUN_ID": run,  # by which a rank knows that nobody else has started it
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(port),
    }
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


@contextmanager
def stdout_to_stderr(wanted: bool) -> Iterator[None]:
    """Send to standard error what this process and those it starts write on standard output.

    Args:
        wanted: Whether to do so; else nothing changes.
    """
    if not wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _show_cursor() -> None:
    """Show the cursor, which a rank's progress bar has hidden and had no time to show again."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")
