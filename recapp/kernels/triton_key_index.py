"""The functions of `SortedIndex` (`reference.py`) on a GPU. The index of a store of dynamic tables
is a hash table in the memory of the device:

    position, strip --hash--> bucket: hash (31 bits), slot (32 bits) --> positions[slot]

A search begins at the bucket of the hash and goes on to the next bucket (linear probing) until it
meets the key or a bucket that is `FREE`. It reads the position of a slot only where the hash in the
bucket is that of the key. Removing a key leaves `GONE`, which a search passes and a new key may
take. At most half of the buckets are not free. Before they would be more, a launch puts all keys
into a table of four buckets for each key. Buckets tell the hash, so no position is read for it.

Training looks up and adds keys in one pass:

    find         slot of each entry; entries of absent keys meet in a *cell* of a second table
    count_new    the first entries of each block
    insert_new   new keys, numbered by their first entries, take the free slots in this order
    follow       the other entries of a new key take the slot of the first one

`find_or_insert` gives the host the number of new keys, for which it waits. `add` does not: the
device numbers the keys, and the host has made room for as many as there are entries
(`recapp/engine/dynamic_keys.py`). The number of a key is its slot, or, while there are slots that
were given back, its place in the stack of these. The launch that begins rows (`triton_new_rows.py`)
then does what `follow` does. What changes while recorded steps stay, the places of the table and of
the stack, the number of the next key, and that of the step, stands on the device, in `numbers`
(`INDEX_NUMBERS` of `batch_arrays.py`). Of two launches that follow one another, each writes there
what it reads from the other, so no program can read what another one has written.

Where a key must be seen in several steps before it gets a row, `add` counts it in another index,
that of a *counter*, whose slots have counts. `find` searches there for absent keys. With its count,
a new key either gets a row, and counts 0 from there on, which is as if it were not counted; or it
only passes: its slot lies behind all used ones, it is not in the index, and the next step takes the
slot again.

Threads run in any order and still make the same slots:

- A cell is claimed by compare-and-swap and never becomes free again. So all entries of a key, which
  visit the same cells in the same order, meet in the first cell that no other key has. There
  `atomic_min` leaves the least entry, whoever came first. A later launch reads it.
- New keys are distinct and absent, so no two of them are one, and each takes the first bucket for
  which its compare-and-swap succeeds. Which bucket a key has depends on the race, but its slot does
  not, and no result shows a bucket. A load may see an old word of a bucket: then the swap fails.
- Keys that are removed at the same time have buckets of their own, and a search passes one that
  another key leaves meanwhile. Else searches run in no launch that writes what they read.

Letters are those of `reference.py`; L lanes of a program, B buckets, C cells. The kernels have run
in Triton's interpreter, where programs follow one another, and were compiled for sm_90. They have
not run on a GPU.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from recapp.kernels.batch_arrays import INDEX_NUMBERS
from recapp.kernels.reference import SortedIndex
from recapp.kernels.triton_integers import BELOW_STRETCH, ENTRIES_END
from recapp.kernels.triton_launch import Launch
from recapp.sparse.transfer import to_host, true_indices
from recapp.tables.positions import STRETCHES

LANES = 256
LEAST_BUCKETS = 1024
BUCKETS_OF_A_KEY = 4  # in a new table; it is replaced when they would be less than 2
FREE = -1
GONE = -2
# a word that no bucket has: compared with it, a swap changes nothing. (A swap takes no mask.)
NEVER = -3
_FREE = tl.constexpr(FREE)
_GONE = tl.constexpr(GONE)
_NEVER = tl.constexpr(NEVER)
_STRIPS = tl.constexpr(-0x61C8864680B583EB)  # 2^64 / golden ratio: spreads the strips
_SLOT = tl.constexpr(0xFFFFFFFF)  # the bits of a word that are the slot
TABLE, BUCKETS, FIRST, BEFORE, STEP, PASSING, NEXT, USED, STACK = (
    tl.constexpr(i) for i in range(len(INDEX_NUMBERS))
)
_STRETCHES = tl.constexpr(STRETCHES)


@triton.jit
def _hash_of(position_L, strip_L, secret):
    """Return the hash of keys, 31 bits. Without the secret, an attacker cannot choose ids that
    crowd in one place.
    """
    h_L = position_L * secret
    h_L = (h_L ^ ((h_L >> 32) & 0xFFFFFFFF)) + strip_L.to(tl.int64) * _STRIPS
    return (h_L * secret >> 33) & 0x7FFFFFFF


@triton.jit
def _home_of(hash_L, buckets):
    """Return the bucket at which the search for a hash begins."""
    return hash_L * buckets >> 31


@triton.jit
def _next(bucket_L, buckets):
    return tl.where(bucket_L + 1 == buckets, 0, bucket_L + 1)


@triton.jit
def _any(mask_L):
    return tl.max(mask_L.to(tl.int32), 0) > 0


@triton.jit
def _table_of(numbers):
    """Return the table and its number of buckets."""
    table = tl.load(numbers + TABLE).to(tl.pointer_type(tl.int64))
    return table, tl.load(numbers + BUCKETS)


@triton.jit
def _slots_of(numbers, number_L, here_L):
    """Return the slots of keys by their numbers: those that were given back come first."""
    stack = tl.load(numbers + STACK).to(tl.pointer_type(tl.int64))
    again_L = here_L & (number_L < tl.load(numbers + USED))
    return tl.load(stack + number_L, mask=again_L, other=number_L)


@triton.jit
def _find(table, positions, strips, position_L, strip_L, hash_L, here_L, buckets):
    """Return the slot of each key, -1 for a key that is absent, and the bucket that has it."""
    slot_L = tl.zeros_like(position_L) - 1
    bucket_L = _home_of(hash_L, buckets)
    while _any(here_L):
        word_L = tl.load(table + bucket_L, mask=here_L, other=_FREE)
        at_L = word_L & _SLOT
        same_L = here_L & (word_L >> 32 == hash_L)
        same_L &= tl.load(positions + at_L, mask=same_L, other=0) == position_L
        same_L &= tl.load(strips + at_L, mask=same_L, other=-1) == strip_L
        slot_L = tl.where(same_L, at_L, slot_L)
        here_L = here_L & (same_L == 0) & (word_L != _FREE)
        bucket_L = tl.where(here_L, _next(bucket_L, buckets), bucket_L)
    return slot_L, bucket_L


@triton.jit
def _insert(table, word_L, here_L, buckets):
    """Put words with distinct slots into the table."""
    bucket_L = _home_of(word_L >> 32, buckets)
    while _any(here_L):
        before_L = tl.load(table + bucket_L, mask=here_L, other=0)
        open_L = here_L & (before_L < 0)
        expected_L = tl.where(open_L, before_L, _NEVER)
        taken_L = tl.atomic_cas(table + bucket_L, expected_L, word_L, sem="relaxed") == expected_L
        here_L = here_L & ((open_L & taken_L) == 0)
        bucket_L = tl.where(here_L, _next(bucket_L, buckets), bucket_L)


@Launch
@triton.jit(do_not_specialize=["entry", "n", "cells", "secret"])
def find(
    numbers,
    positions,
    strips,
    position,
    strip,
    slot,
    claims,
    cell,
    group,
    stopped,
    counter,
    counted_positions,
    counted_strips,
    waiting,
    entry,
    n,
    cells,
    secret: tl.int64,
    LANES: tl.constexpr,
):
    """Write the slot of each key, -1 for a key that is absent; with `claims` also the cell that
    holds the first entry of an absent key after the launch; with `waiting` also the slot of an
    absent key in a counter. Where a step has stopped, absent keys stay absent, and read any row.
    """
    at_L = tl.program_id(0) * LANES + tl.arange(0, LANES)
    here_L = at_L < n
    if group is not None:
        here_L = at_L < tl.load(group + ENTRIES_END) - entry
    position_L = tl.load(position + at_L, mask=here_L, other=0)
    strip_L = tl.load(strip + at_L, mask=here_L, other=0)
    hash_L = _hash_of(position_L, strip_L, secret)
    table, buckets = _table_of(numbers)
    slot_L, _ = _find(table, positions, strips, position_L, strip_L, hash_L, here_L, buckets)
    absent_L = here_L & (slot_L < 0)
    if stopped is not None:
        goes_on = tl.load(stopped) == 0
        slot_L = tl.where(absent_L & (goes_on == 0), 0, slot_L)
        absent_L = absent_L & goes_on
    tl.store(slot + at_L, slot_L, mask=here_L)
    if claims is not None:
        cell_L = _home_of(hash_L, cells)
        seeks_L = absent_L
        while _any(seeks_L):
            expected_L = tl.where(seeks_L, -1, _NEVER)
            other_L = tl.atomic_cas(claims + cell_L, expected_L, at_L, sem="relaxed")
            meets_L = seeks_L & (other_L >= 0)
            same_L = meets_L & (tl.load(position + other_L, mask=meets_L, other=0) == position_L)
            same_L &= tl.load(strip + other_L, mask=meets_L, other=-1) == strip_L
            tl.atomic_min(claims + cell_L, at_L, mask=same_L, sem="relaxed")
            seeks_L = meets_L & (same_L == 0)
            cell_L = tl.where(seeks_L, _next(cell_L, cells), cell_L)
        tl.store(cell + at_L, tl.where(absent_L, cell_L, -1).to(tl.int32), mask=at_L < n)
        tl.store(numbers + FIRST, tl.load(numbers + NEXT))
        tl.store(numbers + STEP, tl.load(numbers + BEFORE) + 1)
    if waiting is not None:
        tl.store(counter + FIRST, tl.load(counter + NEXT))
        table, buckets = _table_of(counter)
        keys = position_L, strip_L, hash_L, absent_L, buckets
        slot_L, _ = _find(table, counted_positions, counted_strips, *keys)
        tl.store(waiting + at_L, slot_L, mask=here_L)


@triton.jit
def first_entries(claims, cell, at_L, n):
    """Return whether each entry is the first one of a new key, and the first one of its key; -1
    where the key is not new.
    """
    cell_L = tl.load(cell + at_L, mask=at_L < n, other=-1)
    first_L = tl.load(claims + cell_L, mask=cell_L >= 0, other=-1)
    return (cell_L >= 0) & (first_L == at_L), first_L


@triton.jit
def counted(counts, blocks, LANES: tl.constexpr):
    """Return the number of new keys whose first entry lies in the first blocks."""
    total = 0
    for begin in range(0, blocks, LANES):
        block_L = begin + tl.arange(0, LANES)
        total += tl.sum(tl.load(counts + block_L, mask=block_L < blocks, other=0), 0)
    return total


@triton.jit
def _numbers_of(here_L, counts, blocks, LANES: tl.constexpr):
    """Return the number of each marked entry of a program, behind those of the first blocks."""
    return counted(counts, blocks, LANES) + tl.cumsum(here_L.to(tl.int32), 0) - 1


@triton.jit
def _seen(first_L, at_L, strip, times, seen, waiting):
    """Return for new keys whether they were seen often enough for a row, whether they were not, and
    whether the counter does not have these; their slots there; and the steps that have seen them.
    """
    waiting_L = tl.load(waiting + at_L, mask=first_L, other=-1)
    times_L = tl.load(times + waiting_L, mask=waiting_L >= 0, other=0) + 1
    strip_L = tl.load(strip + at_L, mask=first_L, other=0)
    gets_L = first_L & (times_L >= tl.load(seen + strip_L, mask=first_L, other=0))
    passes_L = first_L & (gets_L == 0)
    return gets_L, passes_L, passes_L & (waiting_L < 0), waiting_L, times_L


@Launch
@triton.jit(do_not_specialize=["n"])
def count_new(claims, cell, counts, strip, times, seen, waiting, n, LANES: tl.constexpr):
    """Write the number of new keys whose first entry is one of the program's, of those that get a
    row. With `seen` also the number of those that pass, and of those among them that the counter
    does not have, each number of all programs behind those before.
    """
    at_L = tl.program_id(0) * LANES + tl.arange(0, LANES)
    first_L, _ = first_entries(claims, cell, at_L, n)
    gets_L = first_L
    counts += tl.program_id(0)
    if seen is not None:
        gets_L, passes_L, unknown_L, _, _ = _seen(first_L, at_L, strip, times, seen, waiting)
        tl.store(counts + tl.num_programs(0), tl.sum(passes_L.to(tl.int32), 0))
        tl.store(counts + 2 * tl.num_programs(0), tl.sum(unknown_L.to(tl.int32), 0))
    tl.store(counts, tl.sum(gets_L.to(tl.int32), 0))


@Launch
@triton.jit(do_not_specialize=["n", "secret"])
def insert_new(
    numbers,
    positions,
    strips,
    position,
    strip,
    slot,
    claims,
    cell,
    counts,
    fresh,
    first,
    new,
    admitted,
    counter,
    counted_positions,
    counted_strips,
    times,
    seen,
    waiting,
    n,
    secret: tl.int64,
    LANES: tl.constexpr,
):
    """Give each new key a free slot, write its first entry and add it. Free slots are those of
    `fresh`. Without them they follow from the numbers of keys, and keys are counted, by stretch and
    strip in `new` and `admitted`, and with `seen` in the counter. Keys that pass take the slots
    behind all used ones, and are not added.
    """
    program = tl.program_id(0)
    blocks = tl.num_programs(0)
    at_L = program * LANES + tl.arange(0, LANES)
    first_L, _ = first_entries(claims, cell, at_L, n)
    position_L = tl.load(position + at_L, mask=first_L, other=0)
    strip_L = tl.load(strip + at_L, mask=first_L, other=0)
    word_L = _hash_of(position_L, strip_L, secret) << 32
    gets_L = first_L
    number_L = _numbers_of(first_L, counts, program, LANES)
    if seen is not None:
        gets_L, passes_L, unknown_L, waiting_L, times_L = _seen(
            first_L, at_L, strip, times, seen, waiting
        )
        behind_L = _numbers_of(passes_L, counts, blocks + program, LANES)
        number_L = tl.where(gets_L, _numbers_of(gets_L, counts, program, LANES), behind_L)
        unknown = counts + 2 * blocks
        next_L = tl.load(counter + FIRST) + _numbers_of(unknown_L, unknown, program, LANES)
        waiting_L = tl.where(unknown_L, _slots_of(counter, next_L, unknown_L), waiting_L)
        tl.store(times + waiting_L, tl.where(gets_L, 0, times_L), mask=waiting_L >= 0)
        tl.store(counted_positions + waiting_L, position_L, mask=unknown_L)
        tl.store(counted_strips + waiting_L, strip_L, mask=unknown_L)
        table, buckets = _table_of(counter)
        _insert(table, word_L | waiting_L, unknown_L, buckets)
        tl.store(counter + NEXT, tl.load(counter + FIRST) + counted(unknown, blocks, LANES))
        tl.store(numbers + PASSING, counted(counts + blocks, blocks, LANES))
    if fresh is None:
        number_L += tl.load(numbers + FIRST)
        keys = tl.load(numbers + FIRST) + counted(counts, blocks, LANES)
        tl.store(numbers + NEXT, keys)
        tl.store(numbers + BEFORE, tl.load(numbers + STEP))
        left = tl.maximum(tl.load(numbers + USED) - keys, 0)  # of the slots that were given back
        slot_L = tl.where(gets_L, _slots_of(numbers, number_L, gets_L), number_L + left)
        part_L = strip_L.to(tl.int64) * _STRETCHES + (position_L >> BELOW_STRETCH) + _STRETCHES // 2
        tl.atomic_add(new + part_L, part_L * 0 + 1, mask=first_L, sem="relaxed")
        tl.atomic_add(admitted + part_L, part_L * 0 + 1, mask=gets_L, sem="relaxed")
    else:
        slot_L = tl.load(fresh + number_L, mask=first_L, other=0)
        tl.store(first + number_L, at_L.to(tl.int64), mask=first_L)
    tl.store(slot + at_L, slot_L, mask=first_L)
    tl.store(positions + slot_L, position_L, mask=first_L)
    tl.store(strips + slot_L, strip_L, mask=first_L)
    table, buckets = _table_of(numbers)
    _insert(table, word_L | slot_L, gets_L, buckets)


@Launch
@triton.jit(do_not_specialize=["n"])
def follow(slot, claims, cell, n, LANES: tl.constexpr):
    """Give each entry of a new key the slot of the key's first entry."""
    at_L = tl.program_id(0) * LANES + tl.arange(0, LANES)
    is_first_L, first_L = first_entries(claims, cell, at_L, n)
    others_L = (first_L >= 0) & (is_first_L == 0)
    tl.store(slot + at_L, tl.load(slot + first_L, mask=others_L, other=0), mask=others_L)


@Launch
@triton.jit(do_not_specialize=["old", "buckets"])
def rebuild(table, larger, old, buckets, LANES: tl.constexpr):
    """Put the keys of a table into another one."""
    at_L = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    word_L = tl.load(table + at_L, mask=at_L < old, other=_FREE)
    _insert(larger, word_L, word_L >= 0, buckets)


@Launch
@triton.jit(do_not_specialize=["n", "secret"])
def remove(numbers, positions, strips, slot, n, secret: tl.int64, LANES: tl.constexpr):
    """Mark the buckets of distinct slots as `GONE`."""
    at_L = tl.program_id(0) * LANES + tl.arange(0, LANES)
    here_L = at_L < n
    slot_L = tl.load(slot + at_L, mask=here_L, other=0)
    position_L = tl.load(positions + slot_L, mask=here_L, other=0)
    strip_L = tl.load(strips + slot_L, mask=here_L, other=0)
    hash_L = _hash_of(position_L, strip_L, secret)
    table, buckets = _table_of(numbers)
    keys = position_L, strip_L, hash_L, here_L, buckets
    found_L, bucket_L = _find(table, positions, strips, *keys)
    tl.store(table + bucket_L, tl.zeros_like(slot_L) + _GONE, mask=found_L >= 0)


class DeviceKeyIndex(SortedIndex):
    """An index of the slots of all rows that exist, whose keys are not sorted.

    `numbers` are those that kernels read on the device. All indexes of a process hash alike.
    """

    _secret = (secrets.randbits(64) | 1) - 2**63

    def __init__(self, stretches: Sequence[int], capacity: int, device: torch.device) -> None:
        super().__init__(stretches, capacity, device)
        self._table = torch.full((LEAST_BUCKETS,), FREE, dtype=torch.int64, device=device)
        self.numbers = torch.zeros(len(INDEX_NUMBERS), dtype=torch.int64, device=device)
        self._keys = 0
        self._used = 0  # at least the number of buckets that are not free
        self._place = 0  # of the table that the device knows: a copy of the index has another one

    @override
    def __len__(self) -> int:
        return self._keys

    @property
    @override
    def nbytes(self) -> int:
        return self._table.nbytes

    @override
    def find(self, position_N: Tensor, strip_N: Tensor) -> Tensor:
        n = len(position_N)
        slot_N = position_N.new_empty(n)
        keys = position_N.contiguous(), strip_N.contiguous(), slot_N, *[None] * 8
        _launch(find, n, *self._arrays(), *keys, 0, n, 0, self._secret)
        return slot_N

    @override
    def find_or_insert(
        self, position_N: Tensor, strip_N: Tensor, free: Callable[[int], Tensor]
    ) -> tuple[Tensor, Tensor]:
        n = len(position_N)
        keys = position_N.contiguous(), strip_N.contiguous()
        slot_N, claims_C, cell_N, counts, _ = self._found(*keys)
        new = sum(to_host(counts[0]).tolist())  # the only wait of the host
        first_U = slot_N.new_empty(new)
        if new:
            fresh_U = free(new)
            self.make_room(new)
            lists = slot_N, claims_C, cell_N, counts, fresh_U, first_U, *[None] * 8
            _launch(insert_new, n, *self._arrays(), *keys, *lists, n, self._secret)
            _launch(follow, n, slot_N, claims_C, cell_N, n)
            self.count(new)
        return slot_N, first_U

    def add(
        self,
        position_N: Tensor,
        strip_N: Tensor,
        group: Tensor,
        entry: int,
        stopped: Tensor | None,
        counts_A: tuple[Tensor, Tensor],
        counter: Sequence[Any] = (),
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Give slots to the keys of a group that have none. The host learns nothing: it has made
        room for as many keys as there are entries.

        Return the slot of each entry, where only the first one of a new key has it; the first entry
        of each cell; and the cell of each entry of a new key, else -1. `begin_rows` takes them.

        Args:
            position_N: The positions of the entries, of which the group may have fewer.
            strip_N: Their strips.
            group: The place of the group, int64 [`GroupPlace`].
            entry: The number of its first entry.
            stopped: An integer: where it is set, no key is added. None: keys are added.
            counts_A: Numbers of the stretches of each strip, to which the new keys are added, and
                those that get a row.
            counter: A counter of keys that wait for a row: the numbers of its index, the positions
                and strips of its slots, the steps that have seen each key; and the steps of each
                strip that must have. None of these: each key gets a row.
        """
        n = len(position_N)
        keys = position_N, strip_N
        *of_entries, waiting_N = self._found(*keys, group, entry, stopped, counter)
        lists = *of_entries, None, None, *counts_A, *(counter or [None] * 5), waiting_N
        _launch(insert_new, n, *self._arrays(), *keys, *lists, n, self._secret)
        slot_N, claims_C, cell_N, _ = of_entries
        return slot_N, claims_C, cell_N

    def _found(
        self,
        position_N: Tensor,
        strip_N: Tensor,
        group: Tensor | None = None,
        entry: int = 0,
        stopped: Tensor | None = None,
        counter: Sequence[Any] = (),
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Find keys, and let the entries of absent ones meet. Return what `add` does, and the slots
        of entries in the counter.
        """
        n = len(position_N)
        slot_N = position_N.new_empty(n)
        cell_N = slot_N.new_empty(n, dtype=torch.int32)
        claims_C = slot_N.new_full((2 * n,), -1, dtype=torch.int32)
        counts = slot_N.new_empty(3, triton.cdiv(n, LANES), dtype=torch.int32)
        waiting_N = torch.empty_like(slot_N) if counter else None
        *of_counter, times, seen_I = counter or [None] * 5
        keys = position_N, strip_N, slot_N, claims_C, cell_N, group, stopped, *of_counter, waiting_N
        _launch(find, n, *self._arrays(), *keys, entry, n, len(claims_C), self._secret)
        _launch(count_new, n, claims_C, cell_N, counts, strip_N, times, seen_I, waiting_N, n)
        return slot_N, claims_C, cell_N, counts, waiting_N

    @override
    def remove(self, slot_M: Tensor) -> None:
        n = len(slot_M)
        _launch(remove, n, *self._arrays(), slot_M.contiguous(), n, self._secret)
        self._keys -= n

    @override
    def _all_slots(self) -> Tensor:
        return self._table[true_indices(self._table >= 0)] & ((1 << 32) - 1)

    def _arrays(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the arrays in the form for kernels."""
        if self._place != self._table.data_ptr():
            self._place = self._table.data_ptr()
            self.numbers[0] = self._place
            self.numbers[1] = len(self._table)
        return self.numbers, self.positions.rows, self.strips.rows

    def count(self, new: int) -> None:
        """Count keys that were added."""
        self._keys += new
        self._used += new

    def make_room(self, new: int) -> None:
        """Replace the table where more keys would leave less than half of the buckets free."""
        if 2 * (self._used + new) > len(self._table):
            old = len(self._table)
            buckets = max(LEAST_BUCKETS, BUCKETS_OF_A_KEY * (self._keys + new))
            table = torch.full((buckets,), FREE, dtype=torch.int64, device=self._table.device)
            _launch(rebuild, old, self._table, table, old, buckets)
            self._table = table
            self._used = self._keys
        self._arrays()


def _launch(kernel: Launch, n: int, *arguments: Any) -> None:
    """Launch a kernel with a lane for each of n entries."""
    if n:
        kernel((triton.cdiv(n, LANES),), arguments, (LANES,))
