"""Start ranks on this machine by one call, from a notebook, a script or a test:

    def work(rows):
        return dist.get_rank() * rows

    run_ranks(work, 10, ranks=2)  # [0, 10]

Each rank is a fork of this process that joins the others in a process group of gloo before it calls
the function.

    caller   waits for the ends of the ranks, reads their answers
      rank 0    function() -> pickle -> file
      rank 1    function() -> pickle -> file

A fork has all objects of the caller, so a notebook's cell may define the function, and no module is
imported again. But a fork lacks the caller's threads: a rank computes on one thread, because it
would wait for ever for the threads of OpenMP. Only results are pickled. Ranks and caller are one
program, so it is safe to unpickle them. A rank stays until all have answered, because other ranks
may still need it, and it dies with the caller. Ranks print where the caller prints.
"""

import math
import os
import pickle
import signal
import sys
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import current_process, get_context
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from setproctitle import setproctitle

from recapp.errors import ConfigError, LaunchError, RecappError
from recapp.processes.faults import describe_exit, explain_error
from recapp.processes.fork_server import replace_environment
from recapp.processes.launch import environments_of_ranks, meeting_point
from recapp.processes.rank_environment import external_rank
from recapp.processes.rank_process import set_defaults
from recapp.processes.stopping import die_with_parent, end_children
from recapp.transport.communicator import leave_process_group

SECONDS_FOR_THE_SOURCE = 2.0  # for the rank with an error of its own, before a peer that lost it
SENDABLE = "return numbers, text, tensors, or lists and dicts of these"
OPENMP = (
    "; GNU's OpenMP does that to a fork where it was used before the fork (in numba, "
    "NUMBA_THREADING_LAYER=workqueue does without it)"
)

Result = TypeVar("Result")


def run_ranks(
    function: Callable[..., Result], *args: Any, ranks: int = 2, timeout: float | None = None
) -> list[Result]:
    """Call a function on several ranks of this machine and return the result of each rank.

    Ranks are forks of this process. So the function may be defined anywhere, also in a cell of a
    notebook, and finds all objects of this process as they are at the start of the ranks. Changes
    stay in their rank. Each rank computes on one thread, is in a process group of gloo with the
    others, and begins with the random state of this process. A rank prints where this
    process prints. If one rank fails, or Ctrl-C ends this call, all ranks are ended.

    Args:
        function: The function that every rank calls; `torch.distributed.get_rank()` returns the
            number of the rank.
        args: The arguments of the function. They are not copied for the ranks, which share the
            memory of this process until they write.
        ranks: The number of ranks.
        timeout: The seconds after which ranks that have not returned are ended; None: never.

    Returns:
        The results in rank order. Results are pickled: a tensor is copied, and a sharded model
        cannot leave its rank.

    Raises:
        ConfigError: An argument has a value that is not allowed.
        LaunchError: This process cannot be forked, because it is a rank or has used a GPU. Or a
            rank raised an exception (the cause of this error; a note has the traceback), died, or
            reached the timeout. Errors of recapp itself keep their class.
    """
    if not isinstance(ranks, int) or ranks < 1:
        raise ConfigError(f"ranks={ranks!r}: must be a whole number of at least 1")
    if timeout is not None and not (isinstance(timeout, int | float) and 0 < timeout < math.inf):
        raise ConfigError(
            f"timeout={timeout!r}: must be a number of seconds above 0, or None for no limit"
        )
    if external_rank() is not None or dist.is_initialized():
        raise LaunchError(
            "run_ranks: this process is a rank already, or has a process group, and cannot "
            "start ranks; call the function itself, or leave the group "
            "(torch.distributed.destroy_process_group) first"
        )
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise LaunchError(
            "run_ranks: this process has used a GPU, and CUDA does not work in its forks; "
            "restart the process (the notebook's kernel) and start ranks before it uses a GPU"
        )
    with meeting_point(0) as port:
        environments = environments_of_ranks(ranks, port, uuid.uuid4().hex[:8])
        return call_in_forks(
            [partial(_in_group, each, function, args) for each in environments], timeout
        )


def _in_group(
    environment: dict[str, str], function: Callable[..., Result], args: tuple[Any, ...]
) -> Result:
    """Call a function as the rank that an environment names."""
    replace_environment(environment | {"OMP_NUM_THREADS": "1"})
    set_defaults()
    dist.init_process_group("gloo")
    result = function(*args)
    leave_process_group()
    return result


@dataclass(frozen=True)
class RaisedInRank:
    """The answer of a rank whose function has raised an exception.

    Args:
        text: The exception's type and text.
        pickled: The exception; empty where it cannot be pickled.
        traceback: Its traceback.
    """

    text: str
    pickled: bytes = b""
    traceback: str = ""


def call_in_forks(
    functions: Sequence[Callable[[], Result]], timeout: float | None = None
) -> list[Result]:
    """Call each function in a fork of this process, all at the same time.

    Args:
        functions: The function of each rank.
        timeout: The seconds for all functions together; None: no limit.

    Returns:
        The results, in the order of the functions.

    Raises:
        RecappError: A rank has raised this error; the text begins with the name of the rank.
        LaunchError: A rank has raised another exception, which is the cause; or a rank has died, or
            the time is up.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # else each fork would print the unflushed text again
    context = get_context("fork")
    world = len(functions)
    all_have_answered = context.Barrier(world)
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        # Python warns of threads, which the forks do not need
        warnings.simplefilter("ignore", DeprecationWarning)
        files = [Path(folder, str(number)) for number in range(world)]
        ranks = [
            context.Process(
                target=_be_rank,
                name=f"rank {number} of {world}",
                args=(functions[number], file, all_have_answered),
            )
            for number, file in enumerate(files)
        ]
        try:
            for rank in ranks:
                rank.start()
            failed = _first_failed(ranks, timeout)
            exit_code = failed.exitcode if failed else 0
        finally:
            for rank in ranks:
                if rank.pid is not None:  # it was started
                    rank.kill()
                    rank.join()
        if failed:
            _raise_what(failed.name, exit_code or 0, files[ranks.index(failed)])
        return [pickle.loads(file.read_bytes()) for file in files]


def _first_failed(ranks: Sequence[ForkProcess], timeout: float | None) -> ForkProcess | None:
    """Wait until all ranks have ended, or one has failed, and return that one.

    Raises:
        LaunchError: The time is up.
    """
    end = math.inf if timeout is None else time.monotonic() + timeout
    running: dict[Any, ForkProcess] = {rank.sentinel: rank for rank in ranks}
    while running:
        ended = wait(list(running), None if timeout is None else max(0.0, end - time.monotonic()))
        if not ended:
            names = " and ".join(rank.name for rank in running.values())
            raise LaunchError(
                f"timeout={timeout}: {names} took longer; give more seconds, or None for no limit"
            )
        for sentinel in ended:
            rank = running.pop(sentinel)
            rank.join()
            if rank.exitcode:
                return rank
    return None


def _raise_what(name: str, exit_code: int, file: Path) -> NoReturn:
    """Raise the exception of a rank in the caller: an error of recapp in its own class, any other
    as the cause of a `LaunchError`.
    """
    if not file.exists():
        hint = OPENMP if exit_code == -signal.SIGTERM else ""
        raise LaunchError(f"{name} {describe_exit(exit_code)}{hint}")
    raised: RaisedInRank = pickle.loads(file.read_bytes())
    cause = None
    with suppress(Exception):  # unpickling fails if `__init__` takes other arguments than `args`
        cause = pickle.loads(raised.pickled) if raised.pickled else None
    if isinstance(cause, RecappError):
        error: RecappError = type(cause)(f"{name}: {cause}")
    else:
        error = LaunchError(f"{name} {raised.text}")
    if raised.traceback:
        error.add_note(f"in {name}:\n{raised.traceback}")
    raise error from cause


def _be_rank(function: Callable[[], Any], file: Path, all_have_answered: Barrier) -> NoReturn:
    """Call a function in a new fork, leave its answer in a file, and end the process."""
    die_with_parent()
    signal.set_wakeup_fd(-1)  # the descriptor belongs to the caller
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C, the caller ends its ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    setproctitle(f"recapp.run_ranks {current_process().name}")
    torch.set_num_threads(1)
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # lines of ranks do not mix; a notebook has other streams
            stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    answer, failed = _answer_of(function)
    file.write_bytes(answer)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the function may have closed or replaced it
            stream.flush()
    if not failed:
        all_have_answered.wait()
    end_children()
    os._exit(int(failed))


def _answer_of(function: Callable[[], Any]) -> tuple[bytes, bool]:
    """Call a function, and return the pickle of its result or of a `RaisedInRank`, and whether it
    is the latter.
    """
    try:
        result = function()
    except BaseException as error:  # includes `sys.exit`
        explained = explain_error(error, 0) if isinstance(error, Exception) else error
        if getattr(explained, "secondhand", False):
            time.sleep(SECONDS_FOR_THE_SOURCE)
        pickled = b""
        with suppress(Exception):
            pickled = pickle.dumps(error)
        lines = "".join(traceback.format_exception(error))
        text = f"raised {type(error).__name__}: {error}"
        return pickle.dumps(RaisedInRank(text, pickled, lines)), True
    try:
        return pickle.dumps(result), False
    except Exception as error:
        kind = type(result).__name__
        text = f"returned a {kind}, which cannot be sent back ({error}); {SENDABLE}"
        return pickle.dumps(RaisedInRank(text)), True
