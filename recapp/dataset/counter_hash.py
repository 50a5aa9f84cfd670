"""Random numbers without a state: a hash of a stream and a counter, the same on every machine.

Any of them is computed alone, so rows are permuted and generated in any order, by any process.
"""

from collections.abc import Sequence
from functools import lru_cache, reduce

import numpy as np
import numpy.typing as npt

_U64 = np.uint64
_GOLDEN = _U64(0x9E3779B97F4A7C15)
_ALL = 2**64 - 1
Uint64Array = npt.NDArray[np.uint64]
Float64Array = npt.NDArray[np.float64]


def hashes(stream: tuple[int, ...], counters_N: npt.NDArray[np.int64]) -> Uint64Array:
    """Return 64 hashed bits for each counter, [N].

    Args:
        stream: Integers that name a stream; different tuples are independent streams.
        counters_N: The counters, [N].
    """
    hash_N: Uint64Array = hashes_of([stream], counters_N)[0]
    return hash_N


def hashes_of(streams: Sequence[tuple[int, ...]], counters_N: npt.NDArray[np.int64]) -> Uint64Array:
    """Return the hashes of several streams, [streams, N]. Arguments as for `hashes`."""
    states = [_mixed(_state(*stream[:-1]) + stream[-1]) for stream in streams]
    state_S = np.array(states, dtype=_U64)
    return _mix(state_S[:, None] + counters_N.astype(_U64) * _GOLDEN)


@lru_cache(4096)
def _state(*stream: int) -> int:
    """Return what names a stream or the begin of its name, which streams share."""
    return reduce(lambda state, part: _mixed(state + part), stream, 0)


def uniform(stream: tuple[int, ...], counters_N: npt.NDArray[np.int64]) -> Float64Array:
    """Return uniform numbers in [0, 1) of 53 bits, one per counter, [N]."""
    numbers: Float64Array = (hashes(stream, counters_N) >> _U64(11)).astype(np.float64) * 2.0**-53
    return numbers


def normal(stream: tuple[int, ...], counters_N: npt.NDArray[np.int64]) -> Float64Array:
    """Return nearly normal numbers of mean 0 and variance 1, one per counter, [N].

    Each is the sum of the four 16-bit parts of a hash (Irwin-Hall).
    """
    bits = hashes(stream, counters_N)
    total = sum(
        (bits >> _U64(shift) & _U64(0xFFFF)).astype(np.float64) for shift in (0, 16, 32, 48)
    )
    numbers: Float64Array = (total / 65536.0 - 2.0 + 2.0 / 65536.0) * 3.0**0.5
    return numbers


def _mixed(number: int) -> int:
    """Return what `_mix` returns for a number; a call of numpy costs as much as all of it."""
    number = number + 0x9E3779B97F4A7C15 & _ALL
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _ALL
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _ALL
    return number ^ number >> 31


def _mix(values: Uint64Array) -> Uint64Array:
    """Mix the bits of each value, so that each input bit reaches each output bit.

    This is SplitMix64's finaliser (Steele, Lea and Flood 2014).
    """
    values = values + _GOLDEN
    values = (values ^ (values >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> _U64(27))) * _U64(0x94D049BB133111EB)
    return values ^ (values >> _U64(31))
