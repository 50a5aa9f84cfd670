"""The launcher: it starts the ranks of this machine, ends them all, and reports which one failed.

    python -m recapp.train       this process: settings, the launcher
      fork server                imports modules for ranks while this process composes settings
        recapp.train rank 0      writes to our output, so that a progress bar finds the terminal
        recapp.train rank 1      writes to JOB/ranks/1.log

Each job has new processes, so a sweep never nests launches, and a failed job leaves nothing behind.
Python's multiprocessing starts the ranks (`fork_server.py`, `rank_process.py`). This file gives
them the environment that torchrun would give them, without variables of an outer launcher, and
holds a port for them; it finds the rank that failed first, and reports its failure as one error.
`rank_process.py` is the code inside a rank.
"""

import json
import os
import signal
import socket
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from recapp import errors
from recapp.console import note, tracebacks_wanted
from recapp.errors import ConfigError, LaunchError, RecappError
from recapp.processes.faults import (
    FULL,
    describe_exit,
    explain_output,
    full_disk_error,
    is_full,
)
from recapp.processes.rank_environment import PARENT_PID
from recapp.processes.rank_process import (
    Forwarding,
    LaunchedRanks,
    RankFailure,
    RankWork,
    log_of,
    remove_silent,
)
from recapp.processes.stopping import GRACE_SECONDS, SIGNALS, Stopped, redirected
from recapp.settings.values import Timeout, Within

# a number: the names of hosts in containers often do not resolve
ADDRESS = "127.0.0.1"
CPU_RANKS = 2  # where there is no GPU and `trainer.devices` is auto
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RANK_PREFIXES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "TORCHELASTIC_")
LOST = 255  # multiprocessing's exit code of a process whose fork server is gone
LOST_WORDS = (
    "was ended with the fork server that it came from (killed, or memory ran out); "
    "launch.start_method=spawn needs no fork server"
)
LAST_LINES = 60  # of the output of a rank that died without an error file
# The signal that has ended a rank, by the rank's exit code.
STOPPED_BY = {code: number for number in SIGNALS for code in (128 + number, -number)}


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """The group `launch`.

    Args:
        start_method: The way to start a rank's process.
        grace: Seconds in which ranks may save after a signal.
        timeout: Seconds after which a rank that waits for another one gives up.
    """

    start_method: Literal["auto", "forkserver", "spawn"] = "auto"
    grace: Annotated[float, Within(0, 31_536_000)] = 60
    timeout: Timeout = 1800


def rank_count(devices: int | str, accelerator: str = "auto") -> int:
    """Return how many ranks `trainer.devices` asks for.

    Args:
        devices: A number of ranks, or `auto`: one for each GPU, two on the CPU.
        accelerator: `trainer.accelerator`; `auto` uses GPUs where there are any.

    Raises:
        ConfigError: There are fewer GPUs.
    """
    wants_gpu = accelerator in ("gpu", "cuda")
    gpus = gpu_count() if accelerator == "auto" or wants_gpu else 0
    if wants_gpu and gpus == 0:
        raise ConfigError(
            f"trainer.accelerator={accelerator}: this machine has no GPU; use auto or cpu"
        )
    if devices == "auto":
        return gpus or CPU_RANKS
    if gpus and int(devices) > gpus:
        raise ConfigError(
            f"trainer.devices={devices}: this machine has {gpus} GPUs; use at most {gpus}, or "
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


def check_gpus(ranks: int) -> None:
    """Check that each rank of a command with `device=cuda` has a GPU.

    Raises:
        ConfigError: There are fewer GPUs.
    """
    if (gpus := gpu_count()) < ranks:
        raise ConfigError(
            f"device=cuda ranks={ranks}: each rank needs a GPU of its own, and there are {gpus} "
            "here: use device=cpu, or fewer ranks"
        )


def launch(
    config_path: Path,
    ranks: int,
    *,
    module: str,
    preload: str | None = None,
    method: str = "auto",
    to_stderr: bool = False,
    grace: float = GRACE_SECONDS,
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
        to_stderr: Whether rank 0 prints to standard error, because standard output is a document.
        grace: The seconds that ranks have to finish a checkpoint after a signal.
        reloads: Whether SIGHUP only reloads rank 0, as in a server, and stops nothing.

    Raises:
        RecappError: A rank raised this error; its notes may hold a traceback.
        LaunchError: A rank ended without an error of recapp.
        Stopped: A signal to this process or to a rank has ended the run, and all ranks have ended.
    """
    run = uuid.uuid4().hex[:8]
    logs = config_path.parent / "ranks"
    forwarding = Forwarding(grace, reloads)
    with meeting_point() as port:
        works = [
            RankWork(module, config_path, environment)
            for environment in environments_of_ranks(ranks, port, run)
        ]
        if sys.stdout is not None:  # a shell may have closed it
            sys.stdout.flush()  # our output comes before the output of the ranks
        try:
            launched = LaunchedRanks(works, logs, preload=preload or module, to_stderr=to_stderr)
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
            # the progress bar of a rank that was ended may have left the cursor hidden
            if forwarding.number and sys.stderr.isatty():
                sys.stderr.write("\x1b[?25h")
    failed = explain_failure(first_failure(failures), logs) if failures else None
    remove_silent(logs)
    if forwarding.number:
        if isinstance(failed, RecappError) and not failed.secondhand:
            note(f"while the run was stopped: {failed}")
        raise Stopped(forwarding.number)
    if failed is not None:
        raise failed


@contextmanager
def meeting_point() -> Iterator[int]:
    """Hold a free port for rank 0 inside the `with`, so that no other process takes it before rank
    0 listens on it.

    Two sockets may bind one port while neither listens, if both set SO_REUSEADDR, and torch's store
    sets it.

    Yields:
        The number of the port.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((ADDRESS, 0))
        yield holder.getsockname()[1]


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


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send standard output of this process and of its child processes to standard error."""
    sys.stdout.flush()
    with redirected(1, 2):
        try:
            yield
        finally:
            sys.stdout.flush()


def explain_failure(failure: RankFailure, logs: Path) -> RecappError | Stopped:
    """Return the error to raise for the rank that failed first.

    Args:
        failure: The failure of the rank.
        logs: The directory of the ranks' logs, in the job's directory.
    """
    if failure.exitcode in STOPPED_BY:
        return Stopped(STOPPED_BY[failure.exitcode])
    who = f"rank {failure.rank} on {socket.gethostname()} (process {failure.pid})"
    if failure.error_file.exists():
        return _reported(failure, who)
    if is_full(logs):
        return full_disk_error(logs.parent)
    log = log_of(logs, failure.rank)
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = "\n".join(text.strip().splitlines()[-LAST_LINES:])
    aborted = failure.exitcode == -signal.SIGABRT
    known_fault = explain_output(lines, failure.rank) if aborted else None
    how = LOST_WORDS if failure.exitcode == LOST else describe_exit(failure.exitcode)
    error = known_fault or LaunchError(f"{who} {how}")
    if lines and (known_fault is None or tracebacks_wanted()):
        error.add_note(f"the last lines of rank {failure.rank}:\n{lines}")
    return error


def _reported(failure: RankFailure, who: str) -> RecappError:
    message: dict[str, Any] = json.loads(failure.error_file.read_text())["message"]
    calls = message["extraInfo"]["py_callstack"]
    kind, _, text = message["message"].partition(": ")
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, RecappError):
        error = known(text)
        if tracebacks_wanted():
            error.add_note(calls)
        return error
    unknown = LaunchError(f"{who} failed: {message['message']}")
    unknown.add_note(calls.rstrip())
    return unknown


def first_failure(failures: Sequence[RankFailure]) -> RankFailure:
    """Return the failure of the rank that failed first.

    The order of the exits does not decide: the failed rank may be slow to exit, and a peer that
    lost its connection may exit earlier. A rank that died without an error file counts as first: a
    peer's failure raises an exception, which the rank would have reported. Among ranks with an
    error file, the rank with the oldest file failed first.
    """
    reported = [failure for failure in failures if failure.error_file.exists()]
    reported.sort(key=lambda failure: os.stat(failure.error_file).st_mtime_ns)
    silent = [
        failure
        for failure in failures
        if failure not in reported and not failure.ended and failure.exitcode not in STOPPED_BY
    ]
    return [*silent, *reported, *failures][0]
