"""LightGBM beside recapp's models, on the same rows, in a Python of the user:

    python -m tests.speed.boosted_trees PYTHON dataset=... seed=1    -> metrics.json

    logs -> numbers, statistics of the label by id -> lightgbm_worker.py -> scores -> AUC, log loss

Trees and rounds are chosen on the last tenth of the training rows, with statistics of the rows
before; then all training rows train. Lists of ids are left out.

Shapes: N rows, I numbers.
"""

import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from recapp.cli.command import recipe_under
from recapp.dataset.data_settings import Derivation
from recapp.dataset.decode import Float32Array, Int64Array
from recapp.dataset.sequential_rows import decoded_chunks
from recapp.run.recipe import Train
from recapp.run.run_rows import rows_of

from . import other_python
from .target_statistics import target_statistics

WORKER = Path(__file__).with_name("lightgbm_worker.py")
LAST = 10  # a tenth of the training rows chooses
NAME = "lightgbm"


def main(argv: Sequence[str]) -> None:
    """Train trees on the rows of a command line of `recapp.train`, and write the metrics into
    this directory. They get no weights, and one label of 0 or 1.
    """
    python, *overrides = argv
    versions = other_python.versions(python, ("lightgbm", "numpy"), ("lightgbm",))
    result = measure(python, recipe_under("train", overrides))
    other_python.write(result, overrides, versions)


def measure(python: str, recipe: Train) -> dict[str, Any]:
    """Train trees on the rows that a recipe trains on, and measure those that validate.

    Args:
        python: The Python with LightGBM.
        recipe: The recipe: its data set, its task and its seed.

    Returns:
        The result, with the keys of `metrics.json`.

    Raises:
        LaunchError: LightGBM has failed.
    """
    dense_NI, ids_NS, labels_N, rows_train = read_rows(recipe)
    arrays = arrays_of(dense_NI, ids_NS, labels_N, rows_train)
    with TemporaryDirectory(prefix="recapp_lightgbm_") as folder:
        file = Path(folder) / "rows.npz"
        np.savez(file, allow_pickle=False, **arrays)
        measured = other_python.run_worker(NAME, python, WORKER, [str(file), str(recipe.seed)])
        scores_N = np.load(file.with_suffix(".npy"))
    return {
        **other_python.quality(scores_N, arrays["y_val"]),
        "seed": recipe.seed,
        "peak_bytes": measured["peak_bytes"],
        "rows_train": rows_train,
        "rows_val": len(arrays["y_val"]),
        "chosen": f"{measured['leaves']} leaves and {measured['rounds']} rounds of "
        f"{measured['configurations']} configurations",
        "train_seconds": measured["seconds"],
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def read_rows(recipe: Train) -> tuple[Float32Array, Int64Array, Float32Array, int]:
    """Return the numbers, ids and labels of all rows, and the number of training rows.

    Ids are those of the recipe's vocabularies and buckets; labels are those of its task.
    A number that is missing is NaN where the recipe has a flag for it.
    """
    rows = rows_of(recipe).fitted()
    schema = rows.schema
    parts = [part for of in (rows.train, rows.val) for part in decoded_chunks(of, schema, "none")]
    numbers_NI = np.concatenate([part.numbers_IN.T for part in parts])
    given = len(schema.dense)
    made = [column for column in schema.derived if column.is_new_number]
    for place, column in enumerate(made):
        if column.kind is Derivation.MISSING:
            missing = numbers_NI[:, given + place] > 0
            numbers_NI[missing, schema.dense.index(column.reads[0])] = np.nan
    label = schema.targets.index(other_python.label_of(recipe))
    # other numbers that are computed from these tell trees nothing new
    return (
        np.delete(numbers_NI, np.arange(given, given + len(made)), axis=1),
        np.concatenate([part.ids_SN.T for part in parts]),
        np.concatenate([part.targets_TN[label] for part in parts]),
        rows.train.rows,
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


if __name__ == "__main__":
    main(sys.argv[1:])
