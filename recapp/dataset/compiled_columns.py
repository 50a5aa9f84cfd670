"""Decoding and gathering of rows, compiled.

`decode_integers` and `decode_floats` read a column of numbers as Arrow has them: values in their
own type, and a bit for each that is there. `gather` writes the rows of a batch, column after
column, from the chunks in memory (`recapp/dataset/chunk_store.py`).

Letters: N rows of a column, Z chunks, C columns, B rows of a batch.
"""

from typing import Any

import numpy as np
from numba.extending import intrinsic

from recapp.kernels.numba_cache import compiled

jit = compiled()
MISSING = np.int64(-(2**63))
MISSING_INT32 = np.int64(-(2**31))
SLOT_BITS = 32  # a row's place is the slot of its chunk, then the row's number in the chunk
IN_CHUNK = (1 << SLOT_BITS) - 1


@intrinsic  # type: ignore[untyped-decorator]
def element(typing: Any, address: Any, like: Any) -> Any:
    """Read an element, in the type of an array, at an address."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = context.get_data_type(like.dtype).as_pointer()
        return builder.load(builder.inttoptr(arguments[0], kind))

    return like.dtype(address, like), lower


@jit
def decode_integers(values_N: Any, bits: Any, first: Any, out_N: Any) -> Any:
    """Write the ids of a column of integers.

    Args:
        values_N: The integers; any one where it is missing.
        bits: A bit for each integer that is there; none if all are.
        first: The number of the first integer's bit.
        out_N: The ids that are written.

    Returns:
        Whether an integer is the number of missing ids.
    """
    odd = False
    if not len(bits):
        for n in range(len(out_N)):
            value = np.int64(values_N[n])
            odd |= value == MISSING
            out_N[n] = value
        return odd
    for n in range(len(out_N)):
        at = first + n
        there = bits[at >> 3] >> (at & 7) & 1
        value = np.int64(values_N[n])
        odd |= (value == MISSING) & (there != 0)
        out_N[n] = value if there else MISSING
    return odd


@jit
def decode_floats(values_N: Any, bits: Any, first: Any, absent: Any, out_N: Any) -> Any:
    """Write the numbers of a column in fp32, and another number for missing ones; return whether
    some are not finite. Arguments as for `decode_integers`.
    """
    odd = False
    if not len(bits):
        for n in range(len(out_N)):
            value = np.float32(values_N[n])
            odd |= value - value != 0
            out_N[n] = value
        return odd
    for n in range(len(out_N)):
        at = first + n
        there = bits[at >> 3] >> (at & 7) & 1
        value = np.float32(values_N[n])
        odd |= (value - value != 0) & (there != 0)
        out_N[n] = value if there else absent
    return odd


@jit
def gather(table_Z2: Any, place_B: Any, columns: Any, next: Any, step: Any, out: Any) -> None:
    """Write the values of the rows of a batch.

    Args:
        table_Z2: The address of each chunk's values, in the type of `out`, and the bytes of one of
            its columns.
        place_B: The places of the rows.
        columns: The number of columns.
        next: The distance in `out` of two columns.
        step: The distance in `out` of two rows.
        out: The values that are written.
    """
    at_B = np.empty(len(place_B), np.int64)
    step_B = np.empty(len(place_B), np.int64)
    for b in range(len(place_B)):
        slot = place_B[b] >> SLOT_BITS
        at_B[b] = table_Z2[slot, 0] + (place_B[b] & IN_CHUNK) * out.itemsize
        step_B[b] = table_Z2[slot, 1]
    for c in range(columns):
        to = c * next
        for b in range(len(at_B)):
            out[to] = element(at_B[b], out)
            to += step
            at_B[b] += step_B[b]


@jit
def narrow(id_L: Any, out_L: Any) -> Any:
    """Write ids in 32 bits; return whether all fit, and none is the number of missing ids there."""
    odd = np.int64(0)
    for n in range(len(id_L)):
        near = max(id_L[n], MISSING_INT32)
        out_L[n] = near
        odd |= near ^ np.int64(np.int32(near))
        odd |= np.int64((near == MISSING_INT32) & (id_L[n] != MISSING))
    return odd == 0


@jit
def lengths_of_bags(bounds_Z2: Any, place_B: Any, length_B: Any) -> None:
    """Write the number of ids of each row of a batch.

    Args:
        bounds_Z2: As the table of `gather`, for the bounds of each chunk's bags.
        place_B: The places of the rows.
        length_B: The numbers that are written.
    """
    for b in range(len(length_B)):
        at = bounds_Z2[place_B[b] >> SLOT_BITS, 0] + (place_B[b] & IN_CHUNK) * 8
        length_B[b] = element(at + 8, length_B) - element(at, length_B)


@jit
def gather_bags(values_Z2: Any, bounds_Z2: Any, place_B: Any, out: Any) -> None:
    """Write the ids of the rows of a batch, one bag after the other.

    Args:
        values_Z2: As the table of `gather`, for the ids of each chunk's bags.
        bounds_Z2: Likewise, for their bounds.
        place_B: The places of the rows.
        out: The ids that are written.
    """
    to = 0
    for b in range(len(place_B)):
        slot = place_B[b] >> SLOT_BITS
        at = bounds_Z2[slot, 0] + (place_B[b] & IN_CHUNK) * 8
        for n in range(element(at, out), element(at + 8, out)):
            out[to] = element(values_Z2[slot, 0] + n * 8, out)
            to += 1
