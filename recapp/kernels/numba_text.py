"""Ids of texts, compiled: the id of a canonical decimal is its integer, the id of any other text is
the XXH64 hash of its bytes.

XXH64 with seed 0 is specified bit by bit ("xxHash fast digest algorithm", Yann Collet). So an id is
the same in every process, on every machine and in every version, and other programs can compute it.
`tests/dataset/test_text_ids.py` compares hashes with published values. Letters: N texts, C bytes.
"""

from typing import Any

import numpy as np

from recapp.kernels.numba_cache import compiled

jit = compiled()
# The number of missing ids. No text may have it: a text with this hash gets the next number.
MISSING = np.int64(-(2**63))
P1 = np.uint64(0x9E3779B185EBCA87)
P2 = np.uint64(0xC2B2AE3D27D4EB4F)
P3 = np.uint64(0x165667B19E3779F9)
P4 = np.uint64(0x85EBCA77C2B2AE63)
P5 = np.uint64(0x27D4EB2F165667C5)
DIGITS = 19  # the digits of the largest int64
ZERO = ord("0")
NINE = ord("9")
MINUS = ord("-")


@jit
def decimal(data_C: Any, first: Any, last: Any) -> Any:
    """Return whether bytes first .. last spell an int64 in canonical form (within its range,
    without a plus, a leading zero or "-0"), and the int64.
    """
    negative = data_C[first] == MINUS
    begin = first + 1 if negative else first
    digits = last - begin
    if digits < 1 or digits > DIGITS or (data_C[begin] == ZERO and (negative or digits > 1)):
        return False, np.int64(0)
    value = np.uint64(0)
    for at in range(begin, last):
        if data_C[at] < ZERO or data_C[at] > NINE:
            return False, np.int64(0)
        value = value * np.uint64(10) + np.uint64(data_C[at] - ZERO)
    fits = value <= np.uint64(2**63 - 1) + np.uint64(negative)
    return fits, np.int64(np.uint64(0) - value if negative else value)


@jit
def word(data_C: Any, at: Any, size: Any) -> Any:
    """Return the little-endian number in `size` bytes."""
    value = np.uint64(0)
    for i in range(size):
        value |= np.uint64(data_C[at + i]) << np.uint64(8 * i)
    return value


@jit
def rotated(value: Any, bits: Any) -> Any:
    """Return a value of 64 bits, rotated left."""
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


@jit
def mixed(state: Any, lane: Any) -> Any:
    """Mix a lane of eight bytes into a state: XXH64's round."""
    return rotated(state + lane * P2, 31) * P1


@jit
def xxh64(data_C: Any, first: Any, last: Any) -> Any:
    """Return the XXH64 hash, with seed 0, of bytes first .. last."""
    at = first
    size = last - first
    if size >= 32:
        a = P1 + P2
        b = P2
        c = np.uint64(0)
        d = np.uint64(0) - P1
        while at + 32 <= last:
            a = mixed(a, word(data_C, at, 8))
            b = mixed(b, word(data_C, at + 8, 8))
            c = mixed(c, word(data_C, at + 16, 8))
            d = mixed(d, word(data_C, at + 24, 8))
            at += 32
        value = rotated(a, 1) + rotated(b, 7) + rotated(c, 12) + rotated(d, 18)
        for state in (a, b, c, d):
            value = (value ^ mixed(np.uint64(0), state)) * P1 + P4
    else:
        value = P5
    value += np.uint64(size)
    while at + 8 <= last:
        value = rotated(value ^ mixed(np.uint64(0), word(data_C, at, 8)), 27) * P1 + P4
        at += 8
    if at + 4 <= last:
        value = rotated(value ^ (word(data_C, at, 4) * P1), 23) * P2 + P3
        at += 4
    while at < last:
        value = rotated(value ^ (np.uint64(data_C[at]) * P5), 11) * P1
        at += 1
    value = (value ^ (value >> np.uint64(33))) * P2
    value = (value ^ (value >> np.uint64(29))) * P3
    return value ^ (value >> np.uint64(32))


@jit
def ids_of_texts(data_C: Any, bound_N1: Any, integers_only: Any, ids_N: Any) -> Any:
    """Write the id of each text; an empty text is a missing id.

    Args:
        data_C: The bytes of all texts.
        bound_N1: Text n has bytes bound[n] .. bound[n + 1].
        integers_only: Whether only canonical decimals have ids.
        ids_N: The ids that are written.

    Returns:
        The index of the first text that has no id, or -1. A text has no id if it spells the number
        of missing ids, or if it spells no int64 where only integers are allowed.
    """
    for n in range(len(ids_N)):
        first = bound_N1[n]
        last = bound_N1[n + 1]
        if first == last:
            ids_N[n] = MISSING
            continue
        spelled, number = decimal(data_C, first, last)
        if spelled:
            ids_N[n] = number
            if number == MISSING:
                return n
        elif integers_only:
            return n
        else:
            number = np.int64(xxh64(data_C, first, last))
            ids_N[n] = number if number != MISSING else MISSING + 1
    return -1
