"""A rank's side of being launched: it ends in time, and reports what went wrong.

The parent (`launch.py`, torchrun or srun) sees of a rank its exit code and an error file. So a rank
- dies with its parent, however that ends (the kernel sees to it), and soon after a signal, even
  inside a collective that will never return (`stopping.py`);
- writes the exception that ends it to the file that torch elastic names, in elastic's format, and
  leaves at once.

Where others than `launch.py` have started the ranks, the command itself is a rank
(`rank_environment.py`).
"""

import faulthandler
import json
import os
import signal
import time
import traceback
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import yaml  # type: ignore[import-untyped]

from recapp.errors import LaunchError
from recapp.processes.data_workers import die_with_parent, end_children
from recapp.processes.faults import explain_error
from recapp.processes.rank_environment import RankInfo, external_rank, interface_towards, rank_info
from recapp.processes.startup_and_exit import end_at_once, end_process
from recapp.processes.stopping import Stopped, raising_if_stopped, take_signals

# else pyarrow's allocator takes 1 GiB at once, which a limit on memory counts whether used or not
ARROW_RESERVE_KIB = "65536"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by elastic for each rank
PARENT_PID = "RECAPP_PARENT_PID"
SECONDS_FOR_RANK_0 = 2  # to report an error that all ranks have, before others do
SECONDS_FOR_THE_SOURCE = 1  # for the rank whose own error it is to report it, before others do
TERMINATED = 128 + signal.SIGTERM

Body = Callable[[dict[str, Any], Path], None]
"""The work of a rank: a function of the settings and of the job's directory."""


def rank_main(body: Body) -> NoReturn:
    """Run the work of a rank as the `__main__` of a module that `launch` starts; end the process.

    It reads the settings from the file that the command line names and calls `body(settings, job
    directory)`. An exception of the body goes to the error file, and the process leaves with code 1
    without waiting for threads or peers; after a signal that ended its work, with 128 + the
    signal's number.
    """
    leave_with_parent()
    parser = ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    path: Path = parser.parse_args().config
    try:
        with as_rank(path.parent):
            body(yaml.safe_load(path.read_text()), path.parent)
    except Stopped as stopped:
        end_at_once(128 + stopped.number)
    except Exception:
        if ERROR_FILE not in os.environ:
            raise
        end_at_once(1)
    end_process(0)


def leave_with_parent() -> None:
    """Have the kernel kill this process when its parent is gone, whatever ended that.

    Call it before torch is imported, which takes seconds.
    """
    die_with_parent()
    parent = os.environ.get(PARENT_PID)
    if parent is not None and os.getppid() != int(parent):  # it went before the kernel knew
        os._exit(TERMINATED)


@contextmanager
def as_rank(directory: Path | None = None) -> Iterator[None]:
    """Make this process a rank inside the `with`: it takes signals, and writes an exception where
    torch elastic looks for it.

    Args:
        directory: The directory of the run.

    Raises:
        Stopped: A signal has ended the work.
        LaunchError: Ranks were started by hand without the environment that they need to meet; or
            nobody reads what this one prints.
    """
    faulthandler.enable()
    take_signals(write_error_file)
    os.environ.setdefault("MIMALLOC_ARENA_RESERVE", ARROW_RESERVE_KIB)
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
    """Report to torch elastic why this rank ends, if elastic has started it.

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
