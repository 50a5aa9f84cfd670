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
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from recapp.dataset.counter_hash import Float64Array, normal, uniform
from recapp.dataset.data_settings import Generate
from recapp.errors import ConfigError, DataError
from recapp.settings.option_files import read_json

MANIFEST = "_generated.json"
VERSION = 1  # the generator's version, increased when the same settings give other bytes
# The last 1/7 of the rows, the validation rows of the default split, also gets separate scores.
VALIDATION_SHARE = 7
Progress = Callable[[int, int], None]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# The streams of random numbers, by purpose.
_LABEL, _GAP, _NUMBER, _ID, _DEFAULT, _FOLLOWS, _EFFECT = range(7)
# The share of ids that follow a moving popularity, in tables of more than 1,000 rows.
_DRIFT_SHARE = 0.2
_DRIFT_STEPS = 20  # moves of that popularity until the end of the log
_BIAS_ROWS = 20_000  # rows on which the bias is fitted to the wanted share of clicks, to +-.003


# Table sizes of the 26 columns in HugeCTR's DCN sample.
#
# It has the first 5 million rows of a day, without the ids that occur fewer than 6 times.
CRITEO_SIZES = (
    203931,
    18598,
    14092,
    7012,
    18977,
    4,
    6385,
    1245,
    49,
    186213,
    71328,
    67288,
    11,
    2168,
    7338,
    61,
    4,
    932,
    15,
    204515,
    141526,
    199433,
    60919,
    9137,
    71,
    34,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedColumn:
    """The facts that ids and numbers share.

    Args:
        name: The column's name.
        missing: The share of rows without a value.
        block: A number; columns with the same number are missing in the same rows.
        effect: The standard deviation of the effect of the values on the click model's logit.
    """

    name: str
    missing: float
    block: int
    effect: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IdColumn(GeneratedColumn):
    """The distribution of the ids of a feature.

    Args:
        rows: The size of the table. Ids are 1 to rows - 1 in a single-valued feature (row 0 is for
            missing ids), and 0 to rows - 1 in bags.
        bag: The ids per row; 0 for a single-valued feature.
        exponent: The exponent of the power law.
        default_mass: The share of rows with the default id.
    """

    rows: int
    bag: int = 0
    exponent: float = 1.05
    default_mass: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberColumn(GeneratedColumn):
    """The distribution of an integer column: exp(centre + spread * normal) - 1, rounded down.

    The effect is that of one standard deviation of log1p(max(x, 0)).

    Args:
        centre: The mean of the logarithms.
        spread: The standard deviation of the logarithms.
        negative: The share of rows with the number -1 instead.
    """

    centre: float
    spread: float
    negative: float


# (missing %, block) of I1..I13 and C1..C26 in Criteo 1TB; equal shares there are missing in the
# same rows.
_NUMBER_GAPS = (
    (23.8, 1),
    (10.2, 2),
    (25.4, 3),
    (49.3, 4),
    (46.5, 5),
    (9.2, 2),
    (3.1, 2),
    (0, 0),
    (0, 0),
    (9.2, 2),
    (46.5, 5),
    (1.6, 2),
    (25.4, 3),
)
_ID_GAPS = {
    1: (2.6, 6),
    10: (2.6, 6),
    11: (2.6, 6),
    20: (2.6, 6),
    21: (2.6, 6),
    22: (2.6, 6),
    14: (46.7, 7),
    16: (46.7, 7),
    17: (46.7, 7),
    23: (46.7, 7),
}
_NUMBER_CENTRES = (1.0, 1.5, 2.0, 1.5, 7.0, 3.5, 2.0, 2.0, 4.0, 0.5, 1.0, 2.5, 2.0)
_GIANT_ROWS = 50_000


# The columns I1 to I13.
NUMBERS = tuple(
    NumberColumn(
        name=f"I{number}",
        centre=centre,
        spread=1.3,
        negative=0.06 if number == 8 else 0.0,
        missing=gap / 100,
        block=block,
        effect=0.25 if number % 2 else 0.1,
    )
    for number, (centre, (gap, block)) in enumerate(
        zip(_NUMBER_CENTRES, _NUMBER_GAPS, strict=True), start=1
    )
)
# The columns of the three sample tables, each with ten ids per row.
SAMPLE = tuple(
    IdColumn(name=name, rows=rows, bag=10, missing=0.0, block=0, effect=effect)
    for name, rows, effect in (
        ("large_table", 1_000_000, 0.8),
        ("wide_table", 100_000, 1.2),
        ("small_table", 10_000, 1.6),
    )
)


def _criteo_column(number: int, rows: int) -> IdColumn:
    """Return Criteo's column C1 .. with the rows of its table.

    A few hundred thousand rows are too few to train rare ids, so ids of large tables have smaller
    effects.
    """
    gap, block = _ID_GAPS.get(number, (0.0, 0))
    giant = rows >= _GIANT_ROWS
    return IdColumn(
        name=f"C{number}",
        rows=rows,
        exponent=1.05 if rows > 2_000 else 1.3 if rows > 100 else 1.6,
        default_mass=0.26 if giant else 0.0,
        missing=gap / 100,
        block=block,
        effect=0.2 if giant else 0.25 if rows > 2_000 else 0.3,
    )


class ClickModel:
    """Draw rows and labels of I1 to I13 and columns of ids, as functions of (seed, row).

    Args:
        ids: The distributions of the ids.
        generate: The seed of all random numbers, the factor on the effects of all ids and numbers,
            the wanted share of clicks, and the rows of the whole log, over which the popularity of
            ids drifts.
    """

    def __init__(self, ids: Sequence[IdColumn], generate: Generate) -> None:
        self._columns = ids
        self._seed = generate.seed
        self._scale = generate.separability
        self._rows = generate.rows
        self.arrow_schema = pa.schema(
            [
                pa.field("label", pa.int32(), nullable=False),
                *(pa.field(column.name, pa.int32()) for column in NUMBERS),
                *(
                    pa.field(column.name, pa.list_(pa.int64()) if column.bag else pa.int64())
                    for column in ids
                ),
            ]
        )
        self._bias = 0.0
        last = self._rows - 1
        sample_N = np.unique(np.linspace(0, last, min(last + 1, _BIAS_ROWS)).astype(np.int64))
        self._bias = _fit_bias(self.generate(sample_N)[1], generate.positives)

    def generate(self, rows_N: Int64Array) -> tuple[list[pa.Array], Float64Array, Int64Array]:
        """Generate some rows.

        Args:
            rows_N: Row numbers within the log, [N].

        Returns:
            Columns in the order of `arrow_schema`, the logits of a click [N], and the labels [N].
        """
        logits_N = np.full(len(rows_N), self._bias)
        columns = []
        # A value is missing if the number of its block is below the column's share of missing ones.
        gaps = {
            block: uniform((self._seed, _GAP, block), rows_N)
            for block in {column.block for column in (*NUMBERS, *self._columns)}
        }
        for index, number in enumerate(NUMBERS):
            column, effect_N = self._number(
                index, number, rows_N, gaps[number.block] < number.missing
            )
            columns.append(column)
            logits_N += effect_N
        for index, ids in enumerate(self._columns):
            make = self._bags if ids.bag else self._ids
            column, effect_N = make(index, ids, rows_N, gaps[ids.block] < ids.missing)
            columns.append(column)
            logits_N += effect_N
        labels_N = (uniform((self._seed, _LABEL), rows_N) < 1 / (1 + np.exp(-logits_N))).astype(
            np.int64
        )
        return [pa.array(labels_N, pa.int32()), *columns], logits_N, labels_N

    def _number(
        self, index: int, column: NumberColumn, rows_N: Int64Array, missing_N: BoolArray
    ) -> tuple[pa.Array, Float64Array]:
        logs_N = column.centre + column.spread * normal((self._seed, _NUMBER, index), rows_N)
        values_N = np.floor(np.exp(np.maximum(logs_N, 0))).astype(np.int64) - 1
        if column.negative:
            values_N[uniform((self._seed, _DEFAULT, index), rows_N) < column.negative] = -1
        seen_N = np.where(missing_N, 0.0, np.log1p(np.maximum(values_N, 0)))
        sign = 1 if index % 3 else -1
        effect_N = sign * self._scale * column.effect * (seen_N - column.centre) / column.spread
        return pa.array(values_N, pa.int32(), mask=missing_N), effect_N

    def _ids(
        self, index: int, column: IdColumn, rows_N: Int64Array, missing_N: BoolArray
    ) -> tuple[pa.Array, Float64Array]:
        ids_N = 1 + self._draw(index, column, rows_N, rows_N, column.rows - 1)
        ids_N[missing_N] = 0
        return pa.array(ids_N, mask=missing_N), self._effects(index, column, ids_N)

    def _bags(
        self, index: int, column: IdColumn, rows_N: Int64Array, missing_N: BoolArray
    ) -> tuple[pa.Array, Float64Array]:
        counters_L = (rows_N[:, None] * column.bag + np.arange(column.bag)).reshape(-1)
        ids_L = self._draw(index, column, counters_L, np.repeat(rows_N, column.bag), column.rows)
        effect_N = (
            self._effects(index, column, ids_L).reshape(-1, column.bag).mean(axis=1)
            * column.bag**0.5
        )
        offsets_N = np.arange(0, len(ids_L) + 1, column.bag, dtype=np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets_N), pa.array(ids_L)), effect_N

    def _draw(
        self, index: int, column: IdColumn, counters_N: Int64Array, rows_N: Int64Array, count: int
    ) -> Int64Array:
        """Draw ids from 0 to count - 1, [N].

        Popularity follows a power law over ranks. A fixed bijection maps ranks to ids, so that
        popular ids are scattered.
        """
        chance_N = uniform((self._seed, _ID, index), counters_N)
        power = 1 - column.exponent
        ranks_N = ((chance_N * ((count + 1) ** power - 1) + 1) ** (1 / power)).astype(np.int64) - 1
        np.clip(ranks_N, 0, count - 1, out=ranks_N)
        if column.default_mass:
            ranks_N[
                uniform((self._seed, _DEFAULT, 100 + index), counters_N) < column.default_mass
            ] = 0
        if count > 1_000:
            follows_N = uniform((self._seed, _FOLLOWS, index), counters_N) < _DRIFT_SHARE
            ranks_N += np.where(follows_N, 1 + rows_N * _DRIFT_STEPS // self._rows, 0) * (
                count // 97
            )
        # multiplying by a number near count * .618, without a common factor, scatters neighbours
        multiplier = max(1, int(count * 0.6180339887))
        while np.gcd(multiplier, count) != 1:
            multiplier += 1
        ids: Int64Array = (ranks_N % count * multiplier + index) % count
        return ids

    def _effects(self, index: int, column: IdColumn, ids_N: Int64Array) -> Float64Array:
        return self._scale * column.effect * normal((self._seed, _EFFECT, index), ids_N)


def _fit_bias(logits_N: Float64Array, positives: float) -> float:
    low = -60.0
    high = 60.0
    for _ in range(60):
        middle = (low + high) / 2
        if float((1 / (1 + np.exp(-(logits_N + middle)))).mean()) < positives:
            low = middle
        else:
            high = middle
    return low


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
    ids, settings = _planned(generate, sizes)
    if _is_complete(path, settings):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        unfinished.chmod(0o755)
        truth = _write_files(unfinished, ClickModel(ids, generate), generate.rows, progress)
        (unfinished / "_truth.json").write_text(json.dumps(truth, indent=2) + "\n")
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


def _planned(
    generate: Generate, sizes: Sequence[int] | None
) -> tuple[Sequence[IdColumn], dict[str, Any]]:
    """Return the columns of ids of a set, and the content of its manifest.

    Raises:
        ConfigError: There is no table, or a table has fewer than two rows.
    """
    ids = SAMPLE
    if generate.kind == "criteo":
        if sizes is None:
            raise ConfigError(
                "dataset.table_rows=null: must say how many ids each column of generated data has"
            )
        if not sizes or min(sizes) < 2:
            raise ConfigError(
                f"dataset.table_rows={list(sizes)}: each table needs at least 2 rows, row 0 being "
                "that of missing ids"
            )
        ids = tuple(_criteo_column(number, rows) for number, rows in enumerate(sizes, start=1))
    tables = {column.name: column.rows for column in ids}
    return ids, {"version": VERSION, **asdict(generate), "tables": tables}


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
        stored_settings = read_json(manifest)
    except ValueError as error:
        raise DataError(
            f"{manifest}: is not readable ({error}); remove {path} to generate again"
        ) from error
    other = [name for name in settings if stored_settings.get(name) != settings[name]]
    if other:
        differences = (
            ", ".join(
                f"{name}={stored_settings.get(name)} instead of {settings[name]}"
                for name in other
                if name != "tables"
            )
            or "other tables"
        )
        raise DataError(
            f"{path}: holds generated data of other settings ({differences}); remove it to "
            "generate again, or use another directory"
        )
    return True


def _write_files(
    directory: Path, model: ClickModel, rows: int, progress: Progress | None
) -> dict[str, Any]:
    """Write the Parquet files of a set, and return the scores of the click model on them.

    There are eight files of four row groups; more files if a file would have over a million rows.
    """
    per_file = min(-(-rows // 8), 2**20)
    per_group = max(1, min(-(-per_file // 4), 2**17))
    # imports torchmetrics, which only who generates needs
    from recapp.metrics import click_metrics

    names = ("auc", "log_loss", "normalized_entropy")
    scores = [click_metrics(names, sync_on_compute=False) for _ in range(2)]
    rows_and_clicks = np.zeros((2, 2), dtype=np.int64)
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
                for part, first_row in enumerate((0, first_validated)):
                    some_N = rows_N >= first_row
                    rows_and_clicks[part] += (some_N.sum(), labels_N[some_N].sum())
                    for metric in scores[part].values():
                        metric.update(*map(torch.from_numpy, (logits_N[some_N], labels_N[some_N])))
                if progress is not None:
                    progress(int(rows_N[-1]) + 1, rows)
    values = [{name: float(m.compute()) for name, m in metrics.items()} for metrics in scores]
    truth, validation = (
        {name: value if math.isfinite(value) else None for name, value in one.items()}
        | {"positives": clicks / rows, "rows": rows}
        for one, (rows, clicks) in zip(values, rows_and_clicks.tolist(), strict=True)
    )
    return {**truth, "validation": validation}
