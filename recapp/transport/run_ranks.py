"""Start ranks on this machine by one call, from a notebook, a script or a test:

    def work(rows):
        return dist.get_rank() * rows

    run_ranks(work, 10, ranks=2)  # [0, 10]

Each rank is a fork of this process (`recapp/processes/forked_calls.py`) that joins the others in a
process group of gloo before it calls the function.
"""

import math
import uuid
from collections.abc import Callable
from functools import partial
from numbers import Integral
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from recapp.errors import ConfigError, LaunchError
from recapp.processes.fork_server import replace_environment
from recapp.processes.forked_calls import call_in_forks
from recapp.processes.launch import environments_of_ranks, meeting_point
from recapp.processes.rank_environment import started_externally
from recapp.transport.communicator import leave_process_group

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
    if not callable(function):
        raise ConfigError(
            f"function={function!r}: give the function that every rank calls, not its result"
        )
    if not _is_whole(ranks) or ranks < 1:
        raise ConfigError(f"ranks={ranks!r}: must be a whole number of at least 1")
    if timeout is not None and not (_is_number(timeout) and 0 < timeout < math.inf):
        raise ConfigError(
            f"timeout={timeout!r}: must be a number of seconds above 0, or None for no limit"
        )
    _check_this_process()
    with meeting_point(0) as port:
        environments = environments_of_ranks(int(ranks), port, uuid.uuid4().hex[:8])
        return call_in_forks(
            [partial(_in_group, each, function, args) for each in environments], timeout
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_this_process() -> None:
    """Check that this process can be forked into ranks.

    Raises:
        LaunchError: This process is a rank, or has used a GPU.
    """
    if started_externally() or dist.is_initialized():
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


def _in_group(
    environment: dict[str, str], function: Callable[..., Result], args: tuple[Any, ...]
) -> Result:
    """Call a function as the rank that an environment names."""
    replace_environment(environment | {"OMP_NUM_THREADS": "1"})
    dist.init_process_group("gloo")
    result = function(*args)
    leave_process_group()
    return result
