"""The decoded rows of a chunk, and the columns that are computed of decoded ones
(`recapp/dataset/data_settings.py`).

`Rows` are numpy arrays, column after column, as files and batches have them.

    numbers_IN  [I, N]  numbers, transformed
    targets_TN  [T, N]  labels, then weights
    ids_SN      [S, N]  the single id of each row and single-valued feature
    bags                values_L, offsets_N1, weight_L of each multi-valued feature
    row_numbers_N  [N]  the place of each row in the data set, where it is wanted

`DecodedColumns` computes derived columns.

    numbers I1 ..          NaN where missing, not transformed  ->  ids, numbers
    ids C1 .., lists too   MISSING where missing               ->  ids
    times                  seconds, MISSING where missing      ->  ids, numbers

An id of buckets is the number of edges at or below the number, plus one; a missing number has the
id MISSING, so row 0. An id of a vocabulary is its place plus one; an id that is not in it has the
id MISSING, so it shares row 0 with the other rare ones. A missing id is an id like others: if it is
frequent, it has a place.

Ids need only comparisons and integers. Numbers need only operations that IEEE 754 rounds the same
way everywhere (sums, products, quotients, the remainder), one after the other in 64 bits; sines are
polynomials of our own. So C++ computes the same bits (`recapp/inference/cpp/derive.cpp`).

Shapes: N rows of a chunk, I dense columns, T columns of labels and weights, S single-valued
features or columns of a cross, L ids of a bag feature.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.polynomial.polynomial import polyval

from recapp.dataset.data_settings import (
    DAY_SECONDS,
    LARGEST_LEVEL,
    LEAST_WHOLE,
    Derivation,
    DerivedColumn,
)
from recapp.dataset.decode import Float32Array, Int64Array, compiled_texts
from recapp.sparse.missing_ids import MISSING

IdArray: TypeAlias = npt.NDArray[np.signedinteger[Any]]  # int64, or int32 where all fit
Float64Array = npt.NDArray[np.float64]
HALF_PI = math.pi / 2
SINE_TERMS = tuple((-1) ** (n // 2) / math.factorial(n) for n in range(1, 16, 2))
# Taylor's coefficients; up to a quarter turn the error of both sums is below 1e-11.
COSINE_TERMS = tuple((-1) ** (n // 2) / math.factorial(n) for n in range(0, 17, 2))


@dataclass(frozen=True, slots=True)
class FeatureBags:
    """The bags of one feature.

    Args:
        values_L: The ids of all rows, one bag after the other, [L].
        offsets_N1: The offset of each row's bag, and L at the end, [N + 1].
        weight_L: The weight of each id, [L]; None if no feature has weights.
    """

    values_L: IdArray
    offsets_N1: Int64Array
    weight_L: Float32Array | None = None

    @staticmethod
    def of(
        values_L: Int64Array, lengths_N: Int64Array, weight_L: Float32Array | None = None
    ) -> "FeatureBags":
        """Make bags from the number of ids of each row, [N]."""
        offsets_N1 = np.concatenate(([0], np.cumsum(lengths_N))).astype(np.int64, copy=False)
        return FeatureBags(values_L, offsets_N1, weight_L)


@dataclass(frozen=True, slots=True)
class Rows:
    """Some decoded rows; the module docstring explains the arrays.

    Args:
        numbers_IN: Transformed numbers, [I, N].
        targets_TN: Labels and weights, [T, N].
        ids_SN: Ids of single-valued features, [S, N].
        bags: The bags of each multi-valued feature, in schema order.
        row_numbers_N: The place of each row in the data set, [N]; None where nobody wants it.
    """

    numbers_IN: Float32Array
    targets_TN: Float32Array
    ids_SN: IdArray
    bags: tuple[FeatureBags, ...]
    row_numbers_N: Int64Array | None = None

    def __len__(self) -> int:
        return int(self.targets_TN.shape[1])


def join(parts: Sequence[Rows]) -> Rows:
    """Concatenate the rows of several chunks (at least one)."""
    if len(parts) == 1:
        return parts[0]
    bags = tuple(
        FeatureBags.of(
            np.concatenate([bag.values_L for bag in same]),
            np.concatenate([np.diff(bag.offsets_N1) for bag in same]),
            None if same[0].weight_L is None else np.concatenate([bag.weight_L for bag in same]),
        )
        for same in zip(*(part.bags for part in parts), strict=True)
    )
    numbers = [part.row_numbers_N for part in parts if part.row_numbers_N is not None]
    return Rows(
        np.concatenate([part.numbers_IN for part in parts], axis=1),
        np.concatenate([part.targets_TN for part in parts], axis=1),
        np.concatenate([part.ids_SN for part in parts], axis=1),
        bags,
        np.concatenate(numbers) if numbers else None,
    )


@dataclass(slots=True)
class DecodedColumns:
    """Decoded columns by name, to which derived ones are added.

    Args:
        numbers: Numbers, [N], NaN where missing.
        ids: Ids of single-valued features, [N].
        bags: Ids of other features.
        times: Seconds since 1970 (UTC) of columns of timestamps, [N].
    """

    numbers: dict[str, Float32Array]
    ids: dict[str, Int64Array]
    bags: dict[str, FeatureBags]
    times: dict[str, Int64Array] = field(default_factory=dict)

    def derive(self, columns: Sequence[DerivedColumn]) -> None:
        """Compute columns, in their order. All must be fitted, but for those without values."""
        for column in columns:
            if column.kind is Derivation.BUCKETS:
                self.ids[column.name] = bucket_ids(self.numbers[column.reads[0]], _edges(column))
            elif column.kind is Derivation.MISSING:
                missing_N = np.isnan(self.numbers[column.reads[0]])
                self.numbers[column.name] = missing_N.astype(np.float32)
            elif column.kind is Derivation.PIECEWISE:
                way_N = way_gone(self.numbers[column.reads[0]], _edges(column))
                self.numbers[column.name] = way_N
            elif column.kind is Derivation.CROSS:
                self.ids[column.name] = crossed([self.ids[name] for name in column.reads])
            elif column.kind in (Derivation.HOUR, Derivation.WEEKDAY):
                self.ids[column.name] = date_ids(self.times[column.reads[0]], column.kind)
            elif column.kind in (Derivation.SINE, Derivation.COSINE):
                self.numbers[column.name] = self._on_circle(column)
            else:
                known = column.values
                assert known is not None, f"{column.in_words()} is not fitted"
                if (bag := self.bags.get(column.name)) is not None:
                    self.bags[column.name] = replace(bag, values_L=places(bag.values_L, known))
                else:
                    self.ids[column.name] = places(self.ids[column.name], known)

    def _on_circle(self, column: DerivedColumn) -> Float32Array:
        name = column.reads[0]
        period = _edges(column)[0]
        times_N = self.times.get(name)
        if times_N is None:
            missing_N = np.isnan(self.numbers[name])
            turns_N = turns_of_numbers(self.numbers[name], period)
        else:
            missing_N = times_N == MISSING
            turns_N = np.remainder(times_N, np.int64(period)) / np.float64(period)
        values_N = circle(turns_N)[column.kind is Derivation.COSINE]
        return np.where(missing_N, np.float32(0), values_N)


def _edges(column: DerivedColumn) -> Float32Array:
    assert column.values is not None, f"{column.in_words()} is not fitted"
    return column.values.astype(np.float32, copy=False)


@lru_cache(maxsize=1)
def log_edges() -> Float32Array:
    """Return the edges of the rule `log`, which those who won Criteo's contest of 2014 used: of a
    number above 2 the bucket is floor(ln(x)^2), of others the whole part; both have buckets of
    their own.

    An edge is the first float32 of its bucket, so no logarithm is computed later.
    """
    whole = np.arange(LEAST_WHOLE + 1, 3, dtype=np.float32)
    levels = [math.exp(math.sqrt(level)) for level in range(LARGEST_LEVEL + 1)]
    rounded = np.array(levels, dtype=np.float32)
    below = rounded.astype(np.float64) < levels
    rounded[below] = np.nextafter(rounded[below], np.float32(np.inf))
    rounded[0] = np.nextafter(np.float32(2), np.float32(3))
    return np.concatenate((whole, rounded))


def bucket_ids(numbers_N: Float32Array, edges: Float32Array) -> Int64Array:
    """Return the ids of buckets, [N]; MISSING for NaN.

    Args:
        numbers_N: The numbers.
        edges: The edges, ascending.
    """
    ids: Int64Array = np.searchsorted(edges, numbers_N, side="right").astype(np.int64) + 1
    ids[np.isnan(numbers_N)] = MISSING
    return ids


def way_gone(numbers_N: Float32Array, ends: Float32Array) -> Float32Array:
    """Return the part of the way from one value to another that numbers have gone, [N]: 0 at or
    below the first, 1 at or above the second, linear between (piecewise linear encoding, Gorishniy
    and others 2022, arXiv 2203.05556, where the outermost pieces go on beyond their ends). It is 0
    for NaN.

    Args:
        numbers_N: The numbers.
        ends: Two values, ascending; without them all is 0.
    """
    if not len(ends):
        return np.zeros(len(numbers_N), dtype=np.float32)
    first, second = ends.astype(np.float64)  # the difference of two float32 may not be one
    # the array, too: NumPy 1 would compute with the type of the array
    way_N: Float32Array = ((numbers_N.astype(np.float64) - first) / (second - first)).astype(
        np.float32
    )
    way_N = np.minimum(np.maximum(way_N, np.float32(0)), np.float32(1))
    way_N[np.isnan(numbers_N)] = 0
    return way_N


def date_ids(times_N: Int64Array, kind: Derivation) -> Int64Array:
    """Return the ids of the hours of the day, 1 to 24, or of the weekdays, 1 (Monday) to 7, [N];
    MISSING for a missing time.

    Args:
        times_N: Seconds since 1970 (UTC), which began on a Thursday.
        kind: `Kind.HOUR` or `Kind.WEEKDAY`.
    """
    days_N = (times_N // DAY_SECONDS + 3) % 7
    parts_N = times_N % DAY_SECONDS // 3600 if kind is Derivation.HOUR else days_N
    return np.where(times_N == MISSING, MISSING, parts_N + 1)


def turns_of_numbers(numbers_N: Float32Array, period: np.float32) -> Float64Array:
    """Return the part of a period that numbers are in, 0 to 1, [N]; 0 for NaN.

    Args:
        numbers_N: The numbers.
        period: The period.
    """
    length = np.float64(period)
    left_N = np.fmod(np.nan_to_num(numbers_N, nan=0.0).astype(np.float64), length)  # exact
    turns_N: Float64Array = np.where(left_N < 0, left_N + length, left_N) / length
    return turns_N


def circle(turns_N: Float64Array) -> tuple[Float32Array, Float32Array]:
    """Return the sines and cosines of turns, [N] each.

    A turn is cut into quarters, within which both are polynomials of the angle. The order of the
    operations is that of C++; no two are fused.

    Args:
        turns_N: Parts of a full turn, 0 to 1.
    """
    quarters_N = turns_N * 4
    whole_N = np.floor(quarters_N)
    angle_N = (quarters_N - whole_N) * HALF_PI
    square_N = angle_N * angle_N
    sine_N = polyval(square_N, SINE_TERMS) * angle_N  # by Horner's rule
    cosine_N = polyval(square_N, COSINE_TERMS)
    quarter_N = whole_N.astype(np.int64) % 4
    sines_N = np.choose(quarter_N, (sine_N, cosine_N, -sine_N, -cosine_N))
    cosines_N = np.choose(quarter_N, (cosine_N, -sine_N, -cosine_N, sine_N))
    return sines_N.astype(np.float32), cosines_N.astype(np.float32)


def places(ids: Int64Array, known: npt.NDArray[np.generic]) -> Int64Array:
    """Return the place of each id in a vocabulary, counted from 1; MISSING for other ids.

    Args:
        ids: The ids.
        known: The vocabulary, ascending.
    """
    if not len(known):
        return np.full(len(ids), MISSING, dtype=np.int64)
    at = np.searchsorted(known, ids)
    at[at == len(known)] = 0
    places_N: Int64Array = np.where(known[at] == ids, at + 1, MISSING)
    return places_N


def crossed(ids: Sequence[Int64Array]) -> Int64Array:
    """Return the XXH64 hash, seed 0, of the bytes of the ids of each row, [N].

    Args:
        ids: Columns of ids, each [N].
    """
    row_NC = np.ascontiguousarray(np.stack(ids, axis=1)).view(np.uint8)
    hash_N = np.empty(len(row_NC), np.int64)
    compiled_texts().hash_rows(row_NC, hash_N)
    return hash_N
