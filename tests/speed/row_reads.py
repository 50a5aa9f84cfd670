"""Read rows at random and do nothing else: the limit that memory sets to a lookup of packed rows.

A pass touches every cache line of the packed rows of a batch. It prefetches lines as the lookup
does (`recapp/kernels/numba_vectors.py`). So the further time of a lookup is the time of its
arithmetic and of its output.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numba
import numpy as np
from numba import prange
from torch import Tensor

from recapp.kernels.numba_cache import compiled, inlined
from recapp.kernels.numba_cpu import THREADS_FROM_ROWS, array, threads_of_torch
from recapp.kernels.numba_vectors import FAR_AHEAD, NEAR_AHEAD
from recapp.kernels.simd import get, prefetch, prefetch_far
from recapp.kernels.widths import CACHE_LINE_BYTES

jit = compiled()
parallel_jit = compiled(parallel=True)


@lru_cache(None)
def reading(size: int) -> Callable[..., int]:
    """Return a function that reads the rows at `first` to `last` of an index, each packed in
    `size` bytes.
    """
    last_byte = size - 1

    @inlined(size)
    def reading(packed: Any, index_N: Any, first: Any, last: Any) -> Any:
        total = 0
        for k in range(first, last):
            if k + FAR_AHEAD < last:
                prefetch_far(packed, get(index_N, k + FAR_AHEAD) * size, size)
            if k + NEAR_AHEAD < last:
                prefetch(packed, get(index_N, k + NEAR_AHEAD) * size, size)
            at = get(index_N, k) * size
            for byte in range(0, last_byte, CACHE_LINE_BYTES):
                total += int(get(packed, at + byte))
            total += int(get(packed, at + last_byte))
        return total

    return reading


@lru_cache(None)
def _on_one_thread(size: int) -> Any:
    return jit(reading(size))


@lru_cache(None)
def _on_threads(size: int) -> Any:
    serial = reading(size)

    @parallel_jit
    def read_on_threads(packed: Any, index_N: Any, edge_T1: Any) -> Any:
        total = 0
        for t in prange(len(edge_T1) - 1):
            total += serial(packed, index_N, edge_T1[t], edge_T1[t + 1])
        return total

    return read_on_threads


def read_rows(packed_RK: Tensor, index_N: Tensor) -> int:
    """Read rows of bytes, and return a sum of some of the bytes.

    Args:
        packed_RK: The rows, uint8, contiguous.
        index_N: The numbers of the rows to read, in this order.
    """
    arrays = array(packed_RK.view(-1)), array(index_N)
    threads = threads_of_torch()
    count = len(index_N)
    if threads == 1 or count < THREADS_FROM_ROWS:
        return int(_on_one_thread(packed_RK.shape[1])(*arrays, 0, count))
    edge_T1 = np.linspace(0, count, threads + 1).astype(np.int64)
    numba.set_num_threads(threads)
    return int(_on_threads(packed_RK.shape[1])(*arrays, edge_T1))
