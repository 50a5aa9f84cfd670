"""Where the rows of dynamic tables lie, compiled: `key_index.py` by open addressing.

    position, strip --> segment of buckets --> bucket: tag (0: free), slot --> positions[slot]

The table is made of segments of 4,096 buckets, each a small hash table of its own (linear probing).
It grows by linear hashing (Litwin 1980): one segment at a time is split into two, so no step ever
waits for a whole table to be hashed again. A segment belongs to one run of positions, so the rows
of a run are found without looking at the others.

Buckets hold no positions: those of a slot stand beside the store's rows, where reading one costs a
wait for memory. So a bucket has a tag, a byte of the key's hash: of 127 other keys that are met on
the way, 126 are passed by without looking at their positions. And keys are looked for in blocks:
what all of a block need is fetched together.

A bucket has 5 bytes. Segments are split from .42 of the buckets used on; the fullest, those not
yet split, have twice as many used as the others, at most .84.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recapp.kernels.key_index import RUN_BITS
from recapp.kernels.numba_cache import compiled
from recapp.kernels.row_memory import RowMemory
from recapp.kernels.simd import prefetch

jit = compiled()
SEGMENT_BITS = 12
SEGMENT = 1 << SEGMENT_BITS
MOST_USED = 0.42
FULL = SEGMENT - SEGMENT // 16  # used buckets of a segment from which on the table grows anyway
BLOCK = 64  # keys whose buckets, then whose positions, are fetched together
SPREAD = np.uint64(0x9E3779B97F4A7C15)  # of strips, 2^64 / golden ratio
RUN = np.int64(64 - RUN_BITS)
HALF = np.int64(1 << RUN_BITS - 1)


@jit
def hash_of(position: Any, strip: Any) -> Any:
    """Return the hash of a key within its run."""
    return (np.uint64(position) << np.uint64(RUN_BITS)) ^ (np.uint64(strip) * SPREAD)


@jit
def whole_segments(places: Any, segments: Any) -> Any:
    """Return how many segments each run had before the splitting that is under way: a power of 2.

    Args:
        places: How many runs there are.
        segments: How many segments there are.
    """
    whole = 1
    while whole * 2 * places <= segments:
        whole *= 2
    return whole


@jit
def segment_of(h: Any, place: Any, places: Any, segments: Any, whole: Any) -> Any:
    """Return the segment of a hash.

    Args:
        h: From `hash_of`.
        place: The number of its run among those that the store holds.
        places: How many runs these are.
        segments: How many segments there are.
        whole: From `whole_segments`.
    """
    at = np.int64(h >> np.uint64(RUN_BITS)) & (2 * whole - 1)
    segment = at * places + place
    return segment if segment < segments else segment - whole * places


@jit
def tag_of(h: Any) -> Any:
    """Return the tag of a hash, of other bits than its segment and bucket: never 0."""
    return np.uint8((h >> np.uint64(40)) & np.uint64(0xFF)) | np.uint8(1)


@jit
def home_of(h: Any) -> Any:
    """Return the bucket of its segment in which a key belongs."""
    return np.int64(h >> np.uint64(64 - SEGMENT_BITS))


@jit
def bucket_of(
    position: Any,
    strip: Any,
    h: Any,
    segment: Any,
    tag_B: Any,
    bucket_B: Any,
    position_S: Any,
    strip_S: Any,
) -> Any:
    """Return the bucket of a key, or the free bucket where it belongs, or -1 in a full segment."""
    first = segment * SEGMENT
    at = home_of(h)
    tag = tag_of(h)
    for _ in range(SEGMENT):
        here = tag_B[first + at]
        if here == 0:
            return first + at
        if here == tag:
            slot = np.int64(bucket_B[first + at])
            if position_S[slot] == position and strip_S[slot] == strip:
                return first + at
        at = (at + 1) & (SEGMENT - 1)
    return np.int64(-1)


@jit
def fetch_buckets(
    first: Any,
    last: Any,
    position_N: Any,
    strip_N: Any,
    place_R: Any,
    places: Any,
    segments: Any,
    whole: Any,
    tag_B: Any,
    bucket_B: Any,
    segment_K: Any,
) -> None:
    """Fetch the buckets of a block of keys, and write the segment of each."""
    for n in range(first, last):
        h = hash_of(position_N[n], strip_N[n])
        place = place_R[(position_N[n] >> RUN) + HALF]
        segment = segment_of(h, place, places, segments, whole)
        segment_K[n - first] = segment
        bucket = segment * SEGMENT + home_of(h)
        prefetch(tag_B, bucket, 1)
        prefetch(bucket_B, bucket, 1)


@jit
def find_slots(
    position_N: Any,
    strip_N: Any,
    place_R: Any,
    places: Any,
    segments: Any,
    tag_B: Any,
    bucket_B: Any,
    position_S: Any,
    strip_S: Any,
    slot_N: Any,
) -> None:
    """Write the slot of each key, or -1."""
    whole = whole_segments(places, segments)
    segment_K = np.empty(BLOCK, np.int64)
    N = len(position_N)
    for first in range(0, N, BLOCK):
        last = min(first + BLOCK, N)
        fetch_buckets(
            first,
            last,
            position_N,
            strip_N,
            place_R,
            places,
            segments,
            whole,
            tag_B,
            bucket_B,
            segment_K,
        )
        for n in range(first, last):  # the first bucket with the tag, almost always the key's
            h = hash_of(position_N[n], strip_N[n])
            tag = tag_of(h)
            begin = segment_K[n - first] * SEGMENT
            at = home_of(h)
            for _ in range(SEGMENT):
                here = tag_B[begin + at]
                if here == tag:
                    slot = np.int64(bucket_B[begin + at])
                    prefetch(position_S, slot, 1)
                    prefetch(strip_S, slot, 1)
                if here == tag or here == 0:
                    break
                at = (at + 1) & (SEGMENT - 1)
        for n in range(first, last):
            position = position_N[n]
            strip = strip_N[n]
            h = hash_of(position, strip)
            segment = segment_K[n - first]
            bucket = bucket_of(position, strip, h, segment, tag_B, bucket_B, position_S, strip_S)
            found = bucket >= 0 and tag_B[bucket] != 0
            slot_N[n] = np.int64(bucket_B[bucket]) if found else np.int64(-1)


@jit
def insert_keys(
    begin: Any,
    position_M: Any,
    strip_M: Any,
    fresh_M: Any,
    used: Any,
    place_R: Any,
    places: Any,
    segments: Any,
    tag_B: Any,
    bucket_B: Any,
    used_G: Any,
    position_S: Any,
    strip_S: Any,
    slot_M: Any,
    first_U: Any,
) -> Any:
    """Add keys from entry `begin` on; return the entry at which a segment was full, and how many
    fresh slots are used.
    """
    whole = whole_segments(places, segments)
    segment_K = np.empty(BLOCK, np.int64)
    M = len(position_M)
    for first in range(begin, M, BLOCK):
        last = min(first + BLOCK, M)
        fetch_buckets(
            first,
            last,
            position_M,
            strip_M,
            place_R,
            places,
            segments,
            whole,
            tag_B,
            bucket_B,
            segment_K,
        )
        for m in range(first, last):
            position = position_M[m]
            strip = strip_M[m]
            h = hash_of(position, strip)
            segment = segment_K[m - first]
            bucket = bucket_of(position, strip, h, segment, tag_B, bucket_B, position_S, strip_S)
            if bucket >= 0 and tag_B[bucket] != 0:
                slot_M[m] = np.int64(bucket_B[bucket])
                continue
            if used_G[segment] >= FULL:
                return m, used
            slot = fresh_M[used]
            tag_B[bucket] = tag_of(h)
            bucket_B[bucket] = slot
            used_G[segment] += 1
            position_S[slot] = position
            strip_S[slot] = strip
            slot_M[m] = slot
            first_U[used] = m
            used += 1
    return M, used


@jit
def split_segments(
    segments: Any,
    more: Any,
    places: Any,
    tag_B: Any,
    bucket_B: Any,
    used_G: Any,
    position_S: Any,
    strip_S: Any,
    held: Any,
) -> None:
    """Add segments, each by splitting one: the next in turn."""
    for new in range(segments, segments + more):
        whole = whole_segments(places, new)
        old = new - whole * places
        n = 0
        for bucket in range(old * SEGMENT, (old + 1) * SEGMENT):
            if tag_B[bucket] != 0:
                slot = np.int64(bucket_B[bucket])
                prefetch(position_S, slot, 1)
                prefetch(strip_S, slot, 1)
                held[n] = slot
                n += 1
                tag_B[bucket] = 0
        used_G[old] = 0
        used_G[new] = 0
        for k in range(n):
            slot = np.int64(held[k])
            h = hash_of(position_S[slot], strip_S[slot])
            segment = segment_of(h, old % places, places, new + 1, whole)
            at = home_of(h)
            while tag_B[segment * SEGMENT + at] != 0:
                at = (at + 1) & (SEGMENT - 1)
            tag_B[segment * SEGMENT + at] = tag_of(h)
            bucket_B[segment * SEGMENT + at] = slot
            used_G[segment] += 1


@jit
def remove_slots(
    slot_M: Any,
    place_R: Any,
    places: Any,
    segments: Any,
    tag_B: Any,
    bucket_B: Any,
    used_G: Any,
    position_S: Any,
    strip_S: Any,
) -> None:
    """Take away the keys of slots; entries behind them move up, so no bucket is ever lost."""
    whole = whole_segments(places, segments)
    for m in range(len(slot_M)):
        slot = slot_M[m]
        position = position_S[slot]
        strip = strip_S[slot]
        h = hash_of(position, strip)
        segment = segment_of(h, place_R[(position >> RUN) + HALF], places, segments, whole)
        first = segment * SEGMENT
        bucket = bucket_of(position, strip, h, segment, tag_B, bucket_B, position_S, strip_S)
        if bucket < 0 or tag_B[bucket] == 0:
            continue
        used_G[segment] -= 1
        hole = bucket - first
        at = hole
        for _ in range(SEGMENT):
            at = (at + 1) & (SEGMENT - 1)
            if tag_B[first + at] == 0:
                break
            other = np.int64(bucket_B[first + at])
            home = home_of(hash_of(position_S[other], strip_S[other]))
            if ((at - home) & (SEGMENT - 1)) >= ((at - hole) & (SEGMENT - 1)):
                tag_B[first + hole] = tag_B[first + at]
                bucket_B[first + hole] = bucket_B[first + at]
                hole = at
        tag_B[first + hole] = 0


@jit
def slots_in(
    first: Any,
    step: Any,
    segments: Any,
    strip: Any,
    tag_B: Any,
    bucket_B: Any,
    strip_S: Any,
    slot_K: Any,
) -> Any:
    """Write the slots of a strip in every `step`-th segment; return how many there are."""
    n = 0
    for segment in range(first, segments, step):
        for bucket in range(segment * SEGMENT, (segment + 1) * SEGMENT):
            if tag_B[bucket] == 0:
                continue
            slot = np.int64(bucket_B[bucket])
            if strip_S[slot] == strip:
                slot_K[n] = slot
                n += 1
    return n


class HashIndex:
    """The slots of the rows that exist. Arguments, attributes and methods as of `SortedIndex`."""

    def __init__(self, runs: Sequence[int], capacity: int, device: torch.device) -> None:
        self.positions = RowMemory(capacity, 1, torch.int64, device)
        self.strips = RowMemory(capacity, 1, torch.int16, device)
        self._places = max(1, len(runs))
        self._place_R = np.zeros(1 << RUN_BITS, np.int64)
        for place, run in enumerate(sorted(runs)):
            self._place_R[run] = place
        # a table whose keys crowd into few segments has many times the segments of any other
        most = 16 * (self._places + int(capacity / MOST_USED) // SEGMENT + 1)
        self._tags = RowMemory(most * SEGMENT, 1, torch.uint8, device)
        self._buckets = RowMemory(most * SEGMENT, 1, torch.int32, device)
        self._segments = 0
        self._used_G = np.zeros(0, np.int32)
        self._held = np.zeros(SEGMENT, np.int32)
        self._keys = 0
        self._add(self._places)

    def __len__(self) -> int:
        """Return the number of keys."""
        return self._keys

    @property
    def nbytes(self) -> int:
        """Return the bytes of what finds slots, without `positions` and `strips`."""
        return self._tags.nbytes + self._buckets.nbytes + self._used_G.nbytes

    def clear(self) -> None:
        """Forget all keys."""
        self._tags.rows[: self._segments * SEGMENT] = 0
        self._used_G[:] = 0
        self._keys = 0

    def _add(self, more: int) -> None:
        """Add segments."""
        self._tags.grow((self._segments + more) * SEGMENT)
        self._buckets.grow((self._segments + more) * SEGMENT)
        if len(self._used_G) < self._segments + more:
            wider = np.zeros(max(2 * len(self._used_G), self._segments + more), np.int32)
            wider[: len(self._used_G)] = self._used_G
            self._used_G = wider
        split_segments(
            self._segments,
            more if self._segments else 0,
            self._places,
            *self._of_buckets(),
            self._used_G,
            *self._slots(),
            self._held,
        )
        self._segments += more

    def _of_buckets(self) -> tuple[Any, Any]:
        return self._tags.rows.view(-1).numpy(), self._buckets.rows.view(-1).numpy()

    def _slots(self) -> tuple[Any, Any]:
        return self.positions.rows.view(-1).numpy(), self.strips.rows.view(-1).numpy()

    def find(self, position_N: Tensor, strip_N: Tensor) -> Tensor:
        """Return the slot of each key, int64; -1 where it is not there."""
        slot_N = torch.empty_like(position_N)
        find_slots(
            position_N.numpy(),
            strip_N.numpy(),
            self._place_R,
            self._places,
            self._segments,
            *self._of_buckets(),
            *self._slots(),
            slot_N.numpy(),
        )
        return slot_N

    def insert(self, position_M: Tensor, strip_M: Tensor, fresh_M: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys that are not there (`SortedIndex.insert`)."""
        self.positions.grow(int(fresh_M.max()) + 1)
        self.strips.grow(int(fresh_M.max()) + 1)
        wanted = int((self._keys + len(position_M)) / (MOST_USED * SEGMENT)) + 1
        if wanted > self._segments:
            self._add(wanted - self._segments)
        slot_M = torch.empty_like(position_M)
        first_U = np.empty(len(position_M), np.int64)
        done = 0
        used = 0
        while True:
            done, used = insert_keys(
                done,
                position_M.numpy(),
                strip_M.numpy(),
                fresh_M.numpy(),
                used,
                self._place_R,
                self._places,
                self._segments,
                *self._of_buckets(),
                self._used_G,
                *self._slots(),
                slot_M.numpy(),
                first_U,
            )
            if done == len(position_M):
                break
            self._add(max(1, self._segments // 8))  # a segment fills up before its turn
        self._keys += used
        return slot_M, torch.from_numpy(first_U[:used])

    def remove(self, slot_M: Tensor) -> None:
        """Take away the keys of some slots, each once."""
        self._keys -= len(slot_M)
        remove_slots(
            slot_M.numpy(),
            self._place_R,
            self._places,
            self._segments,
            *self._of_buckets(),
            self._used_G,
            *self._slots(),
        )

    def slots_of_run(self, run: int, strip: int) -> Tensor:
        """Return the slots of a strip whose positions lie in a run."""
        return self._slots_in(int(self._place_R[run]), self._places, strip)

    def slots_of(self, strip: int) -> Tensor:
        """Return the slots of a strip in the order of their positions."""
        slot_K = self._slots_in(0, 1, strip)
        return slot_K[self.positions.rows[slot_K, 0].argsort()]

    def _slots_in(self, first: int, step: int, strip: int) -> Tensor:
        slot_K = np.empty(self._keys, np.int64)
        n = slots_in(
            first,
            step,
            self._segments,
            strip,
            *self._of_buckets(),
            self.strips.rows.view(-1).numpy(),
            slot_K,
        )
        return torch.from_numpy(slot_K[:n].copy())
