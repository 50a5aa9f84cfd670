"""The functions of `SortedIndex` (`reference.py`), compiled. The index of a store of dynamic tables
uses open addressing:

    position, strip --> segment of buckets --> bucket: tag (0: free), slot --> positions[slot]

The hash table consists of segments of 4,096 buckets, each a small hash table (linear probing). It
grows by linear hashing (Litwin 1980): one segment at a time is split into two, so no step waits
until a whole table is hashed again. A segment belongs to one stretch of positions, so the rows of a
stretch are found without reading those of other stretches.

Buckets hold no positions. The position of a slot stands beside the store's rows, where reading it
costs a wait for memory. So a bucket has a tag, a byte of the key's hash: of 127 other keys on the
way, the search passes 126 without reading their positions. The search takes keys in blocks and
prefetches the memory for a whole block.

A bucket has 5 bytes. Splitting starts when .42 of the buckets are used. Segments that are not split
yet are the fullest: they have twice as many used buckets as the others, at most .84.

The search in sorted numbers interpolates.

A round of splits ends when all segments of its beginning are split, in their order.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from recapp.kernels.links import STRETCH_BITS, Counts
from recapp.kernels.numba_cache import compiled
from recapp.kernels.reference import SortedIndex
from recapp.kernels.row_memory import RowMemory
from recapp.kernels.simd import prefetch
from recapp.sparse.transfer import true_indices

jit = compiled()
SEGMENT_BITS = 12
SEGMENT = 1 << SEGMENT_BITS
FULL = SEGMENT - SEGMENT // 16  # a segment with this many used buckets makes the table grow
BLOCK = 64  # keys whose buckets, and then positions, are fetched together
STRIPS = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: spreads the strips of one position
STRETCH_SHIFT = np.int64(64 - STRETCH_BITS)
HALF = np.int64(1 << STRETCH_BITS - 1)


class KeyTable(NamedTuple):
    """The arrays of an index, and its number of segments.

    Args:
        tag_B: The tag of each bucket, 0 for a free one; segment g begins at bucket g * SEGMENT.
        slot_B: The slot of each bucket.
        used_G: The number of used buckets of each segment.
        position_S: The position of each slot.
        strip_S: The strip of each slot.
        place_R: The number of each stretch among the stretches that the store holds.
        places: The number of stretches that the store holds.
        segments: The number of segments.
        secret: An odd number of 64 bits, different in each process.
    """

    tag_B: Any
    slot_B: Any
    used_G: Any
    position_S: Any
    strip_S: Any
    place_R: Any
    places: int
    segments: int
    secret: Any


@jit
def hash_of(position: Any, strip: Any, secret: Any) -> Any:
    """Return the hash of a key within its stretch. Without the secret, an attacker cannot choose
    ids that crowd in one place.
    """
    h = (np.uint64(position) << np.uint64(STRETCH_BITS)) ^ (np.uint64(strip) * STRIPS)
    h *= secret
    return h ^ (h >> np.uint64(32))


@jit
def whole_segments(places: Any, segments: Any) -> Any:
    """Return the number of segments of a stretch before the current round of splits: a power of 2.

    Args:
        places: The number of stretches.
        segments: The number of segments.
    """
    whole = 1
    while whole * 2 * places <= segments:
        whole *= 2
    return whole


@jit
def segment_of(h: Any, place: Any, places: Any, segments: Any, whole: Any) -> Any:
    """Return the segment of a hash.

    Args:
        h: The hash, from `hash_of`.
        place: The number of the key's stretch among the stretches that the store holds.
        places: The number of stretches that the store holds.
        segments: The number of segments.
        whole: The result of `whole_segments`.
    """
    at = np.int64(h >> np.uint64(STRETCH_BITS)) & (2 * whole - 1)
    segment = at * places + place
    return segment if segment < segments else segment - whole * places


@jit
def tag_of(h: Any) -> Any:
    """Return the tag of a hash, never 0. Its bits are not those of segment and bucket."""
    return np.uint8((h >> np.uint64(40)) & np.uint64(0xFF)) | np.uint8(1)


@jit
def home_of(h: Any) -> Any:
    """Return the home bucket of a hash within its segment."""
    return np.int64(h >> np.uint64(64 - SEGMENT_BITS))


@jit
def bucket_of(table: Any, position: Any, strip: Any, h: Any, segment: Any) -> Any:
    """Return the bucket of a key, or the free bucket for it, or -1 in a full segment."""
    first = segment * SEGMENT
    at = home_of(h)
    tag = tag_of(h)
    for _ in range(SEGMENT):
        here = table.tag_B[first + at]
        if here == 0:
            return first + at
        if here == tag:
            slot = np.int64(table.slot_B[first + at])
            if table.position_S[slot] == position and table.strip_S[slot] == strip:
                return first + at
        at = (at + 1) & (SEGMENT - 1)
    return np.int64(-1)


@jit
def fetch_buckets(
    table: Any, first: Any, last: Any, position_N: Any, strip_N: Any, whole: Any, segment_K: Any
) -> None:
    """Fetch the buckets of a block of keys, and write the segment of each."""
    for n in range(first, last):
        h = hash_of(position_N[n], strip_N[n], table.secret)
        place = table.place_R[(position_N[n] >> STRETCH_SHIFT) + HALF]
        segment = segment_of(h, place, table.places, table.segments, whole)
        segment_K[n - first] = segment
        bucket = segment * SEGMENT + home_of(h)
        prefetch(table.tag_B, bucket, 1)
        prefetch(table.slot_B, bucket, 1)


@jit
def walk_keys(
    table: Any,
    begin: Any,
    position_N: Any,
    strip_N: Any,
    slot_N: Any,
    fresh_M: Any,
    used: Any,
    first_U: Any,
) -> Any:
    """Write the slot of each key from entry `begin` on: -1 for a key that is absent, or add it,
    where fresh slots are given. Return the entry at which a segment was full, and the number of
    used fresh slots.
    """
    whole = whole_segments(table.places, table.segments)
    segment_K = np.empty(BLOCK, np.int64)
    N = len(position_N)
    for first in range(begin, N, BLOCK):
        last = min(first + BLOCK, N)
        fetch_buckets(table, first, last, position_N, strip_N, whole, segment_K)
        if fresh_M is None:
            fetch_positions(table, first, last, position_N, strip_N, segment_K)
        for n in range(first, last):
            position = position_N[n]
            strip = strip_N[n]
            h = hash_of(position, strip, table.secret)
            segment = segment_K[n - first]
            bucket = bucket_of(table, position, strip, h, segment)
            if bucket >= 0 and table.tag_B[bucket] != 0:
                slot_N[n] = np.int64(table.slot_B[bucket])
                continue
            slot_N[n] = -1
            if fresh_M is not None:
                if table.used_G[segment] >= FULL:
                    return n, used
                slot = fresh_M[used]
                table.tag_B[bucket] = tag_of(h)
                table.slot_B[bucket] = slot
                table.used_G[segment] += 1
                table.position_S[slot] = position
                table.strip_S[slot] = strip
                slot_N[n] = slot
                first_U[used] = n
                used += 1
    return N, used


@jit
def fetch_positions(
    table: Any, first: Any, last: Any, position_N: Any, strip_N: Any, segment_K: Any
) -> None:
    """Fetch the positions of a block of keys: the first bucket with the tag is almost always the
    key's.
    """
    for n in range(first, last):
        h = hash_of(position_N[n], strip_N[n], table.secret)
        tag = tag_of(h)
        begin = segment_K[n - first] * SEGMENT
        at = home_of(h)
        for _ in range(SEGMENT):
            here = table.tag_B[begin + at]
            if here == tag:
                slot = np.int64(table.slot_B[begin + at])
                prefetch(table.position_S, slot, 1)
                prefetch(table.strip_S, slot, 1)
            if here == tag or here == 0:
                break
            at = (at + 1) & (SEGMENT - 1)


@jit
def split_segments(table: Any, more: Any, slots: Any) -> None:
    """Add segments: each new one comes from splitting the next segment in turn. `slots` has room
    for one segment.
    """
    for new in range(table.segments, table.segments + more):
        whole = whole_segments(table.places, new)
        old = new - whole * table.places
        n = 0
        for bucket in range(old * SEGMENT, (old + 1) * SEGMENT):
            if table.tag_B[bucket] != 0:
                slot = np.int64(table.slot_B[bucket])
                prefetch(table.position_S, slot, 1)
                prefetch(table.strip_S, slot, 1)
                slots[n] = slot
                n += 1
                table.tag_B[bucket] = 0
        table.used_G[old] = 0
        table.used_G[new] = 0
        for k in range(n):
            slot = np.int64(slots[k])
            h = hash_of(table.position_S[slot], table.strip_S[slot], table.secret)
            segment = segment_of(h, old % table.places, table.places, new + 1, whole)
            at = home_of(h)
            while table.tag_B[segment * SEGMENT + at] != 0:
                at = (at + 1) & (SEGMENT - 1)
            table.tag_B[segment * SEGMENT + at] = tag_of(h)
            table.slot_B[segment * SEGMENT + at] = slot
            table.used_G[segment] += 1


@jit
def remove_slots(table: Any, slot_M: Any) -> None:
    """Remove the keys of slots; later entries move up, so that no bucket is lost."""
    whole = whole_segments(table.places, table.segments)
    for m in range(len(slot_M)):
        slot = slot_M[m]
        position = table.position_S[slot]
        strip = table.strip_S[slot]
        h = hash_of(position, strip, table.secret)
        place = table.place_R[(position >> STRETCH_SHIFT) + HALF]
        segment = segment_of(h, place, table.places, table.segments, whole)
        first = segment * SEGMENT
        bucket = bucket_of(table, position, strip, h, segment)
        if bucket < 0 or table.tag_B[bucket] == 0:
            continue
        table.used_G[segment] -= 1
        hole = bucket - first
        at = hole
        for _ in range(SEGMENT):
            at = (at + 1) & (SEGMENT - 1)
            if table.tag_B[first + at] == 0:
                break
            other = np.int64(table.slot_B[first + at])
            home = home_of(hash_of(table.position_S[other], table.strip_S[other], table.secret))
            if ((at - home) & (SEGMENT - 1)) >= ((at - hole) & (SEGMENT - 1)):
                table.tag_B[first + hole] = table.tag_B[first + at]
                table.slot_B[first + hole] = table.slot_B[first + at]
                hole = at
        table.tag_B[first + hole] = 0


MOST_USED = 0.42


class HashIndex(SortedIndex):
    """An index of the slots of all rows that exist, whose keys are not sorted."""

    def __init__(self, stretches: Sequence[int], capacity: int, device: torch.device) -> None:
        super().__init__(stretches, capacity, device)
        self._places = max(1, len(stretches))
        self._secret = np.uint64(secrets.randbits(64) | 1)
        self._place_R = np.zeros(1 << STRETCH_BITS, np.int64)
        for place, stretch in enumerate(sorted(stretches)):
            self._place_R[stretch] = place
        # a table whose keys crowd into few segments needs many times more segments
        most = 16 * (self._places + int(capacity / MOST_USED) // SEGMENT + 1)
        self._tags = RowMemory(most * SEGMENT, 1, torch.uint8, device)
        self._slots = RowMemory(most * SEGMENT, 1, torch.int32, device)
        self._segments = 0
        self._used = RowMemory(most, 1, torch.int32, device)
        self._split_slots = np.zeros(SEGMENT, np.int32)
        self._keys = 0
        self._add_segments(self._places)

    @override
    def __len__(self) -> int:
        return self._keys

    @property
    @override
    def nbytes(self) -> int:
        return self._tags.nbytes + self._slots.nbytes + self._used.nbytes

    def _add_segments(self, more: int) -> None:
        self._tags.grow((self._segments + more) * SEGMENT)
        self._slots.grow((self._segments + more) * SEGMENT)
        self._used.grow(self._segments + more)
        split_segments(self._table(), more if self._segments else 0, self._split_slots)
        self._segments += more

    def _table(self) -> KeyTable:
        """Return the arrays in the form for kernels. Growth replaces them."""
        return KeyTable(
            self._tags.rows.view(-1).numpy(),
            self._slots.rows.view(-1).numpy(),
            self._used.rows.view(-1).numpy(),
            self.positions.rows.view(-1).numpy(),
            self.strips.rows.view(-1).numpy(),
            self._place_R,
            self._places,
            self._segments,
            self._secret,
        )

    @override
    def find(self, position_N: Tensor, strip_N: Tensor) -> Tensor:
        slot_N = torch.empty_like(position_N)
        keys = position_N.numpy(), strip_N.numpy(), slot_N.numpy()
        walk_keys(self._table(), 0, *keys, None, 0, None)
        return slot_N

    @override
    def find_or_insert(
        self, position_N: Tensor, strip_N: Tensor, free: Callable[[int], Tensor]
    ) -> tuple[Tensor, Tensor]:
        slot_N = self.find(position_N, strip_N)
        absent_M = true_indices(slot_N < 0)
        if not len(absent_M):
            return slot_N, absent_M
        keys = position_N[absent_M], strip_N[absent_M], free(len(absent_M))
        position_M, strip_M, fresh_M = (x.numpy() for x in keys)
        segments = int((self._keys + len(absent_M)) / (MOST_USED * SEGMENT)) + 1
        if segments > self._segments:
            self._add_segments(segments - self._segments)
        slot_M, first_U = np.empty((2, len(absent_M)), np.int64)
        done = 0
        used = 0
        while True:
            done, used = walk_keys(
                self._table(), done, position_M, strip_M, slot_M, fresh_M, used, first_U
            )
            if done == len(absent_M):
                break
            self._add_segments(max(1, self._segments // 8))  # a segment got full before its turn
        self._keys += used
        slot_N[absent_M] = torch.from_numpy(slot_M)
        return slot_N, absent_M[torch.from_numpy(first_U[:used])]

    @override
    def remove(self, slot_M: Tensor) -> None:
        self._keys -= len(slot_M)
        remove_slots(self._table(), slot_M.numpy())

    @override
    def slots_of_stretches(self, wanted_IR: Tensor) -> Tensor:
        strip_S = self.strips.rows.view(-1).numpy()
        slots = [np.zeros(0, np.int64)]
        for stretch in true_indices(wanted_IR.any(0)).tolist():
            slot_K = self._slots_in(int(self._place_R[stretch]), self._places)
            slots.append(slot_K[wanted_IR[:, stretch].numpy()[strip_S[slot_K]]])
        return torch.from_numpy(np.concatenate(slots))

    @override
    def _all_slots(self) -> Tensor:
        return torch.from_numpy(self._slots_in(0, 1))

    def _slots_in(self, first: int, step: int) -> Counts:
        """Return the slots in every `step`-th segment."""
        tag_GB, slot_GB = (
            memory.rows.view(-1, SEGMENT)[first : self._segments : step].numpy()
            for memory in (self._tags, self._slots)
        )
        slot_K: Counts = slot_GB[tag_GB != 0].astype(np.int64)
        return slot_K


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
