"""Kernels on threads, and the partition of work over threads: by cost, not by the number of parts.

The ids of a bag differ a hundredfold (MLPerf's tables have 1 to 100 per sample): with equal numbers
of bags or tables, one of two threads would wait for half of the step. The partition changes no
result. Threads are those of OpenMP's pool, which torch uses as well: two pools would compete for
the cores.

A function for one thread or several takes the part `first .. last` of the work and four arguments
a, b, c and d, whose meaning is its own, such as store, requests, output and sizes. Each is an array
or a tuple of arrays and numbers, as many as a kernel needs: numba passes no nested tuples to
threads.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numba import prange

from recapp.kernels.numba_cache import compiled
from recapp.kernels.simd import get

jit = compiled()
Make = Callable[..., Callable[..., None]]
"""A function that takes the numbers of a closure and returns a function to inline into kernels."""


def on_one_thread(make: Make) -> Any:
    """Return a function that makes the kernel for one thread: f(a, b, c, d, first, last)."""
    return lru_cache(None)(lambda *made_for: jit(make(*made_for)))


def on_threads(make: Make) -> Any:
    """Return a function that makes the kernel for several threads: f(a, b, c, d, edge_T1). Thread t
    works on the part edge[t] .. edge[t + 1].
    """

    @lru_cache(None)
    def kernel_for(*made_for: Any) -> Any:
        serial = make(*made_for)

        def kernel(a: Any, b: Any, c: Any, d: Any, edge_T1: Any) -> None:
            for t in prange(len(edge_T1) - 1):
                serial(a, b, c, d, edge_T1[t], edge_T1[t + 1])

        kernel.__name__ = kernel.__qualname__ = f"{serial.__name__}_on_threads"
        return compiled(parallel=True)(kernel)

    return kernel_for


def assign_threads(cost_I: Any, threads: int) -> Any:
    """Return the thread of each strip: the most expensive strip first, each to the thread with the
    least work (Graham's longest processing time first).

    Args:
        cost_I: The cost of each strip, in any unit.
        threads: The number of threads.
    """
    thread_I = np.zeros(len(cost_I), np.int64)
    # numpy sorts here, because numba would take 1.5 seconds to compile a sort
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

    The sum of entries and results is about the same for all threads.

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
