"""Dynamic tables on a GPU: the positions of keys, and the start values of rows.

`recapp/tables/initial.py` defines the values, and `recapp/tables/positions.py` the key of a
position; the bits are the same.
"""

import triton
import triton.language as tl

from recapp.tables.positions import INVERSES, MULTIPLIERS, SHIFTS

_GOLDEN = tl.constexpr(0x9E3779B9)
_SHIFT0, _SHIFT1, _SHIFT2 = (tl.constexpr(shift) for shift in SHIFTS)
_MULTIPLIER0, _MULTIPLIER1 = (tl.constexpr(number % 2**64) for number in MULTIPLIERS)
_INVERSE0, _INVERSE1 = (tl.constexpr(inverse % 2**64) for inverse in INVERSES)


@triton.jit
def _mix(x):
    """Hash 32 bits."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _unshifted(x, BITS: tl.constexpr):
    """Return the number y with `y ^ (y >> BITS)` equal to `x`, of unsigned numbers."""
    y = x
    for _ in tl.static_range(64 // BITS):
        y = x ^ (y >> BITS)
    return y


@triton.jit
def position_of(key):
    """Return the positions of int64 keys."""
    x = key.to(tl.uint64, bitcast=True)
    x = (x ^ (x >> _SHIFT0)) * _MULTIPLIER0
    x = (x ^ (x >> _SHIFT1)) * _MULTIPLIER1
    return (x ^ (x >> _SHIFT2)).to(tl.int64, bitcast=True)


@triton.jit
def key_of(position):
    """Return the keys of positions, as unsigned numbers."""
    x = _unshifted(position.to(tl.uint64, bitcast=True), _SHIFT2)
    x = _unshifted(x * _INVERSE1, _SHIFT1)
    return _unshifted(x * _INVERSE0, _SHIFT0)


@triton.jit
def start_values_of(key_M, strip_M, column_D, hashes, columns, scales):
    """Return the start values of a tile of rows x columns."""
    hash_M = tl.load(hashes + strip_M).to(tl.uint32)
    row_M = _mix(key_M.to(tl.uint32) ^ _mix((key_M >> 32).to(tl.uint32) + hash_M))
    of_table_MD = tl.load(columns + strip_M)[:, None] + column_D[None, :]
    bits_MD = _mix(row_M[:, None] + of_table_MD.to(tl.uint32) * _GOLDEN)
    odd_MD = (bits_MD >> 8).to(tl.int32) * 2 + (1 - 2**24)
    return odd_MD.to(tl.float32) * tl.load(scales + strip_M)[:, None]
