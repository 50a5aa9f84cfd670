"""The worker of `bench inference`, one process: models made ready by the application, measured by
`recapp/benchmarks/scoring_speed.py`.
"""

from pathlib import Path
from typing import Any

from recapp import console
from recapp.app.served_models import served_model
from recapp.benchmarks import bench_worker, scoring_speed
from recapp.benchmarks.session import Session
from recapp.errors import ConfigError
from recapp.inference.build_cpp import build, missing_tools


def run(settings: dict[str, Any], job_dir: Path) -> None:
    """Measure the models that the settings name; records and pictures are as of `bench_worker`.

    Args:
        settings: The checked settings of `recapp.bench`, with the checkpoint or artefact of each
            model as `served`.
        job_dir: The directory of the records and pictures.
    """
    bench_worker.run(settings, job_dir, measure)


def measure(session: Session) -> None:
    """Measure every model of a session."""
    settings = session.settings
    program = _program(session.folder / "cpp") if settings["compile"] else None
    for name, path in settings["served"].items():
        served = served_model(
            name,
            Path(path),
            settings["quantize"],
            settings["compile"],
            session.folder,
            program,
        )
        scoring_speed.run(session, served)


def _program(folder: Path) -> Path | None:
    """Build the C++ program; None where that does not work, which is noted."""
    if missing := missing_tools():
        console.note(f"the C++ program is left out: {', '.join(missing)} is not here")
        return None
    console.note("building the C++ program (a minute) ...")
    try:
        return build(folder)
    except ConfigError as error:
        console.note(f"the C++ program is left out: {error}")
        return None
