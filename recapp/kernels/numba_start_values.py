"""Start values of single rows, compiled: the same bits as those of `recapp/tables/initial.py`."""

from typing import Any

import numpy as np

from recapp.kernels.numba_cache import compiled
from recapp.kernels.simd import put

jit = compiled()
GOLDEN = np.uint32(0x9E3779B9)  # 2^32 / golden ratio


@jit
def mix(x: Any) -> Any:
    """Hash 32 bits."""
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@jit
def write_start_values(
    weights: Any, width: Any, slot_M: Any, key_M: Any, hashed: Any, column: Any, scale: Any
) -> None:
    """Write the start values of keys to their slots, fp32.

    Args:
        weights: Rows by slot, flat.
        width: Columns of a row.
        slot_M: The slots.
        key_M: The keys.
        hashed: The hash of seed and table name.
        column: The column of the table with which a row begins.
        scale: The distance of two values.
    """
    for m in range(len(slot_M)):
        key = np.uint64(key_M[m])
        high = mix(np.uint32(np.uint32(key >> np.uint64(32)) + hashed))
        row = mix(np.uint32(np.uint32(key & np.uint64(0xFFFFFFFF)) ^ high))
        at = slot_M[m] * width
        for d in range(width):
            bits = mix(np.uint32(row + np.uint32(np.uint32(column + d) * GOLDEN)))
            odd = np.int32(np.int32(bits >> np.uint32(7)) & np.int32(~1)) + np.int32(1 - 2**24)
            put(weights, at + d, np.float32(odd) * scale)
