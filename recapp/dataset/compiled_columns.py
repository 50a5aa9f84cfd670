"""Decoding and gathering of rows, compiled.

`decode_integers` and `decode_floats` read a column of numbers as Arrow has them: values in their
own type, and a bit for each that is there. `gather` writes the rows of a batch, column after
column, from the chunks in memory (`recapp/dataset/chunk_store.py`), where ids have 32 bits as long
as all of a chunk fit.

Letters: N rows of a column, Z chunks, C columns, B rows of a batch.
"""

from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from recapp.kernels.numba_cache import compiled
from recapp.kernels.simd import get, prefetch, put
from recapp.kernels.widths import CACHE_LINE_BYTES

jit = compiled()
MISSING = np.int64(-(2**63))
MISSING_INT32 = np.int64(-(2**31))
SLOT_BITS = 32  # a row's place is the slot of its chunk, then the row's number in the chunk
IN_CHUNK = (1 << SLOT_BITS) - 1
SHORT = np.zeros(0, np.int32)  # of types
LONG = np.zeros(0, np.int64)
BYTES = np.zeros(0, np.uint8)


@intrinsic  # type: ignore[untyped-decorator]
def pointer(typing: Any, address: Any, like: Any) -> Any:
    """Return an address as a pointer to elements of the type of an array."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_data_type(like.dtype).as_pointer())

    return types.CPointer(like.dtype)(address, like), lower


@jit
def element(address: Any, like: Any) -> Any:
    """Read an element, in the type of an array, at an address."""
    return pointer(address, like)[0]


@jit
def widened(id: Any) -> Any:
    """Return an id of 32 bits in 64; if it is missing, it is missing there, too."""
    return MISSING if id == MISSING_INT32 else np.int64(id)


@jit
def column_of(batch: Any, number: Any, like: Any, there_N: Any) -> Any:
    """Return the values of a column, and write whether each is there.

    Args:
        batch: The address of a record batch, a struct of Arrow's C data interface.
        number: The number of the column.
        like: An array of the type of its values.
        there_N: Bytes that are written, at least as many as there are values, and 8 more.

    Returns:
        The values, and the bytes of `there_N` that tell whether each is there.
    """
    array = element(element(batch + 48, LONG) + number * 8, LONG)  # of the children
    rows, nulls, first = carray(pointer(array, LONG), 3)
    bits, values = carray(pointer(element(array + 40, LONG), LONG), 2)
    value_N = carray(pointer(values, like), first + rows)[first:]
    if nulls == 0 or bits == 0:
        there_N[:] = 1
        return value_N, there_N
    begin = first >> 3
    bytes = ((first + rows + 7) >> 3) - begin
    bits_N = carray(pointer(bits + begin, BYTES), bytes)
    for n in range(bytes):
        byte = get(bits_N, n)
        for bit in range(8):
            put(there_N, n * 8 + bit, byte >> bit & 1)
    return value_N, there_N[first & 7 :]


@jit
def decode_integers(
    batch: Any, number_C: Any, row_C: Any, like: Any, absent: Any, out_SN: Any
) -> Any:
    """Write columns of ids, in 64 or 32 bits; return which have an integer that is the number of
    missing ids, or does not fit, [C].

    Args:
        batch: The address of the record batch, as for `column_of`.
        number_C: The numbers of the columns.
        row_C: The row of `out_SN` for each.
        like: An array of the type of their values.
        absent: What is written where a value is missing.
        out_SN: The ids that are written.
    """
    odd_C = np.zeros(len(number_C), np.bool_)
    space_N = np.empty(out_SN.shape[1] + 16, np.uint8)
    for c in range(len(number_C)):
        value_N, there_N = column_of(batch, number_C[c], like, space_N)
        out_N = out_SN[row_C[c]]
        odd = False
        for n in range(len(out_N)):
            there = there_N[n] != 0
            value = np.int64(value_N[n]) if there else absent
            out_N[n] = value
            odd |= ((value == absent) & there) | (np.int64(out_N[n]) != value)
        odd_C[c] = odd
    return odd_C


@jit
def decode_floats(
    batch: Any, number_C: Any, row_C: Any, like: Any, absent: Any, out_SN: Any
) -> Any:
    """Write columns of numbers in fp32, like `decode_integers`; return which have a number that is
    not finite, [C].
    """
    odd_C = np.zeros(len(number_C), np.bool_)
    space_N = np.empty(out_SN.shape[1] + 16, np.uint8)
    gap = np.float32(absent)
    for c in range(len(number_C)):
        value_N, there_N = column_of(batch, number_C[c], like, space_N)
        out_N = out_SN[row_C[c]]
        odd = False
        for n in range(len(out_N)):
            value = np.float32(value_N[n])
            odd |= (value - value != 0) & (there_N[n] != 0)
            out_N[n] = value if there_N[n] else gap
        odd_C[c] = odd
    return odd_C


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
def move(at: Any, to: Any, size: Any, like: Any) -> None:
    """Copy an element of the type of an array between addresses; an id of 32 bits is widened."""
    if size == like.itemsize:
        pointer(to, like)[0] = element(at, like)
    else:
        pointer(to, like)[0] = widened(element(at, SHORT))


@jit
def gather(table_Z3: Any, place_VK: Any, address_MC: Any, step: Any, like: Any) -> None:
    """Write the values of the rows of some batches: of each lane, the rows of a chunk, column after
    column, because nothing but a place differs from one to the next. Rows that were shuffled
    together lie in the same lines of the cache, which serve all their batches at once, and which
    are fetched while the column before is written.

    Args:
        table_Z3: Of each chunk, the address of its values, the bytes of one of its columns, and the
            bytes of a value: those of `like`, or 4 of an id that has 8 there.
        place_VK: The places of the rows of each lane, those of one batch after the other.
        address_MC: The address of each column of each batch.
        step: The bytes from a row to the next one in a batch.
        like: An array of the type of a batch's values.
    """
    places = place_VK.shape[1]
    batches, columns = address_MC.shape
    share = places // batches
    from_K = np.empty(places, np.int64)  # bytes behind the begin of a chunk's column
    to_K = np.empty(places, np.int64)  # and of that of a batch's
    end_M = np.empty(batches, np.int64)
    for lane in range(len(place_VK) if places else 0):
        place_K = place_VK[lane]
        for slot in range(place_K.min() >> SLOT_BITS, (place_K.max() >> SLOT_BITS) + 1):
            address, column, size = table_Z3[slot]
            low = column
            high = 0
            end = 0
            for m in range(batches):
                for k in range(m * share, (m + 1) * share):
                    if get(place_K, k) >> SLOT_BITS == slot:
                        row = (get(place_K, k) & IN_CHUNK) * size
                        low = min(low, row)
                        high = max(high, row)
                        put(from_K, end, row)
                        put(to_K, end, (lane * share + k - m * share) * step)
                        end += 1
                end_M[m] = end
            if high - low > CACHE_LINE_BYTES * end:
                high = low - 1  # most lines have no row of these
            for c in range(columns):
                for at in range(low, high + 1, CACHE_LINE_BYTES):
                    prefetch(from_K, (address + column + at - from_K.ctypes.data) >> 3, 1)
                first = 0
                for m in range(batches):
                    to = address_MC[m, c]
                    if end == places:  # rows follow each other in the batch
                        to += get(to_K, first)
                        for i in range(first, end_M[m]):
                            move(address + get(from_K, i), to, size, like)
                            to += step
                    else:
                        for i in range(first, end_M[m]):
                            move(address + get(from_K, i), to + get(to_K, i), size, like)
                    first = end_M[m]
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
