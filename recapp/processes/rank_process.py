"""The process of a rank: it ends in time, and reports the error that ends it.

The launcher (`launch.py`, torchrun or srun) sees only the exit code and the error file of a rank.
So a rank
- ends with its launcher, for any reason (the kernel kills it), and soon after a signal, even inside
  a collective that will never return (`stopping.py`);
- writes the exception that ends it to the file that its environment names, in torch elastic's
  format, and leaves at once.

A rank of `launch.py` may be a fork of a process that has loaded the libraries already
(`fork_server.py`). The libraries do not read the rank's environment again, so the rank applies it.

Where torchrun, srun or a person has started the ranks, the command itself is a rank
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
from collections.abc import Callable, Iterator, Mapping
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

from recapp.console import stop_printing
from recapp.errors import LaunchError
from recapp.processes.faults import explain_error
from recapp.processes.fork_server import DEFAULTS, replace_environment
from recapp.processes.rank_environment import RankInfo, external_rank, interface_towards, rank_info
from recapp.processes.stopping import (
    Stopped,
    die_with_parent,
    end_at_once,
    end_children,
    end_process,
    raising_if_stopped,
    take_signals,
)

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun and launch.py set it for each rank
THREAD_VARIABLES = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")  # the first one that is set counts
SECONDS_FOR_RANK_0 = 2  # head start of rank 0 in reporting an error that all ranks have
SECONDS_FOR_THE_SOURCE = 1  # head start of the rank with the error over ranks that lost this peer
TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class RankWork:
    """The work of a launched rank.

    Args:
        module: The module whose `run(settings, job directory)` does the work.
        config: The file of the settings, in the job's directory.
        environment: All environment variables of the rank.
    """

    module: str
    config: Path
    environment: dict[str, str]


class InheritedStream:
    """A file descriptor of the launcher. Each rank gets a duplicate at its start."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (DupFd(self.descriptor),)


def _detached(duplicate: Any) -> int:
    descriptor: int = duplicate.detach()
    return descriptor


def be_rank(orders: Connection, *streams: Any) -> NoReturn:
    """Do the work of a rank in a process that `launch` has started, and end the process.

    After an exception, write the error file and leave with code 1, without waiting for threads or
    peers. After a signal, leave with 128 + the signal's number.

    Args:
        orders: The pipe that brings the `Work`. A closed pipe means that there is no work.
        streams: The file descriptors that become standard output and standard error.
    """
    _leave_with_launcher()
    try:
        work: RankWork = orders.recv()
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
    """Make the kernel kill this process when the fork server or the launcher ends."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # the handler was the fork server's
    die_with_parent()
    launcher = parent_process()
    if launcher is not None and not launcher.is_alive():  # it ended before `die_with_parent`
        os._exit(TERMINATED)


def _become(work: RankWork) -> None:
    """Replace the fork server's environment, threads and title by those of the rank."""
    multiprocessing.set_start_method(None, force=True)  # data workers start by Python's default
    rank, world = (work.environment[name] for name in ("RANK", "WORLD_SIZE"))
    # before the environment changes: the title is written into the memory beside it
    setproctitle(f"{work.module} rank {rank} of {world} in {work.config.parent}")
    replace_environment(work.environment)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a shell may have closed it
            stream.reconfigure(line_buffering=True)
    if "torch" in sys.modules and (threads := threads_of(work.environment)):
        import torch

        torch.set_num_threads(threads)


def threads_of(environment: Mapping[str, str]) -> int | None:
    """Return the number of compute threads that an environment sets; None where it sets none.
    OpenMP takes one number for each level of nesting: the first one counts.
    """
    for name in THREAD_VARIABLES:
        number = environment.get(name, "").partition(",")[0]
        if number.isdecimal() and int(number):
            return int(number)
    return None


@contextmanager
def as_rank(directory: Path | None = None) -> Iterator[None]:
    """Make this process a rank inside the `with`: it handles signals, and writes an exception to
    the error file of its launcher.

    Args:
        directory: The directory of the run.

    Raises:
        Stopped: A signal has ended the work.
        LaunchError: Ranks were started by hand without the variables of their meeting point, or the
            reader of standard output has ended.
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
            "standard output is a pipe whose reader has ended: write it to a file, or keep the "
            "reader running"
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
    """Set the number of threads and gloo's interface where the launcher has not set them."""
    cores = len(os.sched_getaffinity(0))
    # the launcher may have divided the cores among the ranks already
    bound = cores < (os.cpu_count() or cores)
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(cores if bound else max(1, cores // info.local_world))
    )
    if interface := interface_towards(info):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def write_error_file(error: BaseException, cause: BaseException | None = None) -> None:
    """Report the error that ends this rank to the launcher, if the launcher has named a file.

    Keep only the first report. Write the whole file or no file, because torch elastic cannot read a
    partial one. A full disk gets no file.

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
        # the class in `recapp.errors`, which the launcher can make again from its name
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
    """Wait until rank 0 reports an error that all ranks may have, and its launcher ends this rank.

    Only ranks of torchrun, of srun or of a person call this function: one line is enough for an
    error of all ranks. Under torchrun the first rank of each host reports, because each host has a
    terminal; else rank 0 reports. The function returns in the reporting rank at once, and in the
    others if nothing ends them in time; the caller then reports the error.
    """
    rank = os.environ.get("LOCAL_RANK") if "TORCHELASTIC_RUN_ID" in os.environ else external_rank()
    if int(rank or 0):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(SECONDS_FOR_RANK_0)


def leave(main: Callable[[], int]) -> NoReturn:
    """Run a command, and end its process with its exit code.

    A rank that has failed waits neither for threads nor for peers, because peers wait for it.

    Args:
        main: The command. It fails without a word if the reader of standard output has ended.
    """
    try:
        code = main()
    except BrokenPipeError:
        stop_printing()
        code = 1
    if code and external_rank() is not None:
        end_at_once(code)
    end_process(code)
