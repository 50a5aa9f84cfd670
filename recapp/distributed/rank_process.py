"""A rank's side of being started: dying in time, and saying what went wrong.

The parent (`launch.py`, torchrun or srun) sees of a rank its exit code and an error file. So a rank here
- dies with its parent, however that ends (the kernel sees to it), and soon after SIGTERM, even inside a collective that will
  never return;
- writes the exception that ends it to the file that torch elastic names, in elastic's format, and leaves at once.

It also answers who started this process: with ranks started from outside the command itself is a rank.
"""

import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from recapp.errors import LaunchError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by elastic for each rank
PARENT_PID = "RECAPP_PARENT_PID"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
SECONDS_AFTER_SIGTERM = 8  # for a handler to end the run in its own way; elastic waits for 10
TERMINATED = 128 + signal.SIGTERM

Body = Callable[[dict[str, Any], Path], None]


def rank_main(body: Body) -> None:
    """The `__main__` of a module that `launch` starts: reads the settings and runs `body(settings, job directory)`.

    An exception of the body goes to the error file, and the process leaves with code 1 without waiting for threads or peers.
    """
    die_with_parent()
    parser = ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    path: Path = parser.parse_args().config
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent hears of Ctrl-C as well, and says what there is to say
    try:
        with as_rank():
            body(yaml.safe_load(path.read_text()), path.parent)
    except Exception:
        if ERROR_FILE not in os.environ:
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def die_with_parent() -> None:
    """Has the kernel kill this process when its parent is gone, whatever ended that. Call it first: torch takes seconds to import."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.environ.get(PARENT_PID)
    if parent is not None and os.getppid() != int(parent):  # it went before the kernel knew
        os._exit(TERMINATED)


@contextmanager
def as_rank() -> Iterator[None]:
    """Inside, this process is a rank: it does not outlive SIGTERM, and an exception is written where torch elastic looks for it."""
    faulthandler.enable()
    _leave_after_sigterm()
    try:
        yield
    except Exception as error:
        if path := os.environ.get(ERROR_FILE):
            calls = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
            message = {"message": f"{type(error).__name__}: {error}", "extraInfo": calls}
            Path(path).write_text(json.dumps({"message": message}))
        raise


def _leave_after_sigterm() -> None:
    """Ends the process some seconds after SIGTERM, if its handler has not.

    A Python handler runs between two lines of the main thread, and a rank whose peers are gone may never come back from a
    collective. The kernel's signal wakes this thread at once.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a data worker's signals are not ours

    def watch() -> None:
        while os.read(reading, 1)[0] != signal.SIGTERM:
            pass
        time.sleep(SECONDS_AFTER_SIGTERM)
        os._exit(TERMINATED)

    threading.Thread(target=watch, name="leave after SIGTERM", daemon=True).start()


# ---- started from outside?


def outside_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """This process's rank, if torchrun, srun or a person has started it as one of several; else None."""
    if "TORCHELASTIC_RUN_ID" in environ and "RANK" in environ:
        return int(environ["RANK"])
    if _started_by_srun(environ):
        return int(environ["SLURM_PROCID"])
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return int(environ["RANK"])
    return None


def started_outside(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a rank already, so that none must be started."""
    return outside_rank(environ) is not None


def _started_by_srun(environ: Mapping[str, str]) -> bool:
    """srun, not the script that sbatch runs or a shell in an allocation: those have the variables, but are one process."""
    script = environ.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environ
    shell = environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return int(environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environ and not script and not shell


def shared_run_name(environ: Mapping[str, str] = os.environ) -> str:
    """One name for the run that all ranks started from outside agree on: they share its directory.

    `RECAPP_RUN_ID` if given; under torchrun rank 0's clock, told to the others through the agent's store (the run id of torchrun is
    often just `none`); under srun the numbers of job and step.

    Raises:
        LaunchError: Ranks started by hand have nothing in common but what they are given.
    """
    if run := environ.get("RECAPP_RUN_ID"):
        return run
    now = datetime.now().strftime("%Y-%m-%d/%H-%M-%S")
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from torch._C._distributed_c10d import TCPStore

        store = TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False)
        key = f"recapp/run_name/{environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        if outside_rank(environ) == 0:
            store.set(key, now)
        return str(store.get(key).decode())
    if _started_by_srun(environ):
        return "_".join(["slurm", environ.get("SLURM_JOB_ID", "0"), environ.get("SLURM_STEP_ID", "0")])
    if environ.get("WORLD_SIZE") == "1":
        return now
    raise LaunchError("ranks started by hand need one directory for all: give hydra.run.dir=DIR or RECAPP_RUN_ID=NAME")
