"""The partition of work over threads, by what it costs and not by how many pieces it has.

Bags differ a hundredfold in ids (MLPerf's tables ask for 1 to 100 a sample), so with equal numbers
of bags or of tables one thread would wait for the other half of the step. Which thread does what
changes no result.
"""

from typing import Any

import numpy as np

from recapp.kernels.numba_cache import compiled
from recapp.kernels.simd import get

jit = compiled()


def assign_threads(cost_I: Any, threads: int) -> Any:
    """Return the thread of each strip: the dearest strip first, each to the thread with least work
    (Graham's longest processing time first).

    Args:
        cost_I: What each strip costs, in any measure.
        threads: The number of threads.
    """
    thread_I = np.zeros(len(cost_I), np.int64)
    # numpy sorts, because numba would compile a sort of its own for a second and a half
    if threads > 1:
        _assign_in_order(
            cost_I, np.argsort(-cost_I, kind="stable"), np.zeros(threads, np.int64), thread_I
        )
    return thread_I


@jit
def _assign_in_order(cost_I: Any, order_I: Any, load_T: Any, thread_I: Any) -> None:
    """Write the thread of each strip, in the given order of strips."""
    for i in order_I:
        thread_I[i] = np.argmin(load_T)
        load_T[thread_I[i]] += cost_I[i]


@jit
def split_bags(offsets_M1: Any, M: Any, threads: Any) -> Any:
    """Return where the bags of each thread begin: thread t has bags edge[t] .. edge[t + 1].

    Threads have about the same number of entries and results together.

    Args:
        offsets_M1: The offsets of the bags' entries; empty: one entry per bag.
        M: The number of bags.
        threads: The number of threads.
    """
    edge_T1 = np.zeros(threads + 1, np.int64)
    edge_T1[threads] = M
    for t in range(1, threads):
        if len(offsets_M1) == 0:
            edge_T1[t] = M * t // threads
            continue
        first = 0
        last = M
        begin = int(get(offsets_M1, 0))
        share = (int(get(offsets_M1, M)) - begin + M) * t // threads
        while first < last:
            middle = (first + last) >> 1
            if int(get(offsets_M1, middle)) - begin + middle < share:
                first = middle + 1
            else:
                last = middle
        edge_T1[t] = first
    return edge_T1
