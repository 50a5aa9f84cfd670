"""Programs of others beside recapp's models, each in a Python of its own.

    rows -> FILE.npz -> worker under the other Python -> its facts and FILE_1.npy -> AUC, log loss

A worker is a file that imports nothing of recapp. The last line of its standard output is a JSON
object. Its process ends with the command.

Shapes: N rows that measure.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from recapp.errors import ConfigError, LaunchError
from recapp.metrics import AUC, LogLoss
from recapp.processes.rank_process import THREAD_VARIABLES
from recapp.run.recipe import Train

SMALLEST = 1e-7  # of a probability
SECONDS_TO_IMPORT = 120
THREADS = 1
"""The threads of each program of a comparison, recapp's ranks among them: threads that wait for
others would count as CPU time."""
ASKS_VERSIONS = "import sys, importlib.metadata as m\nprint(*map(m.version, sys.argv[1:]))"


def check_python(
    setting: str, path: str | None, modules: Sequence[str], packages: Sequence[str], fix: str
) -> dict[str, str]:
    """Check that a setting names a Python that has some packages, and return their versions.

    Args:
        setting: The setting.
        path: The Python; None passes the check, without versions.
        modules: The modules that it must import; the first one is named in errors.
        packages: The packages whose versions are wanted, by the names under which pip knows them.
        fix: How such a Python is made, for errors.

    Raises:
        ConfigError: There is no such program, or it cannot import a module.
    """
    if path is None:
        return {}
    if not os.path.isfile(path) or not os.access(path, os.X_OK):
        raise ConfigError(f"{setting}={path}: there is no such program; {fix}")
    try:
        found = subprocess.run(
            [path, "-c", f"import {', '.join(modules)}\n{ASKS_VERSIONS}", *packages],
            capture_output=True,
            text=True,
            timeout=SECONDS_TO_IMPORT,
            env=_environment(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"{setting}={path}: cannot be run ({why}); {fix}") from error
    if found.returncode:
        why = _last_line(found.stderr)
        raise ConfigError(f"{setting}={path}: cannot import {modules[0]} ({why}); {fix}")
    return dict(zip(packages, found.stdout.split()[-len(packages) :], strict=True))


def label_of(recipe: Train) -> str:
    """Return the label that the first output of a recipe's task is compared with."""
    return recipe.built_task.outputs[0].label or recipe.schema.labels[0]


def run_worker(
    name: str, python: str, worker: Path, arguments: Sequence[str], log: Path | None = None
) -> dict[str, Any]:
    """Run a worker, and return the object of its last line.

    Args:
        name: The name of the program, for errors.
        python: The Python.
        worker: The file of the worker.
        arguments: Its arguments.
        log: The file to which its standard output and error are added; None keeps neither.

    Raises:
        LaunchError: The worker has failed, or its last line is no JSON object.
    """
    said = subprocess.run(
        [python, str(worker), *arguments], capture_output=True, text=True, env=_environment()
    )
    if log is not None:
        with log.open("a", encoding="utf-8") as file:
            file.write(said.stdout + said.stderr)
    if said.returncode:
        raise LaunchError(f"{name}: failed: {_last_line(said.stderr)}")
    last = _last_line(said.stdout)
    try:
        found = json.loads(last)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise LaunchError(f"{name}: ended without a result; its last line is: {last}")
    return found


def quality(
    scores_N: npt.NDArray[np.floating], labels_N: npt.NDArray[np.floating]
) -> dict[str, float | None]:
    """Return AUC and log loss of probabilities, by the metrics that measure recapp's models; None
    for an AUC of one class.

    Args:
        scores_N: The probabilities.
        labels_N: The labels.
    """
    p_N = torch.from_numpy(np.asarray(scores_N, dtype=np.float64)).clamp(SMALLEST, 1 - SMALLEST)
    found: dict[str, float | None] = {}
    for name, metric in (("val_auc", AUC()), ("val_log_loss", LogLoss())):
        metric.update(torch.logit(p_N).float(), torch.from_numpy(np.asarray(labels_N)).float())
        value = float(metric.compute())
        found[name] = value if value == value else None
    return found


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing was printed"])[-1]


def _environment() -> dict[str, str]:
    """Return the environment of another Python: without the path of this one, on one thread."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | dict.fromkeys(THREAD_VARIABLES, str(THREADS))
