"""The compiled search in sorted numbers: the functions of `sorted_numbers.py`, by interpolation.

Positions of keys are mixed bits, so they are spread evenly: the value of one among n tells its
place up to about the square root of n. From there the search goes in steps that double until it
passes the number, then bisects the last step. So it finds a key with a few reads that lie close
together, where a binary search of a whole mapped file would read pages far apart.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recapp.kernels.numba_cache import compiled

jit = compiled()


@jit
def _find(number_R: Any, edge_I1: Any, wanted_N: Any, strip_N: Any, found_N: Any) -> None:
    """Write the index of each number; -1 for a number that is absent."""
    for n in range(len(wanted_N)):
        strip = strip_N[n] if len(strip_N) else 0
        low = edge_I1[strip]
        high = edge_I1[strip + 1]
        wanted = wanted_N[n]
        found_N[n] = -1
        if low == high:
            continue
        share = (float(wanted) + 2.0**63) / 2.0**64
        at = min(low + np.int64(share * (high - low)), high - 1)
        step = np.int64(8)
        if number_R[at] < wanted:
            low = at + 1
            while low + step < high and number_R[low + step] < wanted:
                low += step + 1
                step *= 2
            high = min(low + step + 1, high)
        else:
            high = at
            while high - step > low and number_R[high - step] >= wanted:
                high -= step
                step *= 2
            low = max(high - step, low)
            high = min(high + 1, edge_I1[strip + 1])
        while low < high:
            middle = (low + high) // 2
            if number_R[middle] < wanted:
                low = middle + 1
            else:
                high = middle
        if low < edge_I1[strip + 1] and number_R[low] == wanted:
            found_N[n] = low


def find_sorted(
    number_R: Tensor, edge_I1: Sequence[int], wanted_N: Tensor, strip_N: Tensor | None
) -> Tensor:
    """Return the indices of numbers (see `sorted_numbers.find_sorted`)."""
    found_N = torch.empty_like(wanted_N)
    strips = np.zeros(0, np.int16) if strip_N is None else strip_N.numpy()
    edges = np.array(edge_I1, np.int64)
    _find(number_R.numpy(), edges, wanted_N.contiguous().numpy(), strips, found_N.numpy())
    return found_N
