"""Programs of others beside recapp's models, each in a Python of its own.

    rows -> FILE.npz -> worker under the other Python -> its facts and FILE_1.npy -> AUC, log loss

A worker is a file that imports nothing of recapp. The last line of its standard output is a JSON
object. Its process ends with the command.

Shapes: N rows that measure.
"""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
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
THREADS = 1
"""The threads of each program of a comparison, recapp's ranks among them: threads that wait for
others would count as CPU time."""
ASKS_VERSIONS = "import sys, importlib.metadata as m\nprint(*map(m.version, sys.argv[1:]))"


def versions(path: str, modules: Sequence[str], packages: Sequence[str]) -> dict[str, str]:
    """Check that a Python can import some modules, and return the versions of packages.

    Args:
        path: The Python.
        modules: The modules that it must import.
        packages: The packages whose versions are returned, by the names under which pip knows them.

    Raises:
        ConfigError: There is no such program, or it cannot import a module.
    """
    try:
        done = subprocess.run(
            [path, "-c", f"import {', '.join(modules)}\n{ASKS_VERSIONS}", *packages],
            capture_output=True,
            text=True,
            env=_environment(),
        )
    except OSError as error:
        raise ConfigError(f"{path}: cannot be run ({error.strerror})") from error
    if done.returncode:
        why = _last_line(done.stderr)
        raise ConfigError(
            f"{path}: cannot import {modules[0]} ({why}): name the Python of an environment with "
            f"it: pip install {packages[0]}"
        )
    return dict(zip(packages, done.stdout.split()[-len(packages) :], strict=True))


def write(result: Mapping[str, Any], overrides: Sequence[str], packages: Mapping[str, str]) -> None:
    """Write a result into this directory, in the form of `metrics.json` of a training run.

    Args:
        result: What was measured.
        overrides: The settings of the run.
        packages: The versions of packages, by name.
    """
    of_packages = {f"version_{name}": text for name, text in packages.items()}
    document = {**result, "overrides": list(overrides), **of_packages}
    Path("metrics.json").write_text(json.dumps(document))


def label_of(recipe: Train) -> str:
    """Return the label that the first output of a recipe's task is compared with."""
    return recipe.built_task.outputs[0].label or recipe.schema.labels[0]


def run_worker(name: str, python: str, worker: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Run a worker, print what it prints, and return the object of its last line.

    Args:
        name: The name of the program, for errors.
        python: The Python.
        worker: The file of the worker.
        arguments: Its arguments.

    Raises:
        LaunchError: The worker has failed, or its last line is no JSON object.
    """
    done = subprocess.run(
        [python, str(worker), *arguments], capture_output=True, text=True, env=_environment()
    )
    print(done.stdout + done.stderr)
    if done.returncode:
        raise LaunchError(f"{name}: failed: {_last_line(done.stderr)}")
    last = _last_line(done.stdout)
    try:
        result = json.loads(last)
    except ValueError:
        result = None
    if not isinstance(result, dict):
        raise LaunchError(f"{name}: ended without a result; its last line is: {last}")
    return result


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
