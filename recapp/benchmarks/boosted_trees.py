"""LightGBM beside recapp's models, on the same rows, in a Python of the user.

    logs -> numbers, statistics of the label by id -> lightgbm_worker.py -> scores -> AUC, log loss

Trees and rounds are chosen on the last tenth of the training rows, with statistics of the rows
before; then all training rows train. Lists of ids are left out.

Shapes: N rows, I numbers.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from recapp.dataset.rows import Float32Array, Int64Array
from recapp.dataset.sequential_rows import decoded_chunks
from recapp.dataset.source import open_source, split
from recapp.dataset.target_statistics import target_statistics
from recapp.errors import ConfigError, LaunchError
from recapp.recipe.recipe import Train

WORKER = Path(__file__).with_name("lightgbm_worker.py")
LAST = 10  # a tenth of the training rows chooses
NAME = "lightgbm"
SMALLEST = 1e-7  # of a probability in the log loss
SECONDS_TO_IMPORT = 120


def check_python(path: str | None) -> None:
    """Check that `lightgbm_python` is a Python that has LightGBM.

    Raises:
        ConfigError: There is no such program, or it cannot import LightGBM and numpy.
    """
    if path is None:
        return
    fix = "name the Python of an environment with LightGBM: pip install lightgbm"
    if not os.path.isfile(path) or not os.access(path, os.X_OK):
        raise ConfigError(f"lightgbm_python={path}: there is no such program; {fix}")
    found = subprocess.run(
        [path, "-c", "import lightgbm, numpy"],
        capture_output=True,
        text=True,
        timeout=SECONDS_TO_IMPORT,
        env=_environment(),
    )
    if found.returncode:
        why = (found.stderr.strip().splitlines() or ["nothing on its standard error"])[-1]
        raise ConfigError(f"lightgbm_python={path}: cannot import lightgbm ({why}); {fix}")


def measure(python: str, recipe: Train, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Train trees on the rows that a recipe trains on, and measure those that validate.

    Args:
        python: The Python with LightGBM.
        recipe: The recipe: its data set and its task.
        seeds: The seeds.

    Returns:
        The result of each seed, with the keys of `metrics.json`.

    Raises:
        LaunchError: LightGBM has failed.
    """
    dense_NI, ids_NS, labels_N, rows_train = read_rows(recipe)
    arrays = arrays_of(dense_NI, ids_NS, labels_N, rows_train)
    with TemporaryDirectory(prefix="recapp_lightgbm_") as folder:
        file = Path(folder) / "rows.npz"
        np.savez(file, allow_pickle=False, **arrays)
        said = subprocess.run(
            [python, str(WORKER), str(file), ",".join(map(str, seeds))],
            capture_output=True,
            text=True,
            env=_environment(),
        )
        if said.returncode:
            why = (said.stderr.strip().splitlines() or ["nothing on its standard error"])[-1]
            raise LaunchError(f"{NAME}: failed: {why}")
        found = json.loads(said.stdout.splitlines()[-1])
        scores = {seed: np.load(file.with_name(f"rows_{seed}.npy")) for seed in seeds}
    y = arrays["y_val"]
    return [
        {
            "val_auc": auc(scores[seed], y),
            "val_log_loss": log_loss(scores[seed], y),
            "seed": seed,
            "peak_bytes": found["peak_bytes"],
            "rows_train": rows_train,
            "rows_val": len(y),
            "version_lightgbm": found["version"],
            "chosen": f"{found['leaves']} leaves and {found['rounds']} rounds of "
            f"{found['configurations']} configurations",
            "train_seconds": found["seeds"][str(seed)]["seconds"],
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        }
        for seed in seeds
    ]


def read_rows(recipe: Train) -> tuple[Float32Array, Int64Array, Float32Array, int]:
    """Return the numbers, ids and labels of all rows, and the number of training rows. A number
    that is missing is NaN where the recipe has a flag for it.
    """
    schema = recipe.labelled_schema
    source = open_source(recipe.dataset.path, schema)
    train, _ = split(source, recipe.dataset.share_that_validates)
    parts = list(decoded_chunks(source, schema, "none"))
    dense_NI = np.concatenate([part.dense_NI for part in parts])
    given = len(schema.dense)
    flags = [column for column in schema.derived if column.is_new_number]
    for place, flag in enumerate(flags):
        missing = dense_NI[:, given + place] > 0
        dense_NI[missing, schema.dense.index(flag.reads[0])] = np.nan
    return (
        dense_NI[:, :given],
        np.concatenate([part.ids_NS for part in parts]),
        np.concatenate([part.targets_NT[:, 0] for part in parts]),
        train.rows,
    )


def arrays_of(
    dense_NI: Float32Array, ids_NS: Int64Array, labels_N: Float32Array, rows_train: int
) -> dict[str, npt.NDArray[np.floating]]:
    """Return features and labels of the rows that fit, that choose, that train and that measure."""
    first = rows_train - rows_train // LAST
    found: dict[str, npt.NDArray[np.floating]] = {}
    for names, fitted, end in (
        (("fit", "last"), first, rows_train),
        (("train", "val"), rows_train, len(labels_N)),
    ):
        known = target_statistics(ids_NS[:end], labels_N[:fitted])
        x = np.concatenate([dense_NI[:end], known], 1)
        for name, part in zip(names, (slice(0, fitted), slice(fitted, end)), strict=True):
            found[f"x_{name}"] = x[part]
            found[f"y_{name}"] = labels_N[part]
    return found


def auc(scores: npt.NDArray[np.floating], labels: npt.NDArray[np.floating]) -> float | None:
    """Return the AUC of scores, with ties counted half; None without both labels."""
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[place]
    positives = float(labels.sum())
    negatives = len(labels) - positives
    if not positives or not negatives:
        return None
    above = float(rank[labels > 0].sum()) - positives * (positives + 1) / 2
    return above / (positives * negatives)


def log_loss(scores: npt.NDArray[np.floating], labels: npt.NDArray[np.floating]) -> float:
    """Return the mean log loss of probabilities."""
    p = np.clip(scores, SMALLEST, 1 - SMALLEST)
    return float(-np.mean(labels * np.log(p) + (1 - labels) * np.log(1 - p)))


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
