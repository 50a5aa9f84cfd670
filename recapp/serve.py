"""`python -m recapp.serve artefact=DIR port=N`: answer requests for scores over HTTP.

    DIR -> model, checked -> socket -> requests -> scores, until a signal comes

`recapp/serving/app.py` describes requests and answers. With `ranks=N`, N processes hold the model's
tables, and rank 0 answers.
"""

if __name__ == "__main__":
    from recapp.processes.stopping import end_on_signals

    end_on_signals()  # before the imports below, which take a while

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml  # type: ignore[import-untyped]

from recapp import console
from recapp.cli import server
from recapp.cli.command import run
from recapp.cli.job import Job
from recapp.errors import ConfigError
from recapp.processes.launch import launch
from recapp.processes.rank_environment import rank_info
from recapp.processes.rank_process import as_rank, leave
from recapp.processes.stopping import Stopped
from recapp.run.commands import Serve
from recapp.settings.records import to_plain
from recapp.transport.pulse import SILENT_SECONDS

NEEDED = ("prometheus_client", "starlette", "uvicorn")
SECONDS_TO_END = 5.0  # after timeout_s, during which pending requests are answered


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments; None takes those of the process.
    """
    return run("serve", serve, writes=False, argv=argv)


def serve(given: Serve, job: Job) -> None:
    """Answer requests until a signal comes.

    Raises:
        ConfigError: The extra is not installed, or a setting is wrong (`check_serving`).
        RecappError: The model cannot be loaded.
    """
    for name in NEEDED:
        if find_spec(name) is None:
            raise ConfigError(
                f"recapp.serve needs {name}, which is not installed: in the clone of recapp, "
                'run pip install ".[serve]"'
            )
    settings = replace(given, artefact=str(Path(given.artefact).expanduser().absolute()))
    if (here := rank_info()) is not None:
        return _serve_as_rank(replace(settings, ranks=here.world))
    server.check_serving(settings, settings.ranks)
    if settings.ranks > 1:
        _serve_on_ranks(settings)
    else:
        _serve_alone(settings)


def _serve_alone(settings: Serve) -> None:
    import torch

    from recapp.cli.model_loading import load_model
    from recapp.processes.start_and_end import freeze_loaded_objects

    torch.set_num_threads(settings.threads)
    freeze_loaded_objects()
    device = server.device_of(settings)
    server.serve(
        settings,
        lambda: load_model(
            settings.artefact,
            device,
            trust=settings.trust,
            trust_compiled=settings.trust_compiled,
        ),
    )


def _serve_on_ranks(settings: Serve) -> None:
    """Start the ranks, and wait for their end."""
    console.note(f"starting {settings.ranks} ranks")
    with TemporaryDirectory() as folder:
        path = Path(folder, "settings.yaml")
        path.write_text(yaml.safe_dump(to_plain(settings)))
        try:
            launch(
                path,
                settings.ranks,
                module="recapp.cli.serving_worker",
                grace=settings.timeout_s + SECONDS_TO_END,
                timeout=SILENT_SECONDS,
                reloads=True,
            )
        except Stopped:  # a server ends by a signal
            return


def _serve_as_rank(settings: Serve) -> None:
    """Serve as one of the ranks that torchrun or srun started."""
    from recapp.cli.serving_worker import run as run_rank

    with as_rank():
        run_rank(to_plain(settings))


if __name__ == "__main__":
    leave(main)
