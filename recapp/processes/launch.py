"""The launcher: it starts the ranks of this machine, ends them all, and reports which one failed.

    python -m recapp.train       this process: settings, the launcher
      fork server                imports modules for ranks while this process composes settings
        recapp.train rank 0      writes to our output, so that a progress bar finds the terminal
        recapp.train rank 1      writes to JOB/ranks/1.log

Each job has new processes, so a sweep never nests launches, and a failed job leaves nothing behind.
Python's multiprocessing starts the ranks (`fork_server.py`, `launched_ranks.py`). This file gives
them the environment that torchrun would give them, without variables of an outer launcher, and
holds a port for them. `forwarding.py` passes signals on to the ranks, `first_failure.py` finds the
rank that failed first, and `rank_process.py` is the code inside a rank.
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

    Args:
        devices: A number of ranks, or `auto`: one for each GPU, two on the CPU.
        accelerator: `trainer.accelerator`; `auto` uses GPUs where there are any.

    Raises:
        ConfigError: `devices` is neither a number of ranks nor `auto`, or there are fewer GPUs.
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
    """Return how many GPUs torch can use. Import torch, which takes seconds, only on a machine that
    has a device file of a GPU.
    """
    if not any(Path(sign).exists() for sign in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")):
        return 0
    import torch

    return torch.cuda.device_count()


def launch(
    config_path: Path,
    ranks: int,
    *,
    module: str,
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
        preload: The modules, separated by blanks, that a fork server imports at its start, before
            it forks ranks; None: `module`. A server that runs already imports nothing more.
        method: `launch.start_method`.
        port: The port at which the ranks meet; 0 takes a free one.
        to_stderr: Whether rank 0 prints to standard error, because standard output is a document.
        grace: The seconds that ranks have to finish a checkpoint after a signal.
        timeout: The seconds for which a rank may be stopped (SIGSTOP) before the run fails.
        timeout_setting: The name of the setting with the timeout; empty where there is none.
        reloads: Whether SIGHUP only reloads rank 0, as in a server, and stops nothing.

    Raises:
        RecappError: A rank raised this error; its notes may hold a traceback.
        LaunchError: A rank ended without an error of recapp, a rank was stopped too long, or the
            port is taken.
        Stopped: A signal to this process or to a rank has ended the run, and all ranks have ended.
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
            sys.stdout.flush()  # our output comes before the output of the ranks
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

    If a rank failed after a signal, print its error as a note. If all ranks succeeded, raise
    nothing.
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
    """Hold a port for rank 0 inside the `with`, so that no other process takes it before rank 0
    listens on it.

    Two sockets may bind one port while neither listens, if both set SO_REUSEADDR, and torch's store
    sets it.

    Args:
        port: The port; 0 takes a free one.

    Yields:
        The number of the port.

    Raises:
        ConfigError: `port` is not the number of a port.
        LaunchError: The port is taken.
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
    """Return all variables of each rank: those of this process, and those that torchrun would set.

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
        "TORCHELASTIC_RUN_ID": run,  # tells the rank that this launcher has started it, not srun
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
    """Send standard output of this process and of its child processes to standard error.

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
    """Show the cursor: the progress bar of a rank that was ended may have left it hidden."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")
