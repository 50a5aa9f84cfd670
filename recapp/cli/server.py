"""Build a server from settings and run it, in the process that gets the requests."""

import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from recapp import console
from recapp.errors import ConfigError
from recapp.processes.rank_environment import RankInfo
from recapp.run.commands import Serve
from recapp.serving.limits import Limits

if TYPE_CHECKING:
    import torch

    from recapp.inference.led_ranks import Leader
    from recapp.inference.scorer import Scorer
    from recapp.serving.served_model import Served

COLUMNS = (console.Column("what", "serving"), console.Column("value", ""))
SWITCH_SECONDS = 0.0005  # of a thread: requests arrive while the worker computes in Python


def check_serving(settings: Serve, ranks: int) -> None:
    """Check the model, address and GPUs of a server, before mistakes end it some seconds later.

    Args:
        settings: The settings of `recapp.serve`.
        ranks: The number of ranks on this machine.

    Raises:
        ConfigError: There are too few GPUs, or the address does not exist or is taken.
        RecappError: The model does not exist.
    """
    from recapp.serving import http
    from recapp.stored.stored_model import read_stored

    if settings.device == "cuda":
        import torch

        if (gpus := torch.cuda.device_count()) < ranks:
            raise ConfigError(
                f"device=cuda ranks={ranks}: each rank needs a GPU of its own, and there are "
                f"{gpus} here: use device=cpu, or fewer ranks"
            )
    read_stored(settings.artefact)
    http.bound_socket(settings.host, settings.port).close()


def device_of(settings: Serve, rank: RankInfo | None = None) -> "torch.device":
    """Return the device on which this process computes.

    Args:
        settings: The settings of `recapp.serve`.
        rank: The rank of this process; None if it serves alone.

    Raises:
        LaunchError: There are fewer GPUs than ranks here.
    """
    import torch

    if settings.device == "cpu":
        return torch.device("cpu")
    number = rank.gpu(torch.cuda.device_count()) if rank else 0
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def serve(settings: Serve, load: "Callable[[], Scorer]", leader: "Leader | None" = None) -> None:
    """Answer requests until a signal comes, or the ranks have lost each other.

    Args:
        settings: The settings of `recapp.serve`.
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
    from recapp.processes.start_and_end import loading
    from recapp.serving.app import Server
    from recapp.serving.batching import Batcher
    from recapp.serving.counts import Counts
    from recapp.serving.reload import ModelInService

    sys.setswitchinterval(SWITCH_SECONDS)
    counts = Counts()
    with loading():
        model = ModelInService(load, settings.name, counts)
    batcher = Batcher(model.current, settings.max_batch, settings.max_wait_ms, counts.batch)
    server = Server(model, batcher, settings, counts, version("recapp"), leader)
    return server, model.current()


def _say(settings: Serve, address: str, served: "Served") -> None:
    """Print the server's address, its model and its limits."""
    row = {
        "address": address,
        "model": served.name,
        "version": served.version,
        "artefact": str(served.scorer.info.get("path", settings.artefact)),
        "ranks": settings.ranks,
        "threads": settings.threads,
        "max_batch": settings.max_batch,
        "max_wait_ms": settings.max_wait_ms,
    } | {name: getattr(settings, name) for name in Limits.__dataclass_fields__}
    if settings.format == "json":
        console.emit([row], "json")
    else:
        rows = [{"what": name, "value": _shown(value)} for name, value in row.items()]
        console.emit(rows, "text", COLUMNS)


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)
