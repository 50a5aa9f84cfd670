"""The click model behind generated logs: it draws rows, and labels from their true logits."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recapp.dataset.column_shapes import ColumnShapes, IdColumn, NumberColumn
from recapp.dataset.counter_random import Float64Array, normal, uniform

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# The streams of random numbers, by purpose.
_LABEL, _GAP, _NUMBER, _ID, _DEFAULT, _FOLLOWS, _EFFECT = range(7)
# The share of ids that follow a moving popularity, in tables of more than 1,000 rows.
_DRIFT_SHARE = 0.2
_DRIFT_STEPS = 20  # moves of that popularity until the end of the log
_BIAS_ROWS = 20_000  # rows on which the bias is fitted to the wanted share of clicks, to +-.003


class ClickModel:
    """Draw rows and labels of given column shapes, as functions of (seed, row).

    Args:
        shapes: The distributions of the columns.
        seed: The seed of all random numbers.
        separability: A factor on the effects of all ids and numbers.
        positives: The wanted share of clicks, between 0 and 1.
        rows: The number of rows of the whole log, over which the popularity of ids drifts.
    """

    def __init__(
        self, shapes: ColumnShapes, seed: int, separability: float, positives: float, rows: int
    ) -> None:
        self._shapes = shapes
        self._seed = seed
        self._scale = separability
        self._rows = rows
        fields = [pa.field("label", pa.int32(), nullable=False)]
        fields += [pa.field(column.name, pa.int32()) for column in shapes.numbers]
        fields += [
            pa.field(ids.name, pa.list_(pa.int64()) if ids.bag else pa.int64())
            for ids in shapes.ids
        ]
        self.arrow_schema = pa.schema(fields)
        self._bias = 0.0
        sample_N = np.unique(np.linspace(0, rows - 1, min(rows, _BIAS_ROWS)).astype(np.int64))
        self._bias = _fit_bias(self.generate(sample_N)[1], positives)

    def generate(self, rows_N: Int64Array) -> tuple[list[pa.Array], Float64Array, Int64Array]:
        """Generate some rows.

        Args:
            rows_N: Row numbers within the log, [N].

        Returns:
            Columns in the order of `arrow_schema`, the logits of a click [N], and the labels [N].
        """
        logits_N = np.full(len(rows_N), self._bias)
        columns = []
        gaps = self._gaps(rows_N)
        for index, number in enumerate(self._shapes.numbers):
            column, effect_N = self._number(
                index, number, rows_N, gaps[number.block] < number.missing
            )
            columns.append(column)
            logits_N += effect_N
        for index, ids in enumerate(self._shapes.ids):
            make = self._bags if ids.bag else self._ids
            column, effect_N = make(index, ids, rows_N, gaps[ids.block] < ids.missing)
            columns.append(column)
            logits_N += effect_N
        labels_N = (uniform((self._seed, _LABEL), rows_N) < 1 / (1 + np.exp(-logits_N))).astype(
            np.int64
        )
        return [pa.array(labels_N, pa.int32()), *columns], logits_N, labels_N

    def _gaps(self, rows_N: Int64Array) -> dict[int, Float64Array]:
        """Draw a uniform number for each row and block, [N] for each block.

        A value is missing if its block's number is below the column's share of missing values.
        """
        blocks = {number.block for number in self._shapes.numbers} | {
            ids.block for ids in self._shapes.ids
        }
        return {block: uniform((self._seed, _GAP, block), rows_N) for block in blocks}

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
        ids: Int64Array = (ranks_N % count * _multiplier(count) + index) % count
        return ids

    def _effects(self, index: int, column: IdColumn, ids_N: Int64Array) -> Float64Array:
        return self._scale * column.effect * normal((self._seed, _EFFECT, index), ids_N)


class Score:
    """Compute AUC, log loss and normalised entropy of the click model's own logits in bounded
    memory.

    The AUC uses logits rounded to 1/4,096 within +-16. This error is far below the variation from
    drawing the labels.
    """

    def __init__(self) -> None:
        self._counts = np.zeros((2, 32 * 4096), dtype=np.int64)
        self._loss = 0.0

    def update(self, logits_N: Float64Array, labels_N: Int64Array) -> None:
        """Add rows.

        Args:
            logits_N: The logits of a click, [N].
            labels_N: 0 or 1, [N].
        """
        bins_N = np.clip((logits_N + 16) * 4096, 0, self._counts.shape[1] - 1).astype(np.int64)
        for label in (0, 1):
            self._counts[label] += np.bincount(
                bins_N[labels_N == label], minlength=self._counts.shape[1]
            )
        self._loss += float((np.logaddexp(0, logits_N) - labels_N * logits_N).sum())

    def compute(self) -> dict[str, float | None]:
        """Return the metrics of the rows added so far; None unless both labels occur."""
        negatives, positives = (int(count) for count in self._counts.sum(axis=1))
        rows = negatives + positives
        if not negatives or not positives:
            return {
                "auc": None,
                "log_loss": None,
                "normalized_entropy": None,
                "positives": None,
                "rows": rows,
            }
        below = np.cumsum(self._counts[0]) - self._counts[0] / 2
        share = positives / rows
        entropy = -(share * np.log(share) + (1 - share) * np.log(1 - share))
        return {
            "auc": float(below @ self._counts[1]) / (negatives * positives),
            "log_loss": self._loss / rows,
            "normalized_entropy": self._loss / rows / float(entropy),
            "positives": share,
            "rows": rows,
        }


def _fit_bias(logits_N: Float64Array, positives: float) -> float:
    """Find by bisection the bias for a mean click probability of `positives`."""
    low = -60.0
    high = 60.0
    for _ in range(60):
        middle = (low + high) / 2
        if float((1 / (1 + np.exp(-(logits_N + middle)))).mean()) < positives:
            low = middle
        else:
            high = middle
    return low


def _multiplier(count: int) -> int:
    """Return a number near count * .618 that has no common factor with count.

    Multiplying by it modulo count scatters neighbours.
    """
    multiplier = max(1, int(count * 0.6180339887))
    while np.gcd(multiplier, count) != 1:
        multiplier += 1
    return multiplier
