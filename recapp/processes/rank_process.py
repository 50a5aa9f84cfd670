"""A rank's side of being launched: it ends in time, and reports what went wrong.

The launcher (`launch.py`, torchrun or srun) sees of a rank its exit code and an error file. So a
rank
- dies with its launcher, however that ends (the kernel sees to it), and soon after a signal, even
  inside a collective that will never return (`stopping.py`);
- writes the exception that ends it to the file that its environment names, in torch elastic's
  format, and leaves at once.

A rank of `launch.py` may be a fork of a process that has loaded its libraries already
(`fork_server.py`): what they would read of a rank's environment when they are loaded, it sets.

Where others than `launch.py` have started the ranks, the command itself is a rank
(`rank_environment.py`).
"""

import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from io import TextIOWrapper
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, NoReturn

import yaml  # type: ignore[import-untyped]
from setproctitle import setproctitle

from recapp.errors import LaunchError
from recapp.processes.data_workers import die_with_parent, end_children
from recapp.processes.faults import explain_error
from recapp.processes.fork_server import DEFAULTS, replace_environment
from recapp.processes.rank_environment import RankInfo, external_rank, interface_towards, rank_info
from recapp.processes.startup_and_exit import end_at_once, end_process
from recapp.processes.stopping import Stopped, raising_if_stopped, take_signals

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set for each rank by torchrun, and by launch.py alike
SECONDS_FOR_RANK_0 = 2  # to report an error that all ranks have, before others do
SECONDS_FOR_THE_SOURCE = 1  # for the rank whose own error it is to report it, before others do
TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Work:
    """What a launched rank has to do.

    Args:
        module: The module whose `run(settings, job directory)` is the work.
        config: The file of the settings, in the job's directory.
        environment: All variables of the rank.
    """

    module: str
    config: Path
    environment: dict[str, str]


class InheritedStream:
    """A file descriptor of the launcher that a rank gets as its own when it is started."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (DupFd(self.descriptor),)


def _detached(duplicate: Any) -> int:
    descriptor: int = duplicate.detach()
    return descriptor


def be_rank(orders: Connection, *streams: Any) -> NoReturn:
    """Do the work of a rank in a process that `launch` has started; end the process.

    An exception of the work goes to the error file, and the process leaves with code 1 without
    waiting for threads or peers; after a signal that ended its work, with 128 + the signal's
    number.

    Args:
        orders: The pipe that brings the `Work`. Its end is the end of the run.
        streams: The file descriptors that become standard output and standard error.
    """
    _leave_with_launcher()
    try:
        work: Work = orders.recv()
    except EOFError:  # no work: the launcher was stopped while it started ranks
        os._exit(TERMINATED)
    for number, descriptor in enumerate(streams, 1):
        os.dup2(descriptor, number)
    for descriptor in {*streams} - {1, 2}:
        os.close(descriptor)
    os.setsid()
    _become(work)
    directory = work.config.parent
    try:
        with as_rank(directory):
            import_module(work.module).run(yaml.safe_load(work.config.read_text()), directory)
    except Stopped as stopped:
        end_at_once(128 + stopped.number)
    except Exception:
        end_at_once(1)
    end_process(0)


def _leave_with_launcher() -> None:
    """Have the kernel kill this process when the fork server or the launcher is gone."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # the fork server's own
    die_with_parent()
    launcher = parent_process()
    if launcher is not None and not launcher.is_alive():  # it went before the kernel knew
        os._exit(TERMINATED)


def _become(work: Work) -> None:
    """Take a rank's environment, threads and title, in place of the fork server's."""
    multiprocessing.set_start_method(None, force=True)  # of data workers: Python's own choice
    rank, world = (work.environment[name] for name in ("RANK", "WORLD_SIZE"))
    # before the environment is moved, beside which the title is written
    setproctitle(f"{work.module} rank {rank} of {world} in {work.config.parent}")
    replace_environment(work.environment)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a shell may have closed it
            stream.reconfigure(line_buffering=True)
    if "torch" in sys.modules and (threads := threads_of(work.environment)):
        import torch

        torch.set_num_threads(threads)


def threads_of(environment: Mapping[str, str]) -> int | None:
    """Return how many threads a fresh process of this environment computes with; None where
    nothing says so. OpenMP has a number for each level of nesting: the first one counts.
    """
    for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        number = environment.get(name, "").partition(",")[0]
        if number.isdecimal() and int(number):
            return int(number)
    return None


@contextmanager
def as_rank(directory: Path | None = None) -> Iterator[None]:
    """Make this process a rank inside the `with`: it takes signals, and writes an exception where
    its launcher looks for it.

    Args:
        directory: The directory of the run.

    Raises:
        Stopped: A signal has ended the work.
        LaunchError: Ranks were started by hand without the environment that they need to meet; or
            nobody reads what this one prints.
    """
    faulthandler.enable()
    take_signals(write_error_file)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        if info := rank_info():
            _set_defaults(info)
        with raising_if_stopped():
            yield
    except BrokenPipeError as error:
        unread = LaunchError(
            "nobody reads standard output any more (a pipe whose reader has ended): send it "
            "to a file, or keep the reader"
        )
        write_error_file(unread)
        raise unread from error
    except Stopped as stopped:
        write_error_file(stopped)
        raise
    except Exception as error:
        explained = explain_error(error, external_rank() or 0, directory)
        if getattr(explained, "secondhand", False):
            time.sleep(SECONDS_FOR_THE_SOURCE)
        write_error_file(explained, error)
        if explained is error:
            raise
        raise explained from error
    finally:
        end_children()


def _set_defaults(info: RankInfo) -> None:
    """Set the number of threads and gloo's interface where whoever started the ranks has not."""
    cores = len(os.sched_getaffinity(0))
    # whoever started the ranks may have divided the cores among them already
    bound = cores < (os.cpu_count() or cores)
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(cores if bound else max(1, cores // info.local_world))
    )
    if interface := interface_towards(info):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def write_error_file(error: BaseException, cause: BaseException | None = None) -> None:
    """Report to the launcher why this rank ends, if it has named a file for that.

    Only the first report is kept. The file is there whole or not at all, as elastic cannot read
    half of one; on a full disk there is none.

    Args:
        error: The error whose type and text are reported.
        cause: The exception whose traceback is reported; by default `error` itself.
    """
    path = os.environ.get(ERROR_FILE)
    if path and not os.path.exists(path):
        calls = {
            "py_callstack": "".join(traceback.format_exception(cause or error)),
            "timestamp": str(int(time.time())),
        }
        # the base class that the reader knows
        kind = next(
            (c for c in type(error).__mro__ if c.__module__ == "recapp.errors"), type(error)
        )
        text = json.dumps({"message": {"message": f"{kind.__name__}: {error}", "extraInfo": calls}})
        unfinished = Path(f"{path}.tmp")
        try:
            unfinished.write_text(text)
            unfinished.replace(path)
        except OSError:
            with suppress(OSError):
                unfinished.unlink()


def wait_for_rank_0_error() -> None:
    """Wait until rank 0 has reported an error that all ranks may have, and has ended this process.

    For ranks that others than `launch.py` have started: one line is enough for an error of all. The
    rank that reports is the first one of each host under torchrun, as each host has a terminal,
    else rank 0. If it does not have the error itself, this function returns, and the caller has to
    report.
    """
    rank = os.environ.get("LOCAL_RANK") if "TORCHELASTIC_RUN_ID" in os.environ else external_rank()
    if int(rank or 0):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(SECONDS_FOR_RANK_0)


def leave(code: int) -> NoReturn:
    """End the process of a command with an exit code.

    A rank that has failed does not wait for threads, nor for peers that wait for it.
    """
    if code and external_rank() is not None:
        end_at_once(code)
    end_process(code)
