"""Generate click logs with a known best possible score.

    every value = hash(seed, column, row)    independent of the division of work: the same seed
                                             gives the same bytes
    logit  = bias + sum of the effects of a row's ids and numbers
    label ~ Bernoulli(sigmoid(logit))        no model beats the AUC and log loss of these
                                             logits, except by chance

`_truth.json` beside the data has the scores of these logits on the written rows, so that a trained
model can be compared with the best possible one. The popular ids change slowly through the log, as
in real logs, so later rows have ids that earlier rows do not have.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recapp.dataset.click_model import ClickModel, Score
from recapp.dataset.column_shapes import CRITEO_SIZES, ColumnShapes, criteo_columns, sample_columns
from recapp.dataset.data_settings import Generate
from recapp.errors import ConfigError, DataError

MANIFEST = "_generated.json"
TRUTH = "_truth.json"
VERSION = 1  # the generator's version, increased when the same settings give other bytes
# The last 1/7 of the rows, the validation rows of the default split, also gets separate scores.
VALIDATION_SHARE = 7
Progress = Callable[[int, int], None]


def write_clicks(
    path: str | Path,
    generate: Generate,
    sizes: Sequence[int] | None = CRITEO_SIZES,
    progress: Progress | None = None,
) -> Path:
    """Write generated clicks as Parquet, unless they exist already.

    `criteo` has the columns label, I1 to I13 and C1 to Cn; ids are 1 to the size of their table
    - 1, null where missing. `sample` has label, I1 to I13 and ten ids per row of each of
    large_table, wide_table and small_table, in list columns; the ids of a table of R rows are 0 to
    R - 1.

    Args:
        path: The directory. A complete set of the same settings stays unchanged.
        generate: The kind of the set, and the settings of its values.
        sizes: The rows of the table of each id column of `criteo`.
        progress: A callback; called with the number of written rows and the number of all rows.

    Returns:
        The directory.

    Raises:
        DataError: `path` has other files.
        ConfigError: The settings are impossible.
    """
    path = Path(path)
    shapes, settings = _planned(generate, sizes)
    if _is_complete(path, settings):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        unfinished.chmod(0o755)
        model = ClickModel(
            shapes, generate.seed, generate.separability, generate.positives, generate.rows
        )
        truth = _write_files(unfinished, model, generate.rows, progress)
        (unfinished / TRUTH).write_text(json.dumps(truth, indent=2) + "\n")
        (unfinished / MANIFEST).write_text(json.dumps(settings, indent=2) + "\n")
        try:
            os.replace(unfinished, path)  # replaces an empty directory, never another
        except OSError:
            # another process may have written the same set meanwhile
            if not _is_complete(path, settings):
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return path


def check_directory(path: str | Path, generate: Generate, sizes: Sequence[int] | None) -> None:
    """Check that `write_clicks` could write a set to `path`, without writing it.

    Arguments are those of `write_clicks`.

    Raises:
        DataError: `path` has other files.
        ConfigError: The settings are impossible.
    """
    _is_complete(Path(path), _planned(generate, sizes)[1])


def read_truth(path: str | Path) -> dict[str, Any]:
    """Return the scores of the click model itself on a generated set.

    Returns:
        auc, log_loss, normalized_entropy, positives, rows; `validation` holds the same entries for
        the last 1/7 of the rows.

    Raises:
        DataError: The directory has no readable scores.
    """
    try:
        truth: dict[str, Any] = json.loads((Path(path) / TRUTH).read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: no readable {TRUTH}; only generated data has one") from error
    return truth


def _planned(
    generate: Generate, sizes: Sequence[int] | None
) -> tuple[ColumnShapes, dict[str, Any]]:
    """Return the columns of a set and the content of its manifest."""
    if generate.rows < 1:
        raise ConfigError(f"dataset.generate.rows={generate.rows}: at least 1 row is needed")
    if not 0 < generate.positives < 1:
        raise ConfigError(
            f"dataset.generate.positives={generate.positives}: a share of clicks between 0 and 1 "
            "is needed"
        )
    if generate.kind == "criteo" and sizes is None:
        raise ConfigError(
            "dataset.table_rows=null: must say how many ids each column of generated data has"
        )
    shapes = criteo_columns(tuple(sizes or ())) if generate.kind == "criteo" else sample_columns()
    tables = {column.name: column.rows for column in shapes.ids}
    return shapes, {"version": VERSION, **asdict(generate), "tables": tables}


def _is_complete(path: Path, settings: dict[str, Any]) -> bool:
    """Return whether `path` has a complete set of these settings.

    Raises:
        DataError: `path` has other files, which are never overwritten.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return False
    manifest = path / MANIFEST
    if not manifest.is_file():
        raise DataError(
            f"{path}: holds something that was not generated here (no {MANIFEST}); choose an "
            "empty or new directory, or read what is there: dataset=custom dataset.path=..."
        )
    try:
        found = json.loads(manifest.read_text())
    except ValueError as error:
        raise DataError(
            f"{manifest}: is not readable ({error}); remove {path} to generate again"
        ) from error
    other = [name for name in settings if found.get(name) != settings[name]]
    if other:
        shown = (
            ", ".join(
                f"{name}={found.get(name)} instead of {settings[name]}"
                for name in other
                if name != "tables"
            )
            or "other tables"
        )
        raise DataError(
            f"{path}: holds generated data of other settings ({shown}); remove it to generate "
            "again, or use another directory"
        )
    return True


def _layout(rows: int) -> tuple[int, int]:
    """Return the rows per file and per row group.

    There are eight files of four row groups; more files if a file would have over a million rows.
    """
    per_file = min(-(-rows // 8), 2**20)
    return per_file, max(1, min(-(-per_file // 4), 2**17))


def _write_files(
    directory: Path, model: ClickModel, rows: int, progress: Progress | None
) -> dict[str, Any]:
    """Write the Parquet files of a set, and return the scores of the click model on them."""
    per_file, per_group = _layout(rows)
    scores = (Score(), Score())
    first_validated = rows * (VALIDATION_SHARE - 1) // VALIDATION_SHARE
    for number, first in enumerate(range(0, rows, per_file)):
        last = min(first + per_file, rows)
        with pq.ParquetWriter(
            directory / f"part-{number:05d}.parquet", model.arrow_schema
        ) as writer:
            for start in range(first, last, per_group):
                rows_N = np.arange(start, min(start + per_group, last), dtype=np.int64)
                columns, logits_N, labels_N = model.generate(rows_N)
                writer.write_table(pa.table(columns, schema=model.arrow_schema))
                validated = rows_N >= first_validated
                scores[0].update(logits_N, labels_N)
                scores[1].update(logits_N[validated], labels_N[validated])
                if progress is not None:
                    progress(int(rows_N[-1]) + 1, rows)
    return {**scores[0].compute(), "validation": scores[1].compute()}
