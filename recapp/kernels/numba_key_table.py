"""The kernels of `numba_key_index.py`: find, add and remove keys, and split segments.

The table grows by linear hashing (Litwin 1980): one segment is split at a time, in their order, and
a round of splits ends when all segments of its beginning are split. So no growth moves all keys.
"""

from typing import Any, NamedTuple

import numpy as np

from recapp.kernels.constants import RUN_BITS
from recapp.kernels.numba_cache import compiled
from recapp.kernels.simd import prefetch

jit = compiled()
SEGMENT_BITS = 12
SEGMENT = 1 << SEGMENT_BITS
FULL = SEGMENT - SEGMENT // 16  # a segment with this many used buckets makes the table grow
BLOCK = 64  # keys whose buckets, and then positions, are fetched together
STRIPS = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: spreads the strips of one position
RUN = np.int64(64 - RUN_BITS)
HALF = np.int64(1 << RUN_BITS - 1)


class KeyTable(NamedTuple):
    """The arrays of an index, and its number of segments.

    Args:
        tag_B: The tag of each bucket, 0 for a free one; segment g begins at bucket g * SEGMENT.
        slot_B: The slot of each bucket.
        used_G: The number of used buckets of each segment.
        position_S: The position of each slot.
        strip_S: The strip of each slot.
        place_R: The number of each run among the runs that the store holds.
        places: The number of runs that the store holds.
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
    """Return the hash of a key within its run. Without the secret, an attacker cannot choose ids
    that crowd in one place.
    """
    h = (np.uint64(position) << np.uint64(RUN_BITS)) ^ (np.uint64(strip) * STRIPS)
    h *= secret
    return h ^ (h >> np.uint64(32))


@jit
def whole_segments(places: Any, segments: Any) -> Any:
    """Return the number of segments of each run before the current round of splits: a power of 2.

    Args:
        places: The number of runs.
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
        place: The number of the key's run among the runs that the store holds.
        places: The number of runs that the store holds.
        segments: The number of segments.
        whole: The result of `whole_segments`.
    """
    at = np.int64(h >> np.uint64(RUN_BITS)) & (2 * whole - 1)
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
        place = table.place_R[(position_N[n] >> RUN) + HALF]
        segment = segment_of(h, place, table.places, table.segments, whole)
        segment_K[n - first] = segment
        bucket = segment * SEGMENT + home_of(h)
        prefetch(table.tag_B, bucket, 1)
        prefetch(table.slot_B, bucket, 1)


@jit
def find_slots(table: Any, position_N: Any, strip_N: Any, slot_N: Any) -> None:
    """Write the slot of each key; -1 for a key that is absent."""
    whole = whole_segments(table.places, table.segments)
    segment_K = np.empty(BLOCK, np.int64)
    N = len(position_N)
    for first in range(0, N, BLOCK):
        last = min(first + BLOCK, N)
        fetch_buckets(table, first, last, position_N, strip_N, whole, segment_K)
        for n in range(first, last):  # the first bucket with the tag is almost always the key's
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
        for n in range(first, last):
            position = position_N[n]
            strip = strip_N[n]
            h = hash_of(position, strip, table.secret)
            bucket = bucket_of(table, position, strip, h, segment_K[n - first])
            exists = bucket >= 0 and table.tag_B[bucket] != 0
            slot_N[n] = np.int64(table.slot_B[bucket]) if exists else np.int64(-1)


@jit
def insert_keys(
    table: Any,
    begin: Any,
    position_M: Any,
    strip_M: Any,
    fresh_M: Any,
    used: Any,
    slot_M: Any,
    first_U: Any,
) -> Any:
    """Add keys from entry `begin` on; return the entry at which a segment was full, and the number
    of used fresh slots.
    """
    whole = whole_segments(table.places, table.segments)
    segment_K = np.empty(BLOCK, np.int64)
    M = len(position_M)
    for first in range(begin, M, BLOCK):
        last = min(first + BLOCK, M)
        fetch_buckets(table, first, last, position_M, strip_M, whole, segment_K)
        for m in range(first, last):
            position = position_M[m]
            strip = strip_M[m]
            h = hash_of(position, strip, table.secret)
            segment = segment_K[m - first]
            bucket = bucket_of(table, position, strip, h, segment)
            if bucket >= 0 and table.tag_B[bucket] != 0:
                slot_M[m] = np.int64(table.slot_B[bucket])
                continue
            if table.used_G[segment] >= FULL:
                return m, used
            slot = fresh_M[used]
            table.tag_B[bucket] = tag_of(h)
            table.slot_B[bucket] = slot
            table.used_G[segment] += 1
            table.position_S[slot] = position
            table.strip_S[slot] = strip
            slot_M[m] = slot
            first_U[used] = m
            used += 1
    return M, used


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
        place = table.place_R[(position >> RUN) + HALF]
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


@jit
def slots_in(table: Any, first: Any, step: Any, strip: Any, slot_K: Any) -> Any:
    """Write the slots of a strip in every `step`-th segment; return their number."""
    n = 0
    for segment in range(first, table.segments, step):
        for bucket in range(segment * SEGMENT, (segment + 1) * SEGMENT):
            if table.tag_B[bucket] == 0:
                continue
            slot = np.int64(table.slot_B[bucket])
            if table.strip_S[slot] == strip:
                slot_K[n] = slot
                n += 1
    return n
