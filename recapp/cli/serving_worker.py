"""Run a rank of a server whose model several ranks hold together.

    rank 0            HTTP -> requests -> batches -> scores      recapp/cli/server.py
    the other ranks   the parts of the tables that they hold     recapp/inference/led_ranks.py

`python -m recapp.serve ranks=N` starts this module on every rank; under torchrun and srun it calls
`run` in the rank's own process.
"""

import signal
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from recapp import console
from recapp.cli import server
from recapp.cli.model_loading import load_on
from recapp.errors import RankError
from recapp.inference.led_ranks import Leader, follow
from recapp.inference.scorer import Scorer
from recapp.processes.rank_environment import rank_info
from recapp.processes.rank_process import write_error_file
from recapp.processes.start_and_end import end_at_once, freeze_loaded_objects
from recapp.processes.stopping import listen
from recapp.run.commands import Serve, recipe_of
from recapp.transport.communicator import leave_process_group
from recapp.transport.join_ranks import join_ranks

SECONDS_TO_END = 3.0  # to answer pending requests after the ranks are lost


def run(plain: dict[str, Any], job_dir: Path | None = None) -> None:
    """Answer requests on rank 0, together with the other ranks, until a signal comes.

    Args:
        plain: The settings of `recapp.serve`, as plain values.
        job_dir: The directory of the ranks' logs; nothing is written there. None if the ranks were
            started from outside.

    Raises:
        RecappError: The model cannot be loaded, or the ranks have lost each other.
    """
    settings: Serve = recipe_of(plain, "serve")
    torch.set_num_threads(settings.threads)
    here = rank_info()
    assert here is not None
    device = server.device_of(settings, here)
    words, tables, pulses = join_ranks(here, device)
    freeze_loaded_objects()

    def load() -> Scorer:
        return load_on(
            tables,
            settings.artefact,
            trust=settings.trust,
            trust_compiled=settings.trust_compiled,
        )

    if words.rank:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # rank 0 decides when to load a model
        listen(lambda number: None, seconds_to_stop=float("inf"))  # and when all ranks end
        pulses.show()
        follow(words, load)
        pulses.end()
    else:
        end = partial(_end_soon, launched=job_dir is not None)
        lead(settings, Leader(words, end, pulses=pulses), load)
    leave_process_group()


def lead(settings: Serve, leader: Leader, load: Any) -> None:
    """Answer requests until a signal comes, or the ranks have lost each other.

    Raises:
        RankError: The ranks have lost each other.
    """
    try:
        server.serve(settings, lambda: leader.load(load), leader)
    finally:
        with suppress(Exception):  # the error that ended the server is the one to raise
            leader.end()
    if leader.failure is not None:
        raise leader.failure


def _end_soon(error: RankError, launched: bool) -> None:
    """End this process by force if it does not end in `SECONDS_TO_END`.

    The server ends when it sees the leader's failure, but a thread may wait for a rank that never
    answers.

    Args:
        error: The reason.
        launched: Whether `recapp.serve` started the ranks; it then prints the error.
    """

    def end() -> None:
        write_error_file(error)
        if not launched:
            console.note(f"error: {error}")
        end_at_once(1)

    timer = threading.Timer(SECONDS_TO_END, end)
    timer.daemon = True
    timer.start()
