"""Words of eight bytes of text, compiled: the numbers that their digits spell, and the XXH64 hash.

    "05db9164"    all bytes are checked at once, and joined in three steps:
                  05 db 91 64  ->  05db 9164  ->  05db9164

XXH64 with seed 0 is specified bit by bit ("xxHash fast digest algorithm", Yann Collet). So an id is
the same in every process, on every machine and in every version, and other programs can compute it.
`tests/dataset/test_text_ids.py` compares hashes with published values. Letter: C bytes.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from recapp.kernels.numba_cache import compiled
from recapp.kernels.simd import get

jit = compiled()
inline = compiled(forceinline=True)
P1 = np.uint64(0x9E3779B185EBCA87)
P2 = np.uint64(0xC2B2AE3D27D4EB4F)
P3 = np.uint64(0x165667B19E3779F9)
P4 = np.uint64(0x85EBCA77C2B2AE63)
P5 = np.uint64(0x27D4EB2F165667C5)
ZEROS = np.uint64(0x3030303030303030)  # eight digits
THREES = np.uint64(0x3333333333333333)
ONES = np.uint64(0x0101010101010101)  # in each byte
HIGH = np.uint64(0x80) * ONES
LOW_4 = np.uint64(0x0F) * ONES
HIGH_4 = np.uint64(0xF0) * ONES
SMALL = np.uint64(0x20) * ONES  # makes capital letters small
# In the highest bit of each byte below 128, whether it is at least a sign.
FROM_0, ABOVE_9, FROM_A, ABOVE_F = (np.uint64(128 - sign) * ONES for sign in b"0:ag")
BYTES_2, BYTES_4, BYTES_8 = map(np.uint64, (0x00FF00FF00FF00FF, 0x0000FFFF0000FFFF, 0xFFFFFFFF))


@intrinsic  # type: ignore[untyped-decorator]
def word_at(typing: Any, address: Any) -> Any:
    """Return the eight bytes at an address, the first one lowest."""

    def lower(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        return builder.load(place, align=1)

    return types.uint64(types.int64), lower


@inline
def of_hex(word: Any) -> Any:
    """Return whether eight bytes are hexadecimal digits, and their value."""
    small = word | SMALL
    good = (word + FROM_0) & ~(word + ABOVE_9) | (small + FROM_A) & ~(small + ABOVE_F)
    letters = word >> np.uint64(6) & ONES
    value = (word & LOW_4) + letters + (letters << np.uint64(3))
    value = (value << np.uint64(4) | value >> np.uint64(8)) & BYTES_2
    value = (value << np.uint64(8) | value >> np.uint64(16)) & BYTES_4
    value = (value << np.uint64(16) | value >> np.uint64(32)) & BYTES_8
    return (good & ~word & HIGH) == HIGH, value


@inline
def of_digits(word: Any) -> Any:
    """Return whether eight bytes are decimal digits (each is 3x, also when 6 is added), and their
    value.
    """
    above = (word + np.uint64(6) * ONES) & HIGH_4
    value = (word & LOW_4) * np.uint64(10 << 8 | 1) >> np.uint64(8)
    value = (value & BYTES_2) * np.uint64(100 << 16 | 1) >> np.uint64(16)
    value = (value & BYTES_4) * np.uint64(10_000 << 32 | 1) >> np.uint64(32)
    return (word & HIGH_4 | above >> np.uint64(4)) == THREES, value


@jit
def word(data_C: Any, at: Any, size: Any) -> Any:
    """Return the little-endian number in `size` bytes."""
    value = np.uint64(0)
    for i in range(size):
        value |= np.uint64(get(data_C, at + i)) << np.uint64(8 * i)
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
