"""FuxiCTR's forms of five models beside recapp's, on the same batches, in a Python of the user:

    python -m tests.speed.fuxictr_beside PYTHON model=dlrm dataset=... seed=1    -> metrics.json

    recipe -> batches in their order -> ids counted from 1 -> fuxictr_worker.py -> AUC, log loss

The worker gets the rows in the order in which recapp trains them. Ids that no training row has are
id 0, so that tables have the rows that `dataset.min_frequency` gives recapp's. FuxiCTR (pip install
fuxictr) has its models outside of its package; the worker puts them together from its layers.

Shapes: N rows, S features of one id, L ids of a feature.
"""

import json
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from recapp.cli.command import recipe_under
from recapp.dataset.click_rows import ClickRows
from recapp.dataset.decode import Int64Array
from recapp.dataset.rows import places
from recapp.dataset.stream import BatchStream
from recapp.run.recipe import Train
from recapp.run.run_rows import rows_of
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.sparse.missing_ids import MISSING
from recapp.tables.table_settings import TablesOfDataset
from recapp.trainer.callbacks import WARM_UP_STEPS

from . import other_python

WORKER = Path(__file__).with_name("fuxictr_worker.py")
MODELS = ("dlrm", "deepfm", "xdeepfm", "dcn", "dcnv2")
"""The options of `model` that have a form of FuxiCTR."""


def main(argv: Sequence[str]) -> None:
    """Train FuxiCTR's form of the model of a command line of `recapp.train`, and write its metrics
    into this directory.

    It follows the widths and the dim of the settings; its optimiser is its own.
    """
    python, *overrides = argv
    versions = other_python.versions(python, ("fuxictr.pytorch.models",), ("fuxictr", "torch"))
    (model,) = (o.partition("=")[2] for o in overrides if o.startswith("model="))
    result = measure(python, model, recipe_under("train", overrides))
    other_python.write(result, overrides, versions)


def measure(python: str, model: str, recipe: Train) -> dict[str, Any]:
    """Train a model of FuxiCTR for one epoch, and measure it on the rows that validate.

    Args:
        python: The Python with FuxiCTR.
        model: The option of `model`, one of `MODELS`.
        recipe: The recipe of recapp's model.

    Returns:
        The result, with the keys of `metrics.json`.

    Raises:
        LaunchError: FuxiCTR has failed.
    """
    assert isinstance(recipe.tables, TablesOfDataset), "FuxiCTR gets a table for each column"
    rows = rows_of(recipe).fitted()
    arrays, features, rows_train = rows_in_order(recipe, rows)
    spec = {
        "model": model,
        "widths": dict(recipe.model.arguments),
        "dim": recipe.tables.dim,
        "batch_size": recipe.dataset.batch_size,
        "rows_train": rows_train,
        "seed": recipe.seed,
        "features": features,
        "warm_up": WARM_UP_STEPS,
    }
    with TemporaryDirectory(prefix="recapp_fuxictr_") as folder:
        file = Path(folder) / "rows.npz"
        np.savez(file, allow_pickle=False, **arrays)
        found = other_python.run_worker(
            f"fuxictr_{model}", python, WORKER, [str(file), json.dumps(spec)]
        )
        scores_N = np.load(file.with_suffix(".npy"))
    return {
        **other_python.quality(scores_N, arrays["label"][rows_train:]),
        **found,
        "seed": recipe.seed,
        "rows_train": rows.train.rows,
        "rows_val": rows.val.rows,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def rows_in_order(
    recipe: Train, rows: ClickRows
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, dict[str, Any]], int]:
    """Return the rows in the order in which a recipe trains and then measures them.

    Args:
        recipe: The recipe.
        rows: Its rows, with fitted columns.

    Returns:
        Arrays: `dense` [N, I], `label` [N], `ids` [N, S], and `list_NAME` of a feature of lists,
        [N, longest list], with 0 behind its ids. Ids are counted from 1; 0 is an id of no training
        row. Then by feature its number of ids, its table, and whether it has lists; and the number
        of rows to train on, which are whole batches.
    """
    train = list(_batches(rows.training_stream()))
    every = [*train, *_batches(rows.stream(rows.val))]
    rows_train = sum(batch.rows for batch in train)
    names = list(rows.schema.features)
    ids_F = [_ids_of(every, place) for place in range(len(names))]
    lengths_F = [
        np.concatenate([_lengths(batch)[place] for batch in every]) for place in range(len(names))
    ]
    assert isinstance(recipe.tables, TablesOfDataset)
    tables = recipe.tables.shared or {}
    known: dict[str, Int64Array] = {}
    for owner in names:
        readers = [place for place, name in enumerate(names) if tables.get(name, name) == owner]
        trained = [ids_F[k][: int(lengths_F[k][:rows_train].sum())] for k in readers]
        if trained:
            found = np.unique(np.concatenate(trained))
            known[owner] = found[found != MISSING]
    label = other_python.label_of(recipe)
    arrays: dict[str, npt.NDArray[Any]] = {
        "dense": np.concatenate([batch.dense_BI.numpy() for batch in every]),
        "label": np.concatenate([batch.labels[label].numpy() for batch in every]),
    }
    single = []
    features = {}
    for place, name in enumerate(names):
        owner = tables.get(name, name)
        numbers_L = _counted_from_1(ids_F[place], known[owner])
        is_list = name in rows.train.bags
        features[name] = {"rows": len(known[owner]) + 1, "table": owner, "list": is_list}
        if is_list:
            arrays[f"list_{name}"] = _padded(numbers_L, lengths_F[place])
        else:
            single.append(numbers_L)
    arrays["ids"] = (
        np.stack(single, 1) if single else np.zeros((len(arrays["label"]), 0), dtype=np.int64)
    )
    return arrays, features, rows_train


def _batches(stream: BatchStream) -> list[Batch]:
    return [batch for batch in stream if batch.rows]


def _lengths(batch: Batch) -> npt.NDArray[np.int64]:
    """Return the lengths of the bags of each feature, [F, B]."""
    found: npt.NDArray[np.int64] = batch.sparse.lengths().numpy().reshape(-1, batch.rows)
    return found


def _ids_of(batches: Sequence[Batch], place: int) -> Int64Array:
    """Return the ids of a feature in all batches, [L]."""
    parts = []
    for batch in batches:
        of_keys = batch.sparse.length_per_key()
        first = sum(of_keys[:place])
        parts.append(batch.sparse.values().numpy()[first : first + of_keys[place]])
    return np.concatenate(parts)


def _counted_from_1(ids_L: Int64Array, known: Int64Array) -> Int64Array:
    """Return the place of each id among the known ones, counted from 1; 0 for others, [L]."""
    places_L = places(ids_L, known)
    return np.where(places_L == MISSING, 0, places_L)


def _padded(ids_L: Int64Array, lengths_N: npt.NDArray[np.int64]) -> Int64Array:
    """Return the lists of all rows, each with zeros behind it."""
    longest = max(int(lengths_N.max(initial=0)), 1)
    filled_NK = np.arange(longest) < lengths_N[:, None]
    found = np.zeros(filled_NK.shape, dtype=np.int64)
    found[filled_NK] = ids_L
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
