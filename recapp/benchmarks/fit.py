"""Least squares with coefficients that are not negative: how latency and rates are read off timings.

    seconds ~ call * calls + item * items + byte * bytes

A time that falls with the number of bytes is chance, so such a coefficient is 0. There are three of them at most: every subset that may
stay is tried. Samples weigh by their relative error: a message of 4 KB matters as much as one of 4 MB.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

LEAST_SECONDS = 1e-9        # below the resolution of any clock


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
    relative = np.asarray(counts, np.float64) / taken[:, None]
    size = np.maximum(np.abs(relative).max(0), np.finfo(float).tiny)
    best, least = np.zeros(relative.shape[1]), float(len(taken))
    for n in range(1, relative.shape[1] + 1):
        for kept in map(list, combinations(range(relative.shape[1]), n)):
            found = np.linalg.lstsq(relative[:, kept] / size[kept], np.ones(len(taken)), rcond=None)[0] / size[kept]
            left = float(((relative[:, kept] @ found - 1) ** 2).sum())
            if (found >= 0).all() and left < least - 1e-12:
                least, best = left, np.zeros(relative.shape[1])
                best[kept] = found
    return best.tolist(), float(np.median(np.abs(relative @ best - 1)))
