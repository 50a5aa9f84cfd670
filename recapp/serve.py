"""`python -m recapp.serve artefact=DIR port=N`: answer requests for scores over HTTP.

    DIR -> model, checked -> socket -> requests -> scores, until a signal comes

    ranks=N   rank 0            HTTP -> requests -> batches -> scores
              the other ranks   the tables that they hold    recapp/inference/scorer.py

`recapp/serving/app.py` describes requests and answers. Under torchrun and srun each rank runs the
command, which calls `run` in the same process.
"""

if __name__ == "__main__":
    from recapp.processes.stopping import end_on_signals

    end_on_signals()  # before the imports below, which take a while

import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

from recapp import console
from recapp.cli.job import Job
from recapp.errors import ConfigError, RankError
from recapp.processes.launch import check_gpus, launch
from recapp.processes.rank_environment import device_of, rank_info
from recapp.processes.rank_process import as_rank, leave, write_error_file
from recapp.processes.stopping import Stopped, end_at_once, freeze_loaded_objects, listen, loading
from recapp.run.recipe import Serve, recipe_of
from recapp.serving.limits import Limits
from recapp.settings.records import to_plain

if TYPE_CHECKING:
    from recapp.inference.scorer import Leader, Scorer
    from recapp.serving.served_model import Served

NEEDED = ("prometheus_client", "starlette", "uvicorn")
SECONDS_TO_ANSWER = 5.0  # after timeout_s, during which pending requests are answered
SECONDS_TO_END = 3.0  # to answer pending requests after the ranks are lost
SWITCH_SECONDS = 0.0005  # of a thread: requests arrive while the worker computes in Python
COLUMNS = (console.Column("what", "serving"), console.Column("value", ""))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments; None takes those of the process.
    """
    from recapp.cli import command  # imports Hydra

    return command.run("serve", serve, writes=False, argv=argv)


def serve(recipe: Serve, job: Job) -> None:
    """Answer requests until a signal comes.

    Args:
        recipe: The settings of the command.
        job: The job.

    Raises:
        ConfigError: The extra is not installed, or a setting is wrong (`check`).
        RecappError: The model cannot be loaded.
    """
    for name in NEEDED:
        if find_spec(name) is None:
            raise ConfigError(
                f"recapp.serve needs {name}, which is not installed: in the clone of recapp, "
                'run pip install ".[serve]"'
            )
    if (here := rank_info()) is not None:
        with as_rank():
            return run(to_plain(replace(recipe, ranks=here.world)))
    check(recipe)
    if recipe.ranks > 1:
        return _serve_on_ranks(recipe)
    import torch

    from recapp.model_loading import load_model

    torch.set_num_threads(recipe.threads)
    freeze_loaded_objects()
    load = partial(
        load_model,
        recipe.artefact,
        device_of(recipe.device, None),
        trust=recipe.trust,
        trust_compiled=recipe.trust_compiled,
    )
    answer(recipe, load)


def check(settings: Serve) -> None:
    """Check the model, address and GPUs of a server, before mistakes end it some seconds later.

    Args:
        settings: The settings of the command.

    Raises:
        ConfigError: There are too few GPUs, or the address does not exist or is taken.
        RecappError: The model does not exist.
    """
    from recapp.serving import http
    from recapp.stored.stored_model import read_stored

    if settings.device == "cuda":
        check_gpus(settings.ranks)
    read_stored(settings.artefact)
    http.bound_socket(settings.host, settings.port).close()


def _serve_on_ranks(settings: Serve) -> None:
    console.note(f"starting {settings.ranks} ranks")
    with TemporaryDirectory() as folder:
        path = Path(folder, "settings.yaml")
        path.write_text(yaml.safe_dump(to_plain(settings)))
        with suppress(Stopped):  # a server ends by a signal
            launch(
                path,
                settings.ranks,
                module="recapp.serve",
                grace=settings.timeout_s + SECONDS_TO_ANSWER,
                reloads=True,
            )


# ---- each rank


def run(settings: dict[str, Any], job_dir: Path | None = None) -> None:
    """Answer requests on rank 0, together with the other ranks, until a signal comes.

    Args:
        settings: The settings of the command, as plain values.
        job_dir: The directory of the ranks' logs; nothing is written there. None if the ranks were
            started from outside.

    Raises:
        RecappError: The model cannot be loaded, or the ranks have lost each other.
    """
    import torch

    from recapp.inference.scorer import Leader, follow
    from recapp.model_loading import load_on
    from recapp.transport.communicator import leave_process_group
    from recapp.transport.join_ranks import join_ranks

    recipe: Serve = recipe_of(settings, "serve")
    torch.set_num_threads(recipe.threads)
    here = rank_info()
    assert here is not None
    words, tables, pulses = join_ranks(here, device_of(recipe.device, here))
    freeze_loaded_objects()
    load = partial(
        load_on,
        tables,
        recipe.artefact,
        trust=recipe.trust,
        trust_compiled=recipe.trust_compiled,
    )
    if words.rank:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # rank 0 decides when to load a model
        listen(lambda number: None, seconds_to_stop=float("inf"))  # and when all ranks end
        pulses.show()
        follow(words, load)
        pulses.end()
    else:
        end = partial(_end_soon, launched=job_dir is not None)
        _lead(recipe, Leader(words, end, pulses=pulses), load)
    leave_process_group()


def _lead(settings: Serve, leader: "Leader", load: "Callable[[], Scorer]") -> None:
    """Answer requests until a signal comes, or the ranks have lost each other.

    Raises:
        RankError: The ranks have lost each other.
    """
    try:
        answer(settings, lambda: leader.load(load), leader)
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


# ---- the process that gets the requests


def answer(settings: Serve, load: "Callable[[], Scorer]", leader: "Leader | None" = None) -> None:
    """Answer requests until a signal comes, or the ranks have lost each other.

    Args:
        settings: The settings of the command.
        load: Loads the model; called again for each reload.
        leader: The leader of the ranks, if several hold the model.

    Raises:
        ConfigError: The address does not exist, or is taken.
        RecappError: The model cannot be loaded.
    """
    from recapp.serving import http

    listener = http.bound_socket(settings.host, settings.port)
    with listener:
        server, served = _server(settings, load, leader)
        address = http.address_of(listener)
        http.serve(server, listener, lambda: _say(settings, address, served))
    console.note("ended")


def _server(settings: Serve, load: "Callable[[], Scorer]", leader: "Leader | None") -> Any:
    """Return the routes, and the first model that they answer with."""
    from recapp.serving.app import Server
    from recapp.serving.counts import Counts
    from recapp.serving.served_model import Batcher, ModelInService

    sys.setswitchinterval(SWITCH_SECONDS)
    counts = Counts()
    with loading():
        model = ModelInService(load, settings.name, counts)
    batcher = Batcher(model.current, settings.max_batch, settings.max_wait_ms, counts.batch)
    server = Server(model, batcher, settings, counts, version("recapp"), leader)
    return server, model.current()


def _say(settings: Serve, address: str, served: "Served") -> None:
    row = {
        "address": address,
        "model": served.name,
        "version": served.scorer.version,
        "artefact": str(served.scorer.info.get("path", settings.artefact)),
        "ranks": settings.ranks,
        "threads": settings.threads,
        "max_batch": settings.max_batch,
        "max_wait_ms": settings.max_wait_ms,
    } | {name: getattr(settings, name) for name in Limits.__dataclass_fields__}
    lines = [{"what": name, "value": _shown(value)} for name, value in row.items()]
    console.emit([row] if settings.format == "json" else lines, settings.format, COLUMNS)


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


if __name__ == "__main__":
    leave(main)
