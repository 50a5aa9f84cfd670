"""The search in sorted numbers, strip by strip, in torch, on any device. `numba_sorted_numbers.py`
reproduces its results.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def find_sorted(
    number_R: Tensor, edge_I1: Sequence[int], wanted_N: Tensor, strip_N: Tensor | None
) -> Tensor:
    """Return the indices of numbers, int64 [N]; -1 for numbers that are absent.

    Args:
        number_R: The numbers, int64, of each strip ascending and distinct.
        edge_I1: Strip i has number_R[edge[i] : edge[i + 1]].
        wanted_N: The numbers to find, int64.
        strip_N: The strip of each wanted number; None if there is one strip.
    """
    found_N = torch.full_like(wanted_N, -1)
    for strip in range(len(edge_I1) - 1):
        first = edge_I1[strip]
        held_K = number_R[first : edge_I1[strip + 1]]
        if not len(held_K):
            continue
        at_N = torch.searchsorted(held_K, wanted_N).clamp_(max=len(held_K) - 1)
        here_N = held_K[at_N] == wanted_N
        if strip_N is not None:
            here_N &= strip_N == strip
        found_N = torch.where(here_N, at_N + first, found_N)
    return found_N
