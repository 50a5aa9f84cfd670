"""Decoded chunks in memory, from which the rows of batches are gathered.

    slot 0     numbers, targets, ids and bags of a chunk, column after column
    slot 1     those of another chunk
    a place    the slot of a row's chunk, and the number of the row in it, in one integer

Lanes hand on places, not values: a row costs a few bytes while it is dealt, permuted and cut.
Values move once, from the chunks into the arrays of a batch. A chunk is dropped when the last of
its rows is in a batch.

Letters: A arrays of a chunk, Z slots, C columns, B rows of a batch.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from recapp.dataset.decode import Int64Array, compiled
from recapp.dataset.rows import FeatureBags, Rows

Array = npt.NDArray[Any]


def places(slot: int, rows: range) -> Int64Array:
    """Return the places of consecutive rows of a slot."""
    place_N: Int64Array = np.arange(rows.start, rows.stop) + (slot << compiled().SLOT_BITS)
    return place_N


class ChunkStore:
    """The decoded chunks of a reader, all with the same columns."""

    def __init__(self) -> None:
        self._chunks: list[Rows | None] = []
        self._left_Z = np.zeros(0, np.int64)  # rows that are in no batch yet
        # of each array of a chunk: its address, and the bytes of a column
        self._table_AZ2: Int64Array | None = None

    def add(self, rows: Rows) -> int:
        """Keep a chunk, each of whose rows will be taken or dropped; return its slot."""
        arrays = _arrays_of(rows)
        slot = self._chunks.index(None) if None in self._chunks else len(self._chunks)
        if slot == len(self._chunks):
            self._chunks.append(None)
            self._left_Z = np.append(self._left_Z, 0)
            more = np.zeros((len(arrays), 1, 2), np.int64)
            before = [] if self._table_AZ2 is None else [self._table_AZ2]
            self._table_AZ2 = np.concatenate([*before, more], axis=1)
        assert self._table_AZ2 is not None
        self._chunks[slot] = rows
        self._left_Z[slot] = len(rows)
        self._table_AZ2[:, slot] = [(array.ctypes.data, array.strides[0]) for array in arrays]
        return slot

    def take(self, place_B: Int64Array) -> Rows:
        """Return the rows of some places, at least one, each of which is taken once. Their numbers
        stand row after row in memory, as batches have them.
        """
        some = self._chunks[int(place_B[0]) >> compiled().SLOT_BITS]
        assert some is not None
        assert self._table_AZ2 is not None
        of_numbers, of_targets, of_ids, *more = self._table_AZ2
        numbers_IB = _columns(of_numbers, place_B, some.numbers_IN, by_row=True)
        targets_TB = _columns(of_targets, place_B, some.targets_TN)
        ids_SB = _columns(of_ids, place_B, some.ids_SN)
        row_numbers_B = None
        if some.row_numbers_N is not None:
            row_numbers_B = _columns(more.pop(0), place_B, some.row_numbers_N[None])[0]
        bags = tuple(
            _bags(values_Z2, bounds_Z2, place_B)
            for values_Z2, bounds_Z2 in zip(more[::2], more[1::2], strict=True)
        )
        self.drop(place_B)
        return Rows(numbers_IB, targets_TB, ids_SB, bags, row_numbers_B)

    def drop(self, place_N: Int64Array) -> None:
        """Forget rows, which nobody takes any more."""
        taken_Z = np.bincount(place_N >> compiled().SLOT_BITS, minlength=len(self._left_Z))
        self._left_Z -= taken_Z
        for slot in np.flatnonzero((taken_Z > 0) & (self._left_Z == 0)).tolist():
            self._chunks[slot] = None


def _arrays_of(rows: Rows) -> list[Array]:
    arrays: list[Array] = [rows.numbers_IN, rows.targets_TN, rows.ids_SN]
    arrays += [] if rows.row_numbers_N is None else [rows.row_numbers_N]
    arrays += [array for bag in rows.bags for array in (bag.values_L, bag.offsets_N1)]
    assert all(array.flags.c_contiguous for array in arrays)
    return arrays


def _columns(table_Z2: Array, place_B: Array, like_CN: Array, by_row: bool = False) -> Array:
    """Return the values of columns, [C, B]; in memory, row after row if that is asked for."""
    columns = len(like_CN)
    count = len(place_B)
    out_BC = np.empty((count, columns), like_CN.dtype)
    steps = (1, columns) if by_row else (count, 1)
    compiled().gather(table_Z2, place_B, columns, *steps, out_BC.reshape(-1))
    return out_BC.T if by_row else out_BC.reshape(columns, count)


def _bags(values_Z2: Array, bounds_Z2: Array, place_B: Array) -> FeatureBags:
    length_B = np.empty(len(place_B), np.int64)
    compiled().lengths_of_bags(bounds_Z2, place_B, length_B)
    bag = FeatureBags.of(np.empty(length_B.sum(), np.int64), length_B)
    compiled().gather_bags(values_Z2, bounds_Z2, place_B, bag.values_L)
    return bag
