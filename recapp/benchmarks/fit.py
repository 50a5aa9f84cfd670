"""Fit latencies and rates to timings: least squares with coefficients that are not negative.

    seconds ~ step * 1 + call * calls + item * items + byte * bytes

A time that falls as the number of bytes grows is chance, so such a coefficient is 0. There are at
most four coefficients, so the fit tries every subset of them. It minimises the error of the ratio:
a time twice as long is as bad as one half as long, and a message of 4 KB matters as much as one of
4 MB.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

LEAST_SECONDS = 1e-9  # below the resolution of any clock
PASSES = 12  # weights depend on the fit and the fit on the weights: it converges in a few passes


def typical(seconds: Sequence[float]) -> float:
    """Return the lower quartile of the seconds of some rounds.

    Other programs on the machine can only make a round slower, so fast rounds are more reliable.
    """
    return float(np.quantile(seconds, 0.25))


def fit(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], float]:
    """Return a coefficient of at least 0 for each count, and the median relative error of the fit.

    Args:
        counts: The counts of each sample, the same number for all samples.
        seconds: The time of each sample.
    """
    taken = np.maximum(np.asarray(seconds, np.float64), LEAST_SECONDS)
    counted = np.asarray(counts, np.float64)
    weight = taken**-2
    for _ in range(PASSES):
        scale = np.sqrt(weight)
        found = _not_negative(counted * scale[:, None], taken * scale)
        fitted = np.maximum(counted @ found, LEAST_SECONDS)
        weight = _weights(fitted, taken)
    return found.tolist(), float(np.median(np.abs(fitted / taken - 1)))


def _weights(fitted: NDArray[np.float64], taken: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return weights that make least squares minimise the logarithm of the ratio.

    With these weights, the squared differences have the same gradient as the squared logarithms of
    the ratio, so the same coefficients minimise both.
    """
    difference = np.where(np.abs(fitted / taken - 1) < 1e-6, 1e-6 * taken, fitted - taken)
    return np.asarray(np.log1p(difference / taken) / (difference * fitted))


def _not_negative(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solve least squares for every subset of columns, and return the best solution without a
    negative coefficient.
    """
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
