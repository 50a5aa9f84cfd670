"""Decoding and gathering of rows, compiled.

`decode_integers` and `decode_floats` read a column of numbers as Arrow has them: values in their
own type, and a bit for each that is there. `gather` writes the rows of a batch, column after
column, from the chunks in memory (`recapp/dataset/chunk_store.py`), where ids have 32 bits as long
as all of a chunk fit.

Letters: N rows of a column, Z chunks, C columns, B rows of a batch.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from recapp.kernels.links import CACHE_LINE_BYTES
from recapp.kernels.numba_cache import compiled
from recapp.kernels.simd import get, prefetch, put

jit = compiled()
MISSING = np.int64(-(2**63))
MISSING_INT32 = np.int64(-(2**31))
SLOT_BITS = 32  # a row's place is the slot of its chunk, then the row's number in the chunk
IN_CHUNK = (1 << SLOT_BITS) - 1
SHORT = np.zeros(0, np.int32)  # of the types of ids
LONG = np.zeros(0, np.int64)


@intrinsic  # type: ignore[untyped-decorator]
def element(typing: Any, address: Any, like: Any) -> Any:
    """Read an element, in the type of an array, at an address."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = context.get_data_type(like.dtype).as_pointer()
        return builder.load(builder.inttoptr(arguments[0], kind))

    return like.dtype(address, like), lower


@intrinsic  # type: ignore[untyped-decorator]
def set_element(typing: Any, address: Any, value: Any, like: Any) -> Any:
    """Write an element, in the type of an array, at an address."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = context.cast(builder, arguments[1], value, like.dtype)
        kind = context.get_data_type(like.dtype).as_pointer()
        builder.store(number, builder.inttoptr(arguments[0], kind))
        return context.get_dummy_value()

    return types.void(address, value, like), lower


@jit
def widened(id: Any) -> Any:
    """Return an id of 32 bits in 64; if it is missing, it is missing there, too."""
    return MISSING if id == MISSING_INT32 else np.int64(id)


@jit
def unpacked(bits: Any, first: Any, rows: Any) -> Any:
    """Return whether each of some rows is there, [N], from the bits of Arrow."""
    begin = first >> 3
    bytes = ((first + rows + 7) >> 3) - begin
    there = np.empty(bytes * 8, np.uint8)
    for n in range(bytes):
        byte = get(bits, begin + n)
        for bit in range(8):
            put(there, n * 8 + bit, byte >> bit & 1)
    return there[first & 7 :]


@jit
def decode_integers(values_N: Any, bits: Any, first: Any, out_N: Any) -> Any:
    """Write the ids of a column of integers, in 64 or 32 bits.

    Args:
        values_N: The integers; any one where it is missing.
        bits: A bit for each integer that is there; none if all are.
        first: The number of the first integer's bit.
        out_N: The ids that are written.

    Returns:
        Whether an integer is the number of missing ids, or does not fit.
    """
    absent = MISSING if out_N.itemsize == 8 else MISSING_INT32
    odd = False
    if not len(bits):
        for n in range(len(out_N)):
            value = np.int64(values_N[n])
            out_N[n] = value
            odd |= (value == absent) | (np.int64(out_N[n]) != value)
        return odd
    there_N = unpacked(bits, first, len(out_N))
    for n in range(len(out_N)):
        there = there_N[n] != 0
        value = np.int64(values_N[n]) if there else absent
        out_N[n] = value
        odd |= ((value == absent) & there) | (np.int64(out_N[n]) != value)
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
    there_N = unpacked(bits, first, len(out_N))
    for n in range(len(out_N)):
        value = np.float32(values_N[n])
        odd |= (value - value != 0) & (there_N[n] != 0)
        out_N[n] = value if there_N[n] else absent
    return odd


@jit
def shorten(id_L: Any, out_L: Any) -> Any:
    """Write ids in 32 bits; return whether all fit, and none is the number of missing ids there."""
    odd = np.int64(0)
    for n in range(len(id_L)):
        near = max(id_L[n], MISSING_INT32)
        out_L[n] = near
        odd |= near ^ np.int64(np.int32(near))
        odd |= np.int64((near == MISSING_INT32) & (id_L[n] != MISSING))
    return odd == 0


@jit
def count_off(place_N: Any, left_Z: Any) -> Any:
    """Count rows off those that are left of their chunks; return whether a chunk has none left."""
    ended = False
    for n in range(len(place_N)):
        slot = place_N[n] >> SLOT_BITS
        left_Z[slot] -= 1
        ended |= left_Z[slot] == 0
    return ended


@jit
def gather(table_Z3: Any, place_VK: Any, address_MC: Any, step: Any, like: Any) -> None:
    """Write the values of the rows of some batches. Rows of one chunk usually follow each other,
    and are written column after column: nothing but a place differs from one to the next. Rows that
    are shuffled together lie in the same lines of the cache, which serve all their batches at once,
    and which are fetched while the column before is written.

    Args:
        table_Z3: Of each chunk, the address of its values, the bytes of one of its columns, and the
            bytes of a value: those of `like`, or 4 of an id that has 8 there.
        place_VK: The places of the rows of each lane, those of one batch after the other.
        address_MC: The address of each column of each batch.
        step: The bytes from a row to the next one in a batch.
        like: An array of the type of a batch's values.
    """
    lanes, places = place_VK.shape
    share = places // len(address_MC)
    row_K = np.empty(places, np.int64)  # bytes behind the begin of a column
    here = row_K.ctypes.data
    for lane in range(lanes):
        end = 0
        while end < places:
            begin = end
            slot = place_VK[lane, begin] >> SLOT_BITS
            address, column, size = table_Z3[slot]
            low = column
            high = 0
            while end < places and place_VK[lane, end] >> SLOT_BITS == slot:
                row = (place_VK[lane, end] & IN_CHUNK) * size
                put(row_K, end, row)
                low = min(low, row)
                high = max(high, row)
                end += 1
            if high - low > CACHE_LINE_BYTES * (end - begin):
                high = low - 1  # most lines have no row of these
            for c in range(address_MC.shape[1]):
                for at in range(low, high + 1, CACHE_LINE_BYTES):
                    prefetch(row_K, (address + column + at - here) // row_K.itemsize, 1)
                for m in range(begin // share, (end - 1) // share + 1):
                    first = max(begin, m * share)
                    to = address_MC[m, c] + (lane * share + first - m * share) * step
                    if size == like.itemsize:
                        for k in range(first, min(end, (m + 1) * share)):
                            set_element(to, element(address + get(row_K, k), like), like)
                            to += step
                    else:
                        for k in range(first, min(end, (m + 1) * share)):
                            id = widened(element(address + get(row_K, k), SHORT))
                            set_element(to, id, like)
                            to += step
                address += column


@jit
def lengths_of_bags(bounds_Z3: Any, place_B: Any, length_B: Any) -> Any:
    """Write the number of ids of each row of a batch, and return their sum.

    Args:
        bounds_Z3: As the table of `gather`, for the bounds of each chunk's bags.
        place_B: The places of the rows.
        length_B: The numbers that are written.
    """
    total = 0
    for b in range(len(length_B)):
        at = bounds_Z3[place_B[b] >> SLOT_BITS, 0] + (place_B[b] & IN_CHUNK) * 8
        length_B[b] = element(at + 8, length_B) - element(at, length_B)
        total += length_B[b]
    return total


@jit
def gather_bags(values_Z3: Any, bounds_Z3: Any, place_B: Any, out: Any) -> None:
    """Write the ids of the rows of a batch, one bag after the other.

    Args:
        values_Z3: As the table of `gather`, for the ids of each chunk's bags.
        bounds_Z3: Likewise, for their bounds.
        place_B: The places of the rows.
        out: The ids that are written.
    """
    to = 0
    for b in range(len(place_B)):
        slot = place_B[b] >> SLOT_BITS
        at = bounds_Z3[slot, 0] + (place_B[b] & IN_CHUNK) * 8
        size = values_Z3[slot, 2]
        for n in range(element(at, LONG), element(at + 8, LONG)):
            id = values_Z3[slot, 0] + n * size
            out[to] = element(id, out) if size == out.itemsize else widened(element(id, SHORT))
            to += 1
