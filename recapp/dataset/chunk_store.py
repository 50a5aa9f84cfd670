"""Decoded chunks in memory, from which the rows of batches are gathered.

    slot 0     numbers, targets, ids and bags of a chunk, column after column
    slot 1     those of another chunk
    a place    the slot of a row's chunk, and the number of the row in it

Lanes hand on places, not values: a row costs a few bytes while it is dealt, permuted and cut.
Values move once, from the chunks into the arrays of a batch. A chunk is dropped when the last of
its rows is in a batch.

Letters: A arrays of a chunk, Z slots, C columns, B rows of a batch.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from recapp.dataset.decode import Int64Array
from recapp.dataset.rows import FeatureBags, Rows
from recapp.kernels.numba_gather import SLOT_BITS, gather, gather_bags, lengths_of_bags


def places(slot: int, rows: range) -> Int64Array:
    """Return the places of consecutive rows of a slot."""
    return np.arange(rows.start, rows.stop, dtype=np.int64) + (slot << SLOT_BITS)


class RowStore:
    """The decoded chunks of a reader."""

    def __init__(self) -> None:
        self._chunks: list[Rows | None] = []
        self._left_Z = np.zeros(0, np.int64)  # rows that are in no batch yet
        # of each array of a chunk: its address, and the bytes of a column
        self._table_AZ2: npt.NDArray[np.int64] | None = None

    def add(self, rows: Rows) -> int:
        """Keep a chunk, all of whose rows will be taken; return its slot."""
        slot = self._chunks.index(None) if None in self._chunks else len(self._chunks)
        arrays = _arrays_of(rows)
        if slot == len(self._chunks):
            self._chunks.append(None)
            self._left_Z = np.append(self._left_Z, 0)
            empty = np.zeros((len(arrays), 1, 2), np.int64)
            before = [] if self._table_AZ2 is None else [self._table_AZ2]
            self._table_AZ2 = np.concatenate([*before, empty], axis=1)
        self._chunks[slot] = rows
        self._left_Z[slot] = len(rows)
        self._table_AZ2[:, slot] = [(array.ctypes.data, array.strides[0]) for array in arrays]
        return slot

    def take(self, place_B: Int64Array) -> Rows:
        """Return the rows of some places, at least one, each of which is taken once. Their numbers
        are row after row in memory, as batches have them.
        """
        some = self._chunks[int(place_B[0]) >> SLOT_BITS]
        assert some is not None
        of_numbers, of_targets, of_ids, *more = self._table_AZ2
        count = len(place_B)
        numbers_BI = np.empty((count, len(some.numbers_IN)), np.float32)
        targets_TB = np.empty((len(some.targets_TN), count), np.float32)
        ids_SB = np.empty((len(some.ids_SN), count), np.int64)
        width = numbers_BI.shape[1]
        gather(of_numbers, place_B, width, 1, width, numbers_BI.reshape(-1))
        gather(of_targets, place_B, len(targets_TB), count, 1, targets_TB.reshape(-1))
        gather(of_ids, place_B, len(ids_SB), count, 1, ids_SB.reshape(-1))
        row_numbers_B = None
        if some.row_numbers_N is not None:
            row_numbers_B = np.empty(count, np.int64)
            gather(more.pop(0), place_B, 1, count, 1, row_numbers_B)
        bags = []
        for values_Z2, bounds_Z2 in zip(more[::2], more[1::2], strict=True):
            length_B = np.empty(count, np.int64)
            lengths_of_bags(bounds_Z2, place_B, length_B)
            bag = FeatureBags.of(np.empty(length_B.sum(), np.int64), length_B)
            gather_bags(values_Z2, bounds_Z2, place_B, bag.values_L)
            bags.append(bag)
        self.drop(place_B)
        return Rows(numbers_BI.T, targets_TB, ids_SB, tuple(bags), row_numbers_B)

    def drop(self, place_N: Int64Array) -> None:
        """Forget rows, which nobody takes any more."""
        taken_Z = np.bincount(place_N >> SLOT_BITS, minlength=len(self._left_Z))
        self._left_Z -= taken_Z
        for slot in np.flatnonzero((taken_Z > 0) & (self._left_Z == 0)).tolist():
            self._chunks[slot] = None


def _arrays_of(rows: Rows) -> list[npt.NDArray[Any]]:
    numbers = [] if rows.row_numbers_N is None else [rows.row_numbers_N]
    bags = [array for bag in rows.bags for array in (bag.values_L, bag.offsets_N1)]
    arrays = [rows.numbers_IN, rows.targets_TN, rows.ids_SN, *numbers, *bags]
    assert all(array.flags.c_contiguous for array in arrays)
    return arrays
