"""Decoded chunks in memory, from which the rows of batches are gathered.

    slot 0     numbers, targets, ids, bags and their weights of a chunk, column after column
    slot 1     those of another chunk
    a place    the slot of a row's chunk, and the number of the row in it, in one integer

Lanes hand on places, not values: a row costs a few bytes while it is dealt, permuted and cut.
Values move once, from the chunks into the arrays of a batch. A chunk is dropped when the last of
its rows is in a batch. The ids of a chunk have 32 bits if all of them fit, so that a batch reads
half of the bytes.

Letters: A arrays of a chunk, Z slots, C columns, F features, T targets, B rows of a batch.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from recapp.dataset.collate import BatchColumns, Collate
from recapp.dataset.decode import Int64Array, compiled
from recapp.dataset.rows import IdArray, Rows
from recapp.sparse.transfer import ALIGNMENT, made_together

Array = npt.NDArray[Any]
# Labels begin at bytes where one memory would have each of them.
TARGETS_ALIGNED = ALIGNMENT // torch.float32.itemsize


def places(slot: int, at_N: Int64Array) -> Int64Array:
    """Return the places of rows of a slot, by their numbers in it."""
    place_N: Int64Array = at_N + (slot << compiled().SLOT_BITS)
    return place_N


def with_short_ids(rows: Rows) -> Rows:
    """Return a chunk whose ids have 32 bits if all fit."""
    bags = tuple(replace(bag, values_L=_shortened(bag.values_L)) for bag in rows.bags)
    return replace(rows, ids_SN=_shortened(rows.ids_SN), bags=bags)


def _shortened(ids: IdArray) -> IdArray:
    if ids.dtype == np.int32:
        return ids
    short = np.empty(ids.shape, np.int32)
    return short if compiled().shorten(ids.reshape(-1), short.reshape(-1)) else ids


class ChunkStore:
    """The decoded chunks of a reader.

    Args:
        collate: Tells the columns of chunks and of batches.
        for_gpu: Whether a batch lies in one memory, as `Batch.packed` would lay it, page-locked
            where there is a GPU.
        narrows: Whether the ids of batches have 32 bits as long as those of all chunks do. Their
            type changes at most once, because a step that is recorded for one type does not take
            the other.
    """

    def __init__(self, collate: Collate, for_gpu: bool, narrows: bool) -> None:
        self.narrows = narrows
        self._for_gpu = for_gpu
        self._collate = collate
        is_bag_F = [name in collate.bags for name in collate.schema.features]
        self._bags = np.flatnonzero(is_bag_F)
        self._singles = np.flatnonzero(np.logical_not(is_bag_F))
        self._weighted = bool(collate.schema.id_weights)
        self._chunks: list[Rows | None] = []
        self._left_Z = np.zeros(0, np.int64)  # rows that are in no batch yet
        # of each array of a chunk: its address, the bytes of a column, and those of a value
        self._per_bag = 2 + self._weighted
        arrays = 3 + collate.numbered + self._per_bag * len(self._bags)
        self._table_AZ3 = np.zeros((arrays, 0, 3), np.int64)

    def add(self, rows: Rows) -> int:
        """Keep a chunk, each of whose rows will be taken or dropped; return its slot."""
        slot = self._chunks.index(None) if None in self._chunks else len(self._chunks)
        if slot == len(self._chunks):
            self._chunks.append(None)
            self._left_Z = np.append(self._left_Z, 0)
            self._table_AZ3 = np.pad(self._table_AZ3, ((0, 0), (0, 1), (0, 0)))
        self.narrows &= all(
            x.dtype == np.int32 for x in (rows.ids_SN, *(bag.values_L for bag in rows.bags))
        )
        self._chunks[slot] = rows
        self._left_Z[slot] = len(rows)
        self._table_AZ3[:, slot] = [
            (array.ctypes.data, array.strides[0], array.itemsize) for array in _arrays_of(rows)
        ]
        return slot

    def take(self, place_B: Int64Array) -> BatchColumns:
        """Return the rows of some places, each of which is taken once."""
        of_numbers, of_targets, of_ids, *more = self._table_AZ3
        of_row_numbers = [more.pop(0)] if self._collate.numbered else []
        rows = len(place_B)
        per_F = [rows] * (len(self._bags) + len(self._singles))
        begin_F: Int64Array = np.arange(len(per_F)) * rows
        length_FB = np.ones((len(per_F), rows) if more else 1, np.int64)
        of_bags = [more[n : n + self._per_bag] for n in range(0, len(more), self._per_bag)]
        if more:
            for feature, (_, bounds_Z3, *_) in zip(self._bags, of_bags, strict=True):
                length_B = length_FB[feature]
                per_F[feature] = compiled().lengths_of_bags(bounds_Z3, place_B, length_B)
            begin_F = np.cumsum([0, *per_F[:-1]])
        columns = len(self._collate.schema.numbers)
        targets = len(self._collate.schema.targets)
        apart = -(-rows // TARGETS_ALIGNED) * TARGETS_ALIGNED if self._for_gpu else rows
        arrays: list[Array] = [
            np.empty((rows, columns), np.float32),
            np.empty(sum(per_F), np.int32 if self.narrows else np.int64),
            length_FB.reshape(-1),
            np.empty((targets, apart), np.float32),
            *[np.empty(rows, np.int64) for _ in of_row_numbers],
        ]
        if self._weighted:
            arrays.insert(2, np.ones(sum(per_F), np.float32))
        parts = [torch.from_numpy(array) for array in arrays]
        if self._for_gpu:
            parts = made_together(parts, pinned=torch.cuda.is_available())
            for made in range(2, 3 + self._weighted):
                parts[made].copy_(torch.from_numpy(arrays[made]))
            arrays = [part.numpy() for part in parts]
        weights = parts.pop(2) if self._weighted else None
        weight_L = arrays.pop(2) if self._weighted else arrays[2]
        dense_BI, id_L, _, target_TB, *row_number_B = arrays
        gather = compiled().gather
        gather(of_numbers, place_B, np.arange(columns), columns, dense_BI.reshape(-1))
        gather(of_targets, place_B, np.arange(targets) * apart, 1, target_TB.reshape(-1))
        gather(of_ids, place_B, begin_F[self._singles], 1, id_L)
        for table_Z3, numbers_B in zip(of_row_numbers, row_number_B, strict=True):
            gather(table_Z3, place_B, np.arange(1), 1, numbers_B)
        for feature, (values_Z3, bounds_Z3, *weights_Z3) in zip(self._bags, of_bags, strict=True):
            compiled().gather_bags(values_Z3, bounds_Z3, place_B, id_L[begin_F[feature] :])
            for table_Z3 in weights_Z3:
                compiled().gather_bags(table_Z3, bounds_Z3, place_B, weight_L[begin_F[feature] :])
        self.drop(place_B)
        dense, ids, lengths, target, *row_numbers = parts
        return BatchColumns(
            dense, ids, weights, lengths, per_F, target[:, :rows], next(iter(row_numbers), None)
        )

    def drop(self, place_N: Int64Array) -> None:
        """Forget rows, which nobody takes any more."""
        if compiled().count_off(place_N, self._left_Z):
            for slot in np.flatnonzero(self._left_Z == 0).tolist():
                self._chunks[slot] = None


def _arrays_of(rows: Rows) -> list[Array]:
    arrays: list[Array] = [rows.numbers_IN, rows.targets_TN, rows.ids_SN]
    arrays += [] if rows.row_numbers_N is None else [rows.row_numbers_N]
    for bag in rows.bags:
        arrays += [bag.values_L, bag.offsets_N1, *([] if bag.weight_L is None else [bag.weight_L])]
    assert all(array.flags.c_contiguous for array in arrays)
    return arrays
