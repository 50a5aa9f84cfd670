"""The launcher: it starts ranks on this machine, ends them all, and reports which one failed.

    python -m recapp.train       this process: settings, torch elastic's agent
      python -m recapp.worker    rank 0: its output is ours, so that a progress bar finds the
                                 terminal
      python -m recapp.worker    rank 1: its output is in JOB/ranks/.../1/*.log

A job has fresh processes, so a sweep never nests and a job that fails leaves nothing behind. Torch
elastic starts and watches them. This file adds what elastic lacks: signals ask the ranks to stop
(`forwarding.py`; elastic would raise an `Exception` wherever it is, and end ranks in its own time),
the rank that failed first is distinguished from those that failed because of it, nothing of an
outer launcher's environment reaches the ranks, and no name of this host has to resolve. The ranks'
side is `rank_process.py`.
"""

import logging
import os
import resource
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recapp import errors
from recapp.console import note, tracebacks_wanted
from recapp.errors import ConfigError, LaunchError, RecappError
from recapp.processes.faults import explain_output, full_disk_error, is_full, last_lines
from recapp.processes.forwarding import GRACE_SECONDS, Forwarding
from recapp.processes.rank_process import PARENT_PID
from recapp.processes.startup_and_exit import loading
from recapp.processes.stopping import GRACE_SECONDS as GRACE_TO_SAVE_SECONDS
from recapp.processes.stopping import SIGNALS, Stopped

# a number: the names of hosts in containers often do not resolve, and elastic would wait for that
ADDRESS = "127.0.0.1"
CPU_RANKS = 2  # where there is no GPU and `trainer.devices` is auto
ELASTIC_KILLS_AFTER_SECONDS = 30  # its fixed patience with the peers of a rank that failed
LAST_LINES = 20  # of the output of a rank that died without an error file
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RANK_PREFIXES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "TORCHELASTIC_")
STOPPED_BY = {code: number for number in SIGNALS for code in (128 + number, -number)}
"""The signal that has stopped a rank, by the rank's exit code."""


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
    gpus = _gpu_count() if accelerator == "auto" or wants_gpu else 0
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


def _gpu_count() -> int:
    if not any(Path(sign).exists() for sign in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")):
        return 0
    import torch

    return torch.cuda.device_count()


def launch(
    config_path: Path,
    ranks: int,
    *,
    module: str = "recapp.worker",
    port: int = 0,
    to_stderr: bool = False,
    grace: float = GRACE_TO_SAVE_SECONDS,
    reloads: bool = False,
) -> None:
    """Run `python -m <module> --config <config_path>` as `ranks` processes on this machine and wait
    for them.

    Args:
        config_path: The file of the job's settings, in the job's directory; the ranks' logs lie
            below that.
        ranks: The number of processes.
        module: A module whose `__main__` calls `rank_main`.
        port: The port at which the ranks meet; 0 takes a free one.
        to_stderr: Whether what rank 0 prints goes to standard error, because standard output is to
            be a document.
        grace: The seconds that ranks have to finish a checkpoint after a signal.
        reloads: Whether SIGHUP is a message for rank 0, as of a server, and stops nothing.

    Raises:
        RecappError: The error that a rank raised; its notes may hold a traceback.
        LaunchError: A rank died of something else, or the port is taken.
        Stopped: A signal to this process or to a rank has ended the run; all ranks are gone.
    """
    with loading():
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous.api import RendezvousError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _refuse_taken_port(port)
    run = uuid.uuid4().hex[:8]
    logs = config_path.parent / "ranks"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=run,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{ADDRESS}:{port}",
        local_addr=ADDRESS,
        max_restarts=0,
        signals_to_handle="",  # none: they are ours
        shutdown_timeout=int(GRACE_SECONDS),
        logs_specs=DefaultLogsSpecs(
            str(logs), redirects={rank: Std.ALL if rank else Std.NONE for rank in range(ranks)}
        ),
    )
    forwarding = Forwarding(run, grace, reloads)
    failed = None
    try:
        with (
            forwarding,
            _environment_of_ranks(ranks),
            _silent_elastic(),
            stdout_to_stderr(to_stderr),
        ):
            elastic_launch(config, sys.executable)("-u", "-m", module, "--config", str(config_path))
    except ChildFailedError as error:
        failed = _explanation(error.failures, logs, run)
    except Exception as error:
        if not forwarding.number:  # else it may be what elastic has made of `Stopped`
            if isinstance(error, RendezvousError):
                raise LaunchError(
                    f"the ranks could not meet at {ADDRESS}:{port} (launch.port): {error}"
                ) from error
            raise
    finally:
        if forwarding.number:
            _show_cursor()
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


def _refuse_taken_port(port: int) -> None:
    """Check that nobody listens at a port: elastic would take that for the ranks' meeting point.

    Raises:
        ConfigError: It is no port.
        LaunchError: It is taken.
    """
    if not isinstance(port, int) or not 0 <= port < 65536:
        raise ConfigError(f"launch.port={port}: give a number below 65536; 0 takes a free port")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ADDRESS, port))
        except OSError as error:
            raise LaunchError(
                f"launch.port={port}: {error.strerror}; choose another, or 0 for a free one"
            ) from None


@contextmanager
def _environment_of_ranks(ranks: int) -> Iterator[None]:
    """Set the environment that the ranks inherit; restore this process's own afterwards."""
    kept = dict(os.environ)
    for name in kept:
        if name in RANK_VARIABLES or name.startswith(RANK_PREFIXES):
            del os.environ[name]
    os.environ[PARENT_PID] = str(os.getpid())
    if not os.environ.get("OMP_NUM_THREADS"):
        os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    if not _resolves(socket.gethostname()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


@contextmanager
def _silent_elastic() -> Iterator[None]:
    """Silence elastic's loggers inside the `with`: they report each signal that elastic sends.

    Each logger has a level of its own, so each is silenced.
    """
    names = [
        name
        for name in logging.root.manager.loggerDict
        if name.startswith("torch.distributed.elastic")
    ]
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


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


# ---- which rank failed, and how


def _explanation(failures: Mapping[int, Any], logs: Path, run: str) -> RecappError | Stopped:
    """Return the error to raise for ranks that failed.

    Args:
        failures: Elastic's `ProcessFailure` by rank.
        logs: The directory of the ranks' logs, which are in `logs/<run>_*/`.
        run: The run id.
    """
    rank, failure = _first_to_fail(failures)
    if failure.exitcode in STOPPED_BY:
        return Stopped(STOPPED_BY[failure.exitcode])
    who = f"rank {rank} on {socket.gethostname()} (process {failure.pid})"
    if isinstance(failure.message, dict):
        message = failure.message["message"]
        calls = failure.message["extraInfo"]["py_callstack"]
        kind, _, text = message.partition(": ")
        known = getattr(errors, kind, None)
        if isinstance(known, type) and issubclass(known, RecappError):
            error = known(text)
            if tracebacks_wanted():
                error.add_note(calls)
            return error
        error = LaunchError(f"{who} failed: {message}")
        error.add_note(calls.rstrip())
        return error
    if is_full(logs):
        return full_disk_error(logs.parent)
    lines = last_lines(logs.glob(f"{run}_*/attempt_0/{rank}/std*.log"), LAST_LINES)
    known_fault = explain_output(lines, rank) if failure.exitcode == -signal.SIGABRT else None
    how = (
        f"exited with code {failure.exitcode}"
        if failure.exitcode > 0
        else f"was ended by {failure.signal_name()}"
    )
    hint = (
        "; the system does that to a process when memory runs out"
        if failure.exitcode == -signal.SIGKILL
        else ""
    )
    if (
        failure.exitcode == -signal.SIGABRT
        and (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY
    ):
        hint = (
            f"; memory is limited to {limit:,} bytes here (ulimit -v), and libraries end a "
            "process so when it runs out"
        )
    error = known_fault or LaunchError(f"{who} {how}{hint}")
    if lines and (known_fault is None or tracebacks_wanted()):
        error.add_note(f"the last lines of rank {rank}:\n{lines}")
    return error


def _first_to_fail(failures: Mapping[int, Any]) -> tuple[int, Any]:
    """Return the number of the rank that failed first, and its failure.

    Elastic knows whole seconds only, and a rank may be slow to exit: it often names a peer that was
    cut off instead. A rank that died without an error file cannot have died of a peer's failure:
    that is an exception, which it would have reported. Among those that reported, the first to
    write has failed first.
    """
    reported = [item for item in failures.items() if os.path.exists(item[1].error_file)]
    written = {rank: os.stat(failure.error_file) for rank, failure in reported}
    reported.sort(key=lambda item: written[item[0]].st_mtime_ns)
    ended = set(STOPPED_BY)  # by elastic, after another had failed, or stopped by a signal
    if reported and time.time() - written[reported[0][0]].st_mtime >= ELASTIC_KILLS_AFTER_SECONDS:
        ended.add(-signal.SIGKILL)
    silent = [
        item for item in failures.items() if item not in reported and item[1].exitcode not in ended
    ]
    first: tuple[int, Any] = [*silent, *reported, *failures.items()][0]
    return first
