"""`python -m recapp.serve artefact=DIR port=N`: answer requests for scores over HTTP.

    DIR -> model, checked -> socket -> requests -> scores, until a signal comes

What is asked and answered stands in `recapp/serving/app.py`. The model is loaded here, by the one
function that knows checkpoints and artefacts, and again whenever a reload is asked for.
"""

if __name__ == "__main__":
    from recapp.processes.stopping import end_on_signals

    end_on_signals()  # before the imports below, which take a while

import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recapp import console
from recapp.app.command import Job, run
from recapp.errors import ConfigError
from recapp.processes.rank_process import leave

if TYPE_CHECKING:
    from recapp.serving.limits import Limits
    from recapp.serving.served_model import Served

NEEDED = ("starlette", "uvicorn")
COLUMNS = (console.Column("what", "serving"), console.Column("value", ""))
SWITCH_SECONDS = 0.0005  # between threads: the worker computes in Python while requests come


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments, by default those of the process.
    """
    return run("serve", serve, writes=False, argv=argv)


def serve(config: dict[str, Any], job: Job) -> None:
    """Answer requests until a signal comes.

    Raises:
        ConfigError: The extra is not installed, or there is no such address.
        RecappError: The model cannot be loaded.
    """
    for name in NEEDED:
        if find_spec(name) is None:
            raise ConfigError(
                f'recapp.serve needs {name}, which is not there: pip install "recapp[serve]"'
            )
    from recapp.serving import http

    listener = http.bound_socket(config["host"], config["port"])
    with listener:
        server, served = _server(config)
        address = http.address_of(listener)
        http.serve(server, listener, lambda: _say(config, address, served, server.limits))
    console.note("ended")


def _server(config: dict[str, Any]) -> Any:
    """Return the routes, and the model that they answer with at first."""
    import torch

    from recapp.app.load_model import load_model
    from recapp.processes.startup_and_exit import freeze_loaded_objects, loading
    from recapp.serving.app import Server
    from recapp.serving.batching import Batcher
    from recapp.serving.limits import Limits
    from recapp.serving.metrics_text import Counts
    from recapp.serving.reload import ModelInService

    torch.set_num_threads(config["threads"])
    sys.setswitchinterval(SWITCH_SECONDS)
    limits = Limits(**{name: config[name] for name in Limits.__dataclass_fields__})
    counts = Counts()
    path = str(Path(config["artefact"]).expanduser().absolute())
    freeze_loaded_objects()
    with loading():
        model = ModelInService(
            lambda: load_model(
                path, trust=config["trust"], trust_compiled=config["trust_compiled"]
            ),
            config["name"],
            counts,
        )
    batcher = Batcher(model.current, config["max_batch"], config["max_wait_ms"], counts.batch)
    return Server(model, batcher, limits, counts, version("recapp")), model.current()


def _say(config: dict[str, Any], address: str, served: "Served", limits: "Limits") -> None:
    """Print where the server answers, with which model, and what it accepts."""
    row = {
        "address": address,
        "model": served.name,
        "version": served.version,
        "artefact": str(served.scorer.info.get("path", config["artefact"])),
        "threads": config["threads"],
        "max_batch": config["max_batch"],
        "max_wait_ms": config["max_wait_ms"],
    } | {name: getattr(limits, name) for name in limits.__dataclass_fields__}
    if config["format"] == "json":
        console.emit([row], "json")
    else:
        rows = [{"what": name, "value": _shown(value)} for name, value in row.items()]
        console.emit(rows, "text", COLUMNS)


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


if __name__ == "__main__":
    leave(main())
