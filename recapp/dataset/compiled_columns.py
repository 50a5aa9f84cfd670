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

from recapp.kernels.links import CACHE_LINE_BYTES
from recapp.kernels.numba_cache import compiled
from recapp.kernels.simd import get, prefetch, put

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
def column_of(batch: Any, number: Any, rows: Any, like: Any) -> Any:
    """Return the values of a column, and whether each is there; nothing if all are.

    Args:
        batch: The address of a record batch, a struct of the C data interface of Arrow.
        number: The number of the column.
        rows: The number of its values.
        like: An array of their type.
    """
    array = element(element(batch + 48, LONG) + number * 8, LONG)  # of the children
    nulls, first = element(array + 8, LONG), element(array + 16, LONG)
    buffers = element(array + 40, LONG)
    value_N = carray(pointer(element(buffers + 8, LONG), like), first + rows)[first:]
    bits = element(buffers, LONG)
    if nulls == 0 or bits == 0:
        return value_N, np.empty(0, np.uint8)
    begin = first >> 3
    bytes = ((first + rows + 7) >> 3) - begin
    bits_N = carray(pointer(bits + begin, BYTES), bytes)
    there_N = np.empty(bytes * 8, np.uint8)
    for n in range(bytes):
        byte = get(bits_N, n)
        for bit in range(8):
            put(there_N, n * 8 + bit, byte >> bit & 1)
    return value_N, there_N[first & 7 :]


@jit
def write_integers(value_N: Any, there_N: Any, absent: Any, out_N: Any) -> Any:
    """Write the ids of a column, in 64 or 32 bits; return whether an integer that is there is the
    number of missing ids, or does not fit.
    """
    odd = False
    if not len(there_N):
        for n in range(len(out_N)):
            value = np.int64(value_N[n])
            out_N[n] = value
            odd |= (value == absent) | (np.int64(out_N[n]) != value)
        return odd
    for n in range(len(out_N)):
        there = there_N[n] != 0
        value = np.int64(value_N[n]) if there else absent
        out_N[n] = value
        odd |= ((value == absent) & there) | (np.int64(out_N[n]) != value)
    return odd


@jit
def write_floats(value_N: Any, there_N: Any, absent: Any, out_N: Any) -> Any:
    """Write the numbers of a column in fp32; return whether one that is there is not finite."""
    odd = False
    gap = np.float32(absent)
    if not len(there_N):
        for n in range(len(out_N)):
            value = np.float32(value_N[n])
            odd |= value - value != 0
            out_N[n] = value
        return odd
    for n in range(len(out_N)):
        value = np.float32(value_N[n])
        odd |= (value - value != 0) & (there_N[n] != 0)
        out_N[n] = value if there_N[n] else gap
    return odd


@jit
def decode_integers(
    batch: Any, number_C: Any, row_C: Any, like: Any, absent: Any, out_SN: Any
) -> Any:
    """Write columns of ids; return which have a value that cannot be written, [C].

    Args:
        batch: The address of the record batch, as for `column_of`.
        number_C: The numbers of the columns.
        row_C: The row of `out_SN` for each.
        like: An array of the type of their values.
        absent: What is written where a value is missing.
        out_SN: The ids that are written.
    """
    odd_C = np.empty(len(number_C), np.bool_)
    for c in range(len(number_C)):
        value_N, there_N = column_of(batch, number_C[c], out_SN.shape[1], like)
        odd_C[c] = write_integers(value_N, there_N, absent, out_SN[row_C[c]])
    return odd_C


@jit
def decode_floats(
    batch: Any, number_C: Any, row_C: Any, like: Any, absent: Any, out_SN: Any
) -> Any:
    """Write columns of numbers like `decode_integers`."""
    odd_C = np.empty(len(number_C), np.bool_)
    for c in range(len(number_C)):
        value_N, there_N = column_of(batch, number_C[c], out_SN.shape[1], like)
        odd_C[c] = write_floats(value_N, there_N, absent, out_SN[row_C[c]])
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
def sort_by_chunk(place_K: Any, order_K: Any, end_Z: Any) -> None:
    """Write the numbers of places in the order of their chunks, and where each chunk's end there;
    those of one chunk stay in their order.
    """
    end_Z[:] = 0
    for k in range(len(place_K)):
        end_Z[get(place_K, k) >> SLOT_BITS] += 1
    begin = 0
    for slot in range(len(end_Z)):
        begin += end_Z[slot]
        end_Z[slot] = begin - end_Z[slot]
    for k in range(len(place_K)):
        slot = get(place_K, k) >> SLOT_BITS
        order_K[end_Z[slot]] = k
        end_Z[slot] += 1


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
    lanes, places = place_VK.shape
    batches, columns = address_MC.shape
    share = places // batches
    order_K = np.empty(places, np.int64)
    from_K = np.empty(places, np.int64)  # bytes behind the begin of a chunk's column
    to_K = np.empty(places, np.int64)  # and of that of a batch's
    here = from_K.ctypes.data
    end_Z = np.empty(len(table_Z3), np.int64)
    end_M = np.empty(batches, np.int64)
    for lane in range(lanes):
        sort_by_chunk(place_VK[lane], order_K, end_Z)
        end = 0
        for slot in range(len(end_Z)):
            begin = end
            end = end_Z[slot]
            if begin == end:
                continue
            address, column, size = table_Z3[slot]
            low = column
            high = 0
            i = begin
            for m in range(batches):
                while i < end and order_K[i] < (m + 1) * share:
                    row = (place_VK[lane, order_K[i]] & IN_CHUNK) * size
                    low = min(low, row)
                    high = max(high, row)
                    put(from_K, i, row)
                    put(to_K, i, (lane * share + order_K[i] - m * share) * step)
                    i += 1
                end_M[m] = i
            if high - low > CACHE_LINE_BYTES * (end - begin):
                high = low - 1  # most lines have no row of these
            for c in range(columns):
                for at in range(low, high + 1, CACHE_LINE_BYTES):
                    prefetch(from_K, (address + column + at - here) // from_K.itemsize, 1)
                first = begin
                for m in range(batches):
                    to = address_MC[m, c]
                    if end - begin == places:  # rows follow each other in the batch
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
