"""A rank's side of being started: dying in time, and saying what went wrong.

The parent (`launch.py`, torchrun or srun) sees of a rank its exit code and an error file. So a rank
here
- dies with its parent, however that ends (the kernel sees to it), and soon after a signal, even
  inside a collective that will never return (`stopping.py`);
- writes the exception that ends it to the file that torch elastic names, in elastic's format, and
  leaves at once.

With ranks started from outside the command itself is a rank (`place.py`).
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
from recapp.processes.faults import in_words
from recapp.processes.rank_environment import Place, interface_towards, outside_rank, place_of
from recapp.processes.startup_and_exit import end_at_once, end_process
from recapp.processes.stopping import Stopped, heeding, take_signals

# pyarrow's allocator takes 1 GiB at once else, which a limit on memory counts whether used or not
ARROW_RESERVE_KIB = "65536"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by elastic for each rank
PARENT_PID = "RECAPP_PARENT_PID"
SECONDS_FOR_RANK_0 = 2  # to say it first, where a mistake is every rank's
SECONDS_FOR_THE_SOURCE = 1  # the rank whose own error it is, to say it first
TERMINATED = 128 + signal.SIGTERM

Body = Callable[[dict[str, Any], Path], None]


def rank_main(body: Body) -> NoReturn:
    """The `__main__` of a module that `launch` starts: reads the settings and runs `body(settings,
    job directory)`.

    An exception of the body goes to the error file, and the process leaves with code 1 without
    waiting for threads or peers; after a signal that ended its work, with 128 + the signal's
    number.
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
    """Has the kernel kill this process when its parent is gone, whatever ended that. Call it first:
    torch takes seconds to import.
    """
    die_with_parent()
    parent = os.environ.get(PARENT_PID)
    if parent is not None and os.getppid() != int(parent):  # it went before the kernel knew
        os._exit(TERMINATED)


@contextmanager
def as_rank(directory: Path | None = None) -> Iterator[None]:
    """Inside, this process is a rank: it takes signals, and an exception is written where torch
    elastic looks for it.

    Args:
        directory: Of the run.

    Raises:
        Stopped: By a signal.
        LaunchError: Ranks were started by hand, without what they need to meet; or nobody reads
            what this one prints.
    """
    faulthandler.enable()
    take_signals(write_error_file)
    os.environ.setdefault("MIMALLOC_ARENA_RESERVE", ARROW_RESERVE_KIB)
    try:
        if place := place_of():
            _fit_in(place)
        with heeding():
            yield
    except BrokenPipeError as error:
        unread = LaunchError(
            "nobody reads standard output any more (a pipe whose reader has ended): send it "
            "to a "
            "file, or keep the reader"
        )
        write_error_file(unread)
        raise unread from error
    except Stopped as stopped:
        write_error_file(stopped)
        raise
    except Exception as error:
        said = in_words(error, outside_rank() or 0, directory)
        if getattr(said, "secondhand", False):
            time.sleep(SECONDS_FOR_THE_SOURCE)
        write_error_file(said, error)
        if said is error:
            raise
        raise said from error
    finally:
        end_children()


def _fit_in(place: Place) -> None:
    """What torchrun and `launch` leave to the ranks, and srun and a person forget."""
    cores = len(os.sched_getaffinity(0))
    bound = cores < (os.cpu_count() or cores)  # whoever started us has divided them already
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(cores if bound else max(1, cores // place.local_world))
    )
    if interface := interface_towards(place):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def write_error_file(error: BaseException, cause: BaseException | None = None) -> None:
    """Tells torch elastic why this rank ends, if elastic has started it; the first to tell is
    heard.

    The file is there whole or not at all: elastic cannot read half of one. On a full disk there is
    none.

    Args:
        error: What is told.
        cause: Whose traceback is told, by default its own.
    """
    path = os.environ.get(ERROR_FILE)
    if path and not os.path.exists(path):
        calls = {
            "py_callstack": "".join(traceback.format_exception(cause or error)),
            "timestamp": str(int(time.time())),
        }
        # that its reader knows
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


def let_rank_0_speak() -> None:
    """Waits, on ranks started from outside, for the one whose line is enough; it ends the others
    before they repeat it.

    That is the first rank of each host under torchrun, as each host has a terminal, else rank 0. If
    the mistake was not that rank's as well, this one is still here afterwards, and speaks.
    """
    rank = os.environ.get("LOCAL_RANK") if "TORCHELASTIC_RUN_ID" in os.environ else outside_rank()
    if int(rank or 0):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(SECONDS_FOR_RANK_0)


def leave(code: int) -> NoReturn:
    """Ends the process of a command; a rank that has failed does not wait for threads and for peers
    that wait for it.
    """
    if code and outside_rank() is not None:
        end_at_once(code)
    end_process(code)
