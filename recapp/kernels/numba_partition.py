"""How work is dealt to threads: equal shares of what it costs, not of how many pieces it has.

Bags differ a hundredfold in ids (MLPerf's tables ask for 1 to 100 a sample), so equal numbers of
bags or of tables keep one thread waiting for the other half of the step. Who does what changes no
result.
"""

from typing import Any

import numpy as np

from recapp.kernels.numba_cache import compiled
from recapp.kernels.simd import get

jit = compiled()


def deal(cost_I: Any, threads: int) -> Any:
    """The thread of each strip: the dearest first, each to whoever has least (Graham's longest
    processing time first).
    """
    thread_I = np.zeros(len(cost_I), np.int64)
    # numba would compile its sort for a second and a half, and for one thread as well
    if threads > 1:
        _deal(cost_I, np.argsort(-cost_I, kind="stable"), np.zeros(threads, np.int64), thread_I)
    return thread_I


@jit
def _deal(cost_I: Any, order_I: Any, load_T: Any, thread_I: Any) -> None:
    """Strips in the order given."""
    for i in order_I:
        thread_I[i] = np.argmin(load_T)
        load_T[thread_I[i]] += cost_I[i]


@jit
def cut(offsets_M1: Any, M: Any, threads: Any) -> Any:
    """Bags edge[t] .. edge[t + 1] for each thread: about as many entries and results each. Empty
    offsets: one entry per bag.
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
