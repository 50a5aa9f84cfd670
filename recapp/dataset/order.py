"""The order of an epoch: a function of the data, (seed, epoch) and the number of lanes, but not of
ranks or workers.

    row groups, in file order    0    1    2    3    4    5   ..
    lane 0 (of V)                0         3       ..             dealt to the lane with the fewest
    lane 1                            1              5            rows so far, each lane up to
    lane 2                                 2    4    ..           N/V rows
    one lane          [ block 0 ][ block 1 ][ .. ]                each block of shuffle_rows/V rows
                                                                  permuted by itself
    global batch k    B/V rows of lane 0, B/V rows of lane 1, ..

Row groups are dealt to lanes one by one; lanes are not V contiguous parts of the log. So a batch
draws from V positions that move through the log together. This trains better than batches drawn
from V days at once (.7580 AUC against .7571 on Criteo). The permutation of a block is a pure
function, so an epoch can start at any position without its history. This file computes only with
numbers of rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from recapp.errors import ConfigError

DEFAULT_SHUFFLE_ROWS = 4096
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Deal:
    """The rows of each lane, in reading order.

    Args:
        lanes: For each lane an int64 array [P, 3], with a row for each piece: (segment, first row
            within the segment, number of rows).
        cut: For each segment, whether it was cut into runs, so that its rows are interleaved over
            the lanes.
    """

    lanes: tuple[IntArray, ...]
    cut: npt.NDArray[np.bool_]

    def rows(self, lane: int) -> int:
        """Return the number of rows of lane number `lane`."""
        return int(self.lanes[lane][:, 2].sum())


def deal(segment_rows: Sequence[int], lanes: int, shuffle_rows: int) -> Deal:
    """Deal segments (row groups) to lanes whose sizes differ by at most one row.

    In order, each segment goes to the lane with the fewest rows so far (for equal numbers, the
    lowest lane); a full lane passes the rest of a segment on. A segment of more than N/V rows is
    first cut into runs of shuffle_rows/V rows (without shuffling, of the default 4,096/V rows).

    Args:
        segment_rows: The number of rows of each segment.
        lanes: The number of lanes, V.
        shuffle_rows: The rows within which the order is shuffled, over all lanes.
    """
    total = sum(segment_rows)
    run = max(1, (shuffle_rows or DEFAULT_SHUFFLE_ROWS) // lanes)
    room = [total // lanes + (lane < total % lanes) for lane in range(lanes)]
    fill = [(0, lane) for lane in range(lanes) if room[lane]]
    heapify(fill)
    pieces: list[list[tuple[int, int, int]]] = [[] for _ in range(lanes)]
    cut = np.array([rows * lanes > total for rows in segment_rows], dtype=np.bool_)
    for segment, rows in enumerate(segment_rows):
        step = run if cut[segment] else rows
        first = 0
        while first < rows:
            have, lane = heappop(fill)
            taken = min(step - first % step, rows - first, room[lane] - have)
            pieces[lane].append((segment, first, taken))
            first += taken
            if have + taken < room[lane]:
                heappush(fill, (have + taken, lane))
    return Deal(tuple(np.array(own, dtype=np.int64).reshape(-1, 3) for own in pieces), cut)


def after(pieces: IntArray, position: int) -> IntArray:
    """Return a lane's pieces [P, 3] after its first `position` rows."""
    ends = np.cumsum(pieces[:, 2])
    left = pieces[int(np.searchsorted(ends, position, side="right")) :].copy()
    if len(left):
        skipped = position - (int(ends[-1]) - int(left[:, 2].sum()))
        left[0, 1] += skipped
        left[0, 2] -= skipped
    return left


def permutation(seed: int, epoch: int, lane: int, block: int, rows: int) -> IntArray:
    """Return the order of the rows of one block, [rows]: a sort by a counter hash."""
    keys = hashes((seed, epoch, lane, block), np.arange(rows, dtype=np.int64))
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def check_order(batch_size: int, lanes: int, ranks: int) -> None:
    """Check that the numbers that define the order fit together.

    Raises:
        ConfigError: The numbers do not fit; the text names the setting and a fix.
    """
    if lanes < 1 or lanes < ranks:
        raise ConfigError(
            f"dataset.lanes={lanes}: each of the {ranks} ranks needs a lane; set "
            f"dataset.lanes={max(1, ranks)} or more"
        )
    if batch_size < 1 or batch_size % lanes:
        near = max(1, round(batch_size / lanes)) * lanes
        raise ConfigError(
            f"dataset.batch_size={batch_size}: the global batch takes an equal share of "
            f"dataset.lanes={lanes}, so a multiple of that is allowed; set {near}"
        )


def rank_lanes(rank: int, world: int, lanes: int) -> range:
    """Return the lanes that one of `world` ranks reads: [floor(rV/W), floor((r+1)V/W))."""
    return range(rank * lanes // world, (rank + 1) * lanes // world)


def batches(rows: int, batch_size: int, training: bool) -> int:
    """Return the number of global batches of an epoch.

    Training skips the short last batch; evaluation covers every row.
    """
    return rows // batch_size if training else -(-rows // batch_size)


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
    state = 0
    for part in stream:
        state = _mixed(state + part)
    return _mix(_U64(state) + counters_N.astype(_U64) * _GOLDEN)


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
