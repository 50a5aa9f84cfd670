"""Least squares with coefficients that are not negative: how latency and rates are read off
timings.

    seconds ~ step * 1 + call * calls + item * items + byte * bytes

A time that falls with the number of bytes is chance, so such a coefficient is 0. There are four of
them at most: every subset that may stay is tried. What is made small is the error of the ratio,
twice as long as bad as half as long: a message of 4 KB matters as much as one of 4 MB.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

LEAST_SECONDS = 1e-9  # below the resolution of any clock
PASSES = 12  # weights follow the line, and the line them: it settles in a few


def typical(seconds: Sequence[float]) -> float:
    """The lower quartile of some rounds: others on the machine only ever make a round slower."""
    return float(np.quantile(seconds, 0.25))


def fit(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], float]:
    """Coefficients of at least 0 of each count, and the median relative error that is left.

    Args:
        counts: of each sample, as many of each.
        seconds: that each sample took.
    """
    taken = np.maximum(np.asarray(seconds, np.float64), LEAST_SECONDS)
    counted = np.asarray(counts, np.float64)
    weight = taken**-2
    for _ in range(PASSES):
        scale = np.sqrt(weight)
        found = _not_negative(counted * scale[:, None], taken * scale)
        said = np.maximum(counted @ found, LEAST_SECONDS)
        weight = _weights(said, taken)
    return found.tolist(), float(np.median(np.abs(said / taken - 1)))


def _weights(said: NDArray[np.float64], taken: NDArray[np.float64]) -> NDArray[np.float64]:
    """With these, squares of differences have the slope of squares of the ratio's logarithm, so
    both are least at the same place.
    """
    apart = np.where(np.abs(said / taken - 1) < 1e-6, 1e-6 * taken, said - taken)
    return np.asarray(np.log1p(apart / taken) / (apart * said))


def _not_negative(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """The best solution among those of all subsets of columns in which none is negative."""
    size = np.maximum(np.abs(matrix).max(0), np.finfo(float).tiny)
    best = np.zeros(matrix.shape[1])
    least = float((target**2).sum())
    for n in range(1, matrix.shape[1] + 1):
        for kept in map(list, combinations(range(matrix.shape[1]), n)):
            found = (
                np.linalg.lstsq(matrix[:, kept] / size[kept], target, rcond=None)[0] / size[kept]
            )
            left = float(((matrix[:, kept] @ found - target) ** 2).sum())
            if (found >= 0).all() and left < least * (1 - 1e-9):
                least = left
                best = np.zeros(matrix.shape[1])
                best[kept] = found
    return best
