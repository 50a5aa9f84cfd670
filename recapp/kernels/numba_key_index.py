"""The functions of `key_index.py`, compiled. The index of a store of dynamic tables uses open
addressing:

    position, strip --> segment of buckets --> bucket: tag (0: free), slot --> positions[slot]

The hash table consists of segments of 4,096 buckets, each a small hash table (linear probing). It
grows by linear hashing (Litwin 1980): one segment at a time is split into two, so no step waits
until a whole table is hashed again. A segment belongs to one run of positions, so the rows of a run
are found without reading those of other runs.

Buckets hold no positions. The position of a slot stands beside the store's rows, where reading it
costs a wait for memory. So a bucket has a tag, a byte of the key's hash: of 127 other keys on the
way, the search passes 126 without reading their positions. The search takes keys in blocks and
prefetches the memory for a whole block.

A bucket has 5 bytes. Splitting starts when .42 of the buckets are used. Segments that are not split
yet are the fullest: they have twice as many used buckets as the others, at most .84.

The search in sorted numbers interpolates.
"""

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recapp.kernels.constants import RUN_BITS
from recapp.kernels.numba_cache import compiled
from recapp.kernels.numba_key_table import (
    SEGMENT,
    KeyTable,
    find_slots,
    insert_keys,
    remove_slots,
    slots_in,
    split_segments,
)
from recapp.kernels.row_memory import RowMemory

jit = compiled()
MOST_USED = 0.42


class HashIndex:
    """An index of the slots of all rows that exist, with the arguments, attributes and methods of
    `SortedIndex`.
    """

    def __init__(self, runs: Sequence[int], capacity: int, device: torch.device) -> None:
        self.positions = RowMemory(capacity, 1, torch.int64, device)
        self.strips = RowMemory(capacity, 1, torch.int16, device)
        self._places = max(1, len(runs))
        self._secret = np.uint64(secrets.randbits(64) | 1)
        self._place_R = np.zeros(1 << RUN_BITS, np.int64)
        for place, run in enumerate(sorted(runs)):
            self._place_R[run] = place
        # a table whose keys crowd into few segments needs many times more segments
        most = 16 * (self._places + int(capacity / MOST_USED) // SEGMENT + 1)
        self._tags = RowMemory(most * SEGMENT, 1, torch.uint8, device)
        self._slots = RowMemory(most * SEGMENT, 1, torch.int32, device)
        self._segments = 0
        self._used_G = np.zeros(0, np.int32)
        self._split_slots = np.zeros(SEGMENT, np.int32)
        self._keys = 0
        self._add(self._places)

    def __len__(self) -> int:
        """Return the number of keys."""
        return self._keys

    @property
    def nbytes(self) -> int:
        """Return the bytes of the index, without `positions` and `strips`."""
        return self._tags.nbytes + self._slots.nbytes + self._used_G.nbytes

    def clear(self) -> None:
        """Forget all keys."""
        self._tags.rows[: self._segments * SEGMENT] = 0
        self._used_G[:] = 0
        self._keys = 0

    def _add(self, more: int) -> None:
        """Add segments."""
        self._tags.grow((self._segments + more) * SEGMENT)
        self._slots.grow((self._segments + more) * SEGMENT)
        if len(self._used_G) < self._segments + more:
            wider = np.zeros(max(2 * len(self._used_G), self._segments + more), np.int32)
            wider[: len(self._used_G)] = self._used_G
            self._used_G = wider
        split_segments(self._table(), more if self._segments else 0, self._split_slots)
        self._segments += more

    def _table(self) -> KeyTable:
        """Return the arrays in the form for kernels. Growth replaces them."""
        return KeyTable(
            self._tags.rows.view(-1).numpy(),
            self._slots.rows.view(-1).numpy(),
            self._used_G,
            self.positions.rows.view(-1).numpy(),
            self.strips.rows.view(-1).numpy(),
            self._place_R,
            self._places,
            self._segments,
            self._secret,
        )

    def find(self, position_N: Tensor, strip_N: Tensor) -> Tensor:
        """Return the slot of each key, int64; -1 for a key that is absent."""
        slot_N = torch.empty_like(position_N)
        find_slots(self._table(), position_N.numpy(), strip_N.numpy(), slot_N.numpy())
        return slot_N

    def insert(self, position_M: Tensor, strip_M: Tensor, fresh_M: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys that the index does not hold (see `SortedIndex.insert`)."""
        self.positions.grow(int(fresh_M.max()) + 1)
        self.strips.grow(int(fresh_M.max()) + 1)
        segments = int((self._keys + len(position_M)) / (MOST_USED * SEGMENT)) + 1
        if segments > self._segments:
            self._add(segments - self._segments)
        slot_M = torch.empty_like(position_M)
        first_U = np.empty(len(position_M), np.int64)
        done = 0
        used = 0
        while True:
            done, used = insert_keys(
                self._table(),
                done,
                position_M.numpy(),
                strip_M.numpy(),
                fresh_M.numpy(),
                used,
                slot_M.numpy(),
                first_U,
            )
            if done == len(position_M):
                break
            self._add(max(1, self._segments // 8))  # a segment got full before its turn
        self._keys += used
        return slot_M, torch.from_numpy(first_U[:used])

    def remove(self, slot_M: Tensor) -> None:
        """Remove the keys of distinct slots."""
        self._keys -= len(slot_M)
        remove_slots(self._table(), slot_M.numpy())

    def slots_of_run(self, run: int, strip: int) -> Tensor:
        """Return the slots of a strip whose positions lie in a run."""
        return self._slots_in(int(self._place_R[run]), self._places, strip)

    def slots_of(self, strip: int) -> Tensor:
        """Return the slots of a strip in the order of their positions."""
        slot_K = self._slots_in(0, 1, strip)
        return slot_K[self.positions.rows[slot_K, 0].argsort()]

    def _slots_in(self, first: int, step: int, strip: int) -> Tensor:
        slot_K = np.empty(self._keys, np.int64)
        n = slots_in(self._table(), first, step, strip, slot_K)
        return torch.from_numpy(slot_K[:n].copy())


@jit
def _find(number_R: Any, edge_I1: Any, wanted_N: Any, strip_N: Any, found_N: Any) -> None:
    """Write the index of each number; -1 for a number that is absent.

    Positions of keys are mixed bits, so they are spread evenly: the value of one among n tells its
    place up to about the square root of n. From there the search goes in steps that double until it
    passes the number, then bisects the last step. So it finds a key with a few reads that lie close
    together, where a binary search of a whole mapped file would read pages far apart.
    """
    for n in range(len(wanted_N)):
        strip = strip_N[n] if len(strip_N) else 0
        low = edge_I1[strip]
        high = edge_I1[strip + 1]
        number = wanted_N[n]
        found_N[n] = -1
        if low == high:
            continue
        share = (float(number) + 2.0**63) / 2.0**64
        at = min(low + np.int64(share * (high - low)), high - 1)
        step = np.int64(8)
        if number_R[at] < number:
            low = at + 1
            while low + step < high and number_R[low + step] < number:
                low += step + 1
                step *= 2
            high = min(low + step + 1, high)
        else:
            high = at
            while high - step > low and number_R[high - step] >= number:
                high -= step
                step *= 2
            low = max(high - step, low)
            high = min(high + 1, edge_I1[strip + 1])
        while low < high:
            middle = (low + high) // 2
            if number_R[middle] < number:
                low = middle + 1
            else:
                high = middle
        if low < edge_I1[strip + 1] and number_R[low] == number:
            found_N[n] = low


def find_sorted(
    number_R: Tensor, edge_I1: Sequence[int], wanted_N: Tensor, strip_N: Tensor | None
) -> Tensor:
    """Return the indices of numbers (see `key_index.find_sorted`)."""
    found_N = torch.empty_like(wanted_N)
    strips = np.zeros(0, np.int16) if strip_N is None else strip_N.numpy()
    edges = np.array(edge_I1, np.int64)
    _find(number_R.numpy(), edges, wanted_N.contiguous().numpy(), strips, found_N.numpy())
    return found_N
