"""Counts of distinct values in bounded memory: exact for few values, from a sample for many.

A value belongs to the sample if its hash is below a limit. When more values are in memory than
allowed, the limit is halved, and values above it are forgotten. So the sample is uniform over the
distinct values, and does not depend on the order of rows: if the limit is a quarter of all hashes,
there are four times as many distinct values as in the sample (adaptive sampling, Wegman 1984;
Flajolet 1990). The standard error is 1 / sqrt(sampled values), .2 to .3 % for the default.

The most frequent values stay in memory beside the sample, with their counts since they were first
among the most frequent of the values added at once.

    value      a     b     c     d     e
    hash      .9    .1    .4    .7    .2         limit .5: b, c and e are in the sample, that is 6
    count   1000     2     1     3     1         distinct values; a is frequent and stays, d goes

Letter: N values.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from recapp.dataset.counter_hash import hashes

MOST = 2**18  # values in memory
FREQUENT = 1024  # values that stay in memory beside the sample
FREQUENT_NOW = 64  # of the values added at once: perhaps they are frequent from now on
_STREAM = (0x10C5,)  # of hashes that nothing else uses

Int64Array = npt.NDArray[np.int64]


class Counted(NamedTuple):
    """The values in memory, ascending, and how often each was seen.

    Args:
        values_N: The values, [N].
        counts_N: The number of occurrences of each, [N].
        share: The share of distinct values that the sample has; 1 if it has all.
    """

    values_N: Int64Array
    counts_N: Int64Array
    share: float

    @property
    def sampled_N(self) -> npt.NDArray[np.bool_]:
        """Whether each value belongs to the sample, [N]."""
        return in_sample(self.values_N, self.share)

    @property
    def distinct(self) -> int:
        """The number of distinct values, an estimate if `share` is below 1."""
        return round(int(self.sampled_N.sum()) / self.share)

    def of(self, values_K: Int64Array) -> Int64Array:
        """Return how often each of some values was seen, [K]; 0 for one that is not in memory."""
        if not len(self.values_N):
            return np.zeros(len(values_K), np.int64)
        place_K = np.minimum(np.searchsorted(self.values_N, values_K), len(self.values_N) - 1)
        return np.where(self.values_N[place_K] == values_K, self.counts_N[place_K], 0)

    def most_frequent(self, most: int) -> tuple[Int64Array, Int64Array]:
        """Return up to `most` values and their counts, the most frequent first."""
        order = np.argsort(-self.counts_N, kind="stable")[:most]
        return self.values_N[order], self.counts_N[order]


def in_sample(values_N: Int64Array, share: float) -> npt.NDArray[np.bool_]:
    """Return whether values belong to the sample of a share of all distinct values, [N]."""
    if share == 1:
        return np.ones(len(values_N), np.bool_)
    return hashes(_STREAM, values_N).astype(np.float64) < share * 2.0**64


class SampledCounts:
    """Count values in bounded memory.

    Args:
        most: The most values in memory, frequent ones not counted.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._share = 1.0
        self._parts: list[tuple[Int64Array, Int64Array]] = [(np.zeros(0, np.int64),) * 2]
        self._waiting = 0

    def add(self, values: Int64Array, counts: Int64Array) -> None:
        """Add some distinct values and how often each was seen."""
        if self._share < 1:
            known = self._parts[0][0]
            keep = in_sample(values, self._share) | np.isin(values, known)
            keep[np.argsort(-counts, kind="stable")[:FREQUENT_NOW]] = True
            values = values[keep]
            counts = counts[keep]
        self._parts.append((values, counts))
        self._waiting += len(values)
        if self._waiting > max(self._most // 2, len(self._parts[0][0])):
            self.result()

    def result(self) -> Counted:
        """Return the values so far."""
        values, place = np.unique(
            np.concatenate([part_values for part_values, _ in self._parts]), return_inverse=True
        )
        every = np.concatenate([part_counts for _, part_counts in self._parts])
        counts = np.bincount(place, weights=every, minlength=len(values)).astype(np.int64)
        while int(in_sample(values, self._share).sum()) > self._most:
            self._share /= 2
        if self._share < 1:
            keep = in_sample(values, self._share)
            keep[np.argsort(-counts, kind="stable")[:FREQUENT]] = True
            values = values[keep]
            counts = counts[keep]
        self._parts = [(values, counts)]
        self._waiting = 0
        return Counted(values, counts, self._share)
