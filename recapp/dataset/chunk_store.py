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

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recapp.dataset.collate import BatchColumns, Collate
from recapp.dataset.decode import Int64Array, compiled
from recapp.dataset.rows import IdArray, Rows
from recapp.sparse.transfer import ALIGNMENT, made_together

Array = npt.NDArray[Any]
# Labels begin at bytes where one memory would have each of them.
TARGETS_ALIGNED = ALIGNMENT // torch.float32.itemsize

FIRST_SLOTS = 16
# An array of each type of a batch's values.
_LIKE = {t: torch.zeros(0, dtype=t).numpy() for t in (torch.float32, torch.int32, torch.int64)}


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
        if None not in self._chunks:
            more = len(self._chunks) or FIRST_SLOTS
            self._chunks += [None] * more
            self._left_Z = np.pad(self._left_Z, (0, more))
            self._table_AZ3 = np.pad(self._table_AZ3, ((0, 0), (0, more), (0, 0)))
        slot = self._chunks.index(None)
        self.narrows &= all(
            x.dtype == np.int32 for x in (rows.ids_SN, *(bag.values_L for bag in rows.bags))
        )
        self._chunks[slot] = rows
        self._left_Z[slot] = len(rows)
        self._table_AZ3[:, slot] = [
            (array.ctypes.data, array.strides[0], array.itemsize) for array in _arrays_of(rows)
        ]
        return slot

    def take(self, place_VK: Int64Array, batches: int) -> deque[BatchColumns]:
        """Return the rows of some places, each of which is taken once, as batches.

        Args:
            place_VK: The places of the rows of each lane, those of one batch after the other.
            batches: The number of batches, which take as many rows of a lane each.
        """
        of_numbers, of_targets, of_ids, *more = self._table_AZ3
        of_row_numbers = [more.pop(0)] if self._collate.numbered else []
        of_bags = [more[n : n + self._per_bag] for n in range(0, len(more), self._per_bag)]
        place_MB = place_VK.reshape(len(place_VK), batches, -1).swapaxes(0, 1).reshape(batches, -1)
        made = deque(self._without_values(place_B, of_bags) for place_B in place_MB)
        dense_BI, ids_L, weight_L, _, per_MF, target_TB, row_number_B = zip(*made, strict=True)
        columns = dense_BI[0].shape[1]
        apart = target_TB[0].stride(0)
        begin_MF: Int64Array = np.cumsum([[0, *per_F[:-1]] for per_F in per_MF], axis=1)
        _gather(of_numbers, place_VK, dense_BI, np.arange(columns), columns)
        _gather(of_targets, place_VK, target_TB, np.arange(len(target_TB[0])) * apart)
        _gather(of_ids, place_VK, ids_L, np.take(begin_MF, self._singles, axis=1))
        for table_Z3 in of_row_numbers:
            _gather(table_Z3, place_VK, row_number_B, np.arange(1))
        for feature, (values_Z3, bounds_Z3, *weights_Z3) in zip(self._bags, of_bags, strict=True):
            parts = [(values_Z3, ids_L), *((table_Z3, weight_L) for table_Z3 in weights_Z3)]
            for (batch, place_B), (table_Z3, part_L) in product(enumerate(place_MB), parts):
                out_L = part_L[batch].numpy()[begin_MF[batch, feature] :]
                compiled().gather_bags(table_Z3, bounds_Z3, place_B, out_L)
        self.drop(place_VK.ravel())
        return made

    def _without_values(
        self, place_B: Int64Array, of_bags: Sequence[Sequence[Int64Array]]
    ) -> BatchColumns:
        """Return the columns of a batch, of which only lengths, and weights of 1, are written."""
        rows = len(place_B)
        per_F = [rows] * (len(self._bags) + len(self._singles))
        # one number, expanded: who reads lengths sees that they are equal
        length_FB = np.ones((len(per_F), rows) if of_bags else 1, np.int64)
        for feature, (_, bounds_Z3, *_) in zip(self._bags, of_bags, strict=True):
            per_F[feature] = compiled().lengths_of_bags(bounds_Z3, place_B, length_FB[feature])
        schema = self._collate.schema
        apart = -(-rows // TARGETS_ALIGNED) * TARGETS_ALIGNED if self._for_gpu else rows
        parts = [
            torch.from_numpy(np.empty((rows, len(schema.numbers)), np.float32)),
            torch.from_numpy(np.empty(sum(per_F), np.int32 if self.narrows else np.int64)),
            torch.from_numpy(length_FB.reshape(-1)),
            torch.from_numpy(np.empty((len(schema.targets), apart), np.float32)),
        ]
        if self._weighted:
            parts.insert(2, torch.ones(sum(per_F)))
        if self._collate.numbered:
            parts.append(torch.from_numpy(np.empty(rows, np.int64)))
        if self._for_gpu:
            written = parts[2 : 3 + self._weighted]
            parts = made_together(parts, pinned=torch.cuda.is_available())
            for part, values in zip(parts[2 : 3 + self._weighted], written, strict=True):
                part.copy_(values)
        weights = parts.pop(2) if self._weighted else None
        dense_BI, ids_L, lengths, target_TB, *row_numbers = parts
        row_number_B = row_numbers[0] if row_numbers else None
        return BatchColumns(
            dense_BI, ids_L, weights, lengths, per_F, target_TB[:, :rows], row_number_B
        )

    def drop(self, place_N: Int64Array) -> None:
        """Forget rows, which nobody takes any more."""
        if compiled().count_off(place_N, self._left_Z):
            for slot in np.flatnonzero(self._left_Z == 0).tolist():
                self._chunks[slot] = None


def _gather(
    table_Z3: Int64Array,
    place_VK: Int64Array,
    parts: Sequence[Tensor],
    begin_MC: Int64Array,
    step: int = 1,
) -> None:
    """Write a part of each of some batches; `begin_MC` has the value at which a column begins."""
    like = _LIKE[parts[0].dtype]
    address_M1 = np.array([[part.data_ptr()] for part in parts])
    address_MC = address_M1 + begin_MC * like.itemsize
    compiled().gather(table_Z3, place_VK, address_MC, step * like.itemsize, like)


def _arrays_of(rows: Rows) -> list[Array]:
    arrays: list[Array] = [rows.numbers_IN, rows.targets_TN, rows.ids_SN]
    arrays += [] if rows.row_numbers_N is None else [rows.row_numbers_N]
    for bag in rows.bags:
        arrays += [bag.values_L, bag.offsets_N1, *([] if bag.weight_L is None else [bag.weight_L])]
    assert all(array.flags.c_contiguous for array in arrays)
    return arrays
