"""Blocks of dynamic tables in a checkpoint: rows in the order of their positions.

    rows of stretch 0, of stretch 1, ..., of stretch 63     numbered 0 .. N - 1 over all ranks

So the rows of every strip are a range of numbers. A stored table has N rows, as a static table has,
and a tensor `keys` in addition to its weights. The manifest has the number of rows of each stretch,
so any plan and any number of ranks loads the table.

The slots of keys in memory that grows. An index finds the slot of a key. Slots that were used
before are given out first.

Counters of dynamic keys without rows: exact counts, or a count-min sketch. Both count the steps
that saw a key, for the keys of a strip.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recapp.engine.row_average import RowsToWrite
from recapp.errors import CheckpointError
from recapp.kernels.backend import Backend
from recapp.kernels.batch_arrays import INDEX_NUMBERS
from recapp.kernels.row_memory import RowMemory, most_bytes
from recapp.sharding.layout import Block, Piece
from recapp.sparse.transfer import start_to_host, to_device, to_host, true_indices
from recapp.tables.config import EmbeddingConfig
from recapp.tables.positions import (
    SKETCH_LINES,
    STRETCHES,
    DynamicRows,
    keys_of,
    positions_of,
    stretches_of,
)

# The tensor of a dynamic table that holds the key of each row, [N, 1].
KEYS = "keys"
ROWS = "rows"
WAITING = "waiting"
# The tensors that prediction needs. Only training needs the others.
ALWAYS_LOADED = ("weight", KEYS)
WAITING_COUNTS = "waiting_counts"
SKETCH = "sketch"
# The tensors of admission and eviction. Where a checkpoint lacks them, they start empty.
OF_ADMISSION = ("last_used", "uses", "waiting_keys", WAITING_COUNTS, SKETCH)
# By table: the number of `rows` and of `waiting` keys in each of the 64 stretches. A waiting key is
# counted until it was seen often enough for a row.
RowsOfStretches = dict[str, dict[str, list[int]]]


class DynamicStrip(NamedTuple):
    """A strip of a dynamic table, in the view of its store.

    Args:
        table: The table.
        cols: The columns of the strip in the table.
        pieces: The pieces of the strip that the rank holds.
        key: The number of the strip's first stretch among the stretches of all strips of the group.
        seed: Seed of the start values.
    """

    table: EmbeddingConfig
    cols: range
    pieces: list[Piece]
    key: int
    seed: int

    @property
    def settings(self) -> DynamicRows:
        """Return the table's settings of admission and eviction."""
        assert self.table.dynamic is not None
        return self.table.dynamic


class Numbered(NamedTuple):
    """The numbers of a piece's rows among the rows of its table.

    Args:
        total: The number of rows of the table.
        rows: The numbers of the piece's rows.
    """

    total: int
    rows: range

    @staticmethod
    def of(rows_R: list[int], piece: Piece) -> "Numbered":
        """Return the numbers of a piece's rows, from the number of rows in each stretch."""
        first = sum(rows_R[: piece.rows.start])
        count = sum(rows_R[piece.rows.start : piece.rows.stop])
        return Numbered(sum(rows_R), range(first, first + count))


def merge_rows_of_stretches(
    into: RowsOfStretches, more: Mapping[str, Mapping[str, list[int]]]
) -> None:
    """Add the stretches of another strip or rank. A stretch that both hold has the same numbers in
    both.
    """
    for table, counts in more.items():
        counts_of_table = into.setdefault(table, {})
        for name, count_R in counts.items():
            before = counts_of_table.get(name, [0] * len(count_R))
            counts_of_table[name] = [max(pair) for pair in zip(before, count_R, strict=True)]


def without_waiting(rows_of_stretches: RowsOfStretches) -> RowsOfStretches:
    """Return the numbers of rows without the numbers of waiting keys."""
    return {t: {ROWS: c[ROWS], WAITING: [0] * STRETCHES} for t, c in rows_of_stretches.items()}


BEFORE, PASSING, NEXT = map(INDEX_NUMBERS.index, ("before", "passing", "next"))
STEPS_AHEAD = 3  # whose entries find room when memory grows: the count comes back in the meantime
MOST_SLOTS = 2**31 - 2  # an index holds slots in 32 bits
NO_LIMIT = 2**62  # keys
ANY_NUMBER = 2**61  # of keys: for so many there is room only where there is no limit


def most_slots(device: torch.device, bytes_of_slot: int) -> int:
    """Return the largest number of slots of a size in the memory of a device."""
    return min(MOST_SLOTS, most_bytes(device) // bytes_of_slot)


class KeySlots:
    """The slots of the keys of some strips.

    Args:
        stretches: The stretches of positions in which keys may lie.
        capacity: The largest number of slots.
        backend: Kernels.
        device: Device of positions and slots.

    `index` finds slots, by position and strip. `free` are the slots that were given back, which are
    given out first. `unadmitted` are those of keys that get no row in this step, which are given
    back at its end.

    In a step of which the host learns no number (`expect`), new keys take the same slots, and the
    device counts the keys (`DeviceKeyIndex.numbers`). The host knows how many there are at most:
    the count that it has read last, and the entries of the steps since. It reads the count, without
    waiting, before the room comes to an end. Whoever needs the exact number asks for `used`, after
    which `free`, too, is exact. Unadmitted keys then have slots behind all used ones and are not in
    the index, because nobody asks for them again in most steps: `passes` tells that there may be
    such keys. Where somebody asks, they get into the index before.

    `limit` is the number of keys up to which new ones find room in every part of the tables
    (`Admission.room`): parts have more rows only where there are more keys, or the host decides.
    Keys that go may be of other parts than the fullest one, so they take their number from it.
    """

    def __init__(
        self, stretches: Sequence[int], capacity: int, backend: Backend, device: torch.device
    ) -> None:
        self.index: Any = backend.key_index(stretches, capacity, device)
        self.limit = NO_LIMIT
        self._used = 0
        self._taken = 0  # the most keys that are new since, as only the device knows
        self._expected = 0  # the entries of all steps
        # numbers of the index on their way to the host, the event at their arrival, and `_expected`
        self._late: tuple[list[Tensor], Any, int] | None = None
        self.free = torch.zeros(0, dtype=torch.int64, device=device)
        self.unadmitted: list[Tensor] = []
        self.passes = False
        self._loading: list[tuple[int, Piece, Tensor, Tensor]] = []
        self.memories = self.index.positions, self.index.strips

    @property
    def nbytes(self) -> int:
        """Return the bytes of the index with its positions and strips."""
        return int(self.index.nbytes + sum(memory.nbytes for memory in self.memories))

    @property
    def used(self) -> int:
        """The number of slots that memory must hold: each was given out at least once. The host
        waits for it, if only the device knows it.
        """
        if self._taken:
            numbers = to_host(self.index.numbers).tolist()
            new = numbers[NEXT] - self._keys
            self.index.count(new)
            self._used = max(self._used, numbers[NEXT])
            self.free = self.free[new:]
            self._taken = 0
            self._late = None
            if self.passes:
                self.passes = False
                slot_M = self.behind(numbers[PASSING])
                self._used += len(slot_M)
                self.unadmitted.append(slot_M)
                keys = (memory.rows[slot_M, 0] for memory in self.memories)
                self.index.find_or_insert(*keys, partial(slot_M.narrow, 0, 0))
        return self._used

    @property
    def _keys(self) -> int:
        """The number of keys, without those that are new since the host was told."""
        return self._used - len(self.free)

    @property
    def most(self) -> int:
        """The largest number of keys that there may be, for which the host does not wait."""
        if self._late is not None and (self._late[1] is None or self._late[1].query()):
            (numbers,), _, expected = self._late
            self._taken = numbers.tolist()[NEXT] - self._keys + self._expected - expected
            self._late = None
        return self._keys + self._taken

    def has_room(self, n: int) -> bool:
        """Return whether n keys get rows if they are new, so that nobody has to choose."""
        return self.most + n <= self.limit

    def expect(self, n: int, grow: Callable[[int], None]) -> None:
        """Make room for n keys, each of which may be new, ahead of a step that tells the host
        nothing. Where memory for so many cannot be had, wait for the exact number.

        Args:
            n: The number of entries.
            grow: A function that makes room for rows in a number of slots.
        """
        keys = self.most
        most = max(self._used, keys)
        ahead = STEPS_AHEAD * n
        if most + n > self.index.positions.held:
            try:
                self.make_room(most + ahead, grow)
            except (MemoryError, torch.OutOfMemoryError):
                self.make_room(self.used + n, grow)
        if not self._taken:  # only now the host may know other numbers than the device
            stack = self.free.data_ptr() - self.free.itemsize * self._keys
            told = [self._keys, self._used, stack]
            self.index.numbers[NEXT:] = to_device(told, self.free.device)
        self.index.make_room(self._taken + n)
        self._taken += n
        if self._late is None and (
            most + ahead > self.index.positions.held or keys + ahead > self.limit
        ):
            self._late = *start_to_host([self.index.numbers]), self._expected
        self._expected += n

    def find_or_insert(self, position_N: Tensor, strip_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slot of each key, after giving free slots to keys that have none, and the
        first entry of each such key. Arguments as for the index.
        """
        self.make_room(self.used)  # keys that pass get into the index
        slot_N, first_U = self.index.find_or_insert(position_N, strip_N, self._next)
        again = min(len(first_U), len(self.free))
        self.free = self.free[again:]
        self._used += len(first_U) - again
        return slot_N, first_U

    def _next(self, n: int) -> Tensor:
        """Return the n slots that are given out next. They stay free."""
        again = self.free[:n]
        new = n - len(again)
        self.make_room(self.used + new)
        return torch.cat([again, self.behind(new)]) if len(again) else self.behind(new)

    def behind(self, n: int) -> Tensor:
        """Return n consecutive slots behind all used slots. They stay free."""
        return torch.arange(self.used, self.used + n, device=self.free.device)

    def make_room(self, slots: int, grow: Callable[[int], None] = lambda slots: None) -> None:
        """Make room for a number of slots, first for what else there is by slot."""
        grow(slots)
        for memory in self.memories:
            memory.grow(slots)

    def remove(self, slot_M: Tensor) -> None:
        """Remove the keys of distinct slots, which are given out again."""
        if len(slot_M) and self.used:  # which tells what is free
            self.index.remove(slot_M)
            self.free = torch.cat([slot_M, self.free])
            self.limit -= len(slot_M)

    # ---- checkpoints

    def of_pieces(
        self, strip: int, pieces: Sequence[Piece], left_out: Tensor
    ) -> Iterator[tuple[Piece, Tensor, Tensor]]:
        """Yield each piece of a strip, the slots of its keys in the order of their positions, and
        the keys, [N, 1].

        Args:
            strip: The number of the strip.
            pieces: The pieces.
            left_out: Slots of keys that are left out.
        """
        slot_N = self.index.slots_of(strip)
        slot_N = slot_N[~torch.isin(slot_N, left_out)]
        stretch_N = stretches_of(self.index.positions.rows[slot_N, 0])
        for p in pieces:
            held_N = slot_N[(stretch_N >= p.rows.start) & (stretch_N < p.rows.stop)]
            yield p, held_N, keys_of(self.index.positions.rows[held_N])

    def begin_load(self) -> None:
        """Forget the slots of a load that did not end. Without keys, make all slots free."""
        self._loading = []
        if self.used and not len(self.index):
            self.limit -= self._keys
            self._used = 0
            self.free = self.free[:0]

    def load(self, strip: int, piece: Piece, n: int) -> tuple[slice, Tensor]:
        """Take n consecutive slots for the keys of a piece. Return them, and memory for the keys,
        [n, 1], which the caller fills before `loaded`.
        """
        slot_N = self.behind(n)
        self._used += n
        self.make_room(self._used)
        key_N1 = torch.zeros(n, 1, dtype=torch.int64, device=slot_N.device)
        self._loading.append((strip, piece, slot_N, key_N1))
        return slice(self._used - n, self._used), key_N1

    def loaded(self, tables: Sequence[str]) -> Iterator[tuple[int, Tensor]]:
        """Put the loaded keys into the index. Yield the strip and the positions of each piece.

        Args:
            tables: The table of each strip, for errors.

        Raises:
            CheckpointError: A key occurs twice or lies in a stretch where it does not belong.
        """
        for strip, p, slot_N, key_N1 in self._loading:
            position_N = positions_of(key_N1[:, 0])
            stretch_N = stretches_of(position_N)
            inside = bool(((stretch_N >= p.rows.start) & (stretch_N < p.rows.stop)).all())
            if not inside or bool((position_N[1:] <= position_N[:-1]).any()):
                raise CheckpointError(
                    f"table {tables[strip]}: the stored keys are not in the order of their "
                    "positions: the checkpoint is damaged; use another one"
                )
            if len(slot_N):
                strip_N = torch.full_like(position_N, strip, dtype=torch.int16)
                self.index.find_or_insert(position_N, strip_N, partial(slot_N.narrow, 0, 0))
                yield strip, position_N
        self._loading = []


# odd numbers, one for each line: the first fractional bits of the square roots of primes
_LINE_MULTIPLIERS = (
    0x6A09E667F3BCC909,
    0x3C6EF372FE94F82B,
    0x510E527FADE682D1,
    0x1F83D9ABFB41BD6B,
)
_BYTES_OF_A_COUNT = 20  # at least, with the index


class ExactCounter:
    """A count for each key of some strips that was seen and has no row.

    Args:
        stretches: The stretches whose rows the store may hold.
        backend: Kernels.
        device: Device of the counts.

    Where the device gives a key its row without telling the host, the key stays in the index with a
    count of 0, as if it were gone.
    """

    def __init__(self, stretches: Sequence[int], backend: Backend, device: torch.device) -> None:
        capacity = most_slots(device, _BYTES_OF_A_COUNT)
        self.slots = KeySlots(stretches, capacity, backend, device)
        self.counts = RowMemory(capacity, 1, torch.int32, device)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the counts and their index."""
        return self.slots.nbytes + self.counts.nbytes

    def count(self, position_U: Tensor, strip_U: Tensor) -> Tensor:
        """Add one to the count of each distinct key, and return the counts."""
        slot_U, first_M = self.slots.find_or_insert(position_U, strip_U)
        self.counts.grow(self.slots.used)
        self.counts.rows[slot_U[first_M]] = 0
        self.counts.rows[slot_U] += 1
        return self.counts.rows[slot_U, 0]

    def forget(self, position_U: Tensor, strip_U: Tensor) -> None:
        """Forget the counts of some keys, all of which have a count."""
        self.slots.remove(self.slots.index.find(position_U, strip_U))

    def clear(self, strip: int) -> None:
        """Forget the counts of a strip."""
        self.slots.remove(self.slots.index.slots_of(strip))

    def keys_of_stretches(self, strip: int) -> list[int]:
        """Return the number of counted keys of a strip in each stretch."""
        index = self.slots.index
        slot_N = index.slots_of(strip)
        slot_N = slot_N[true_indices(self.counts.rows[slot_N, 0] > 0)]
        stretch_N = stretches_of(index.positions.rows[slot_N, 0])
        counted: list[int] = torch.bincount(stretch_N, minlength=STRETCHES).tolist()
        return counted

    def blocks(
        self, number: int, strip: DynamicStrip, waiting_R: list[int], owner: bool
    ) -> Iterator[Block]:
        """Yield the keys and counts of every piece of a strip, for a checkpoint to write.

        Args:
            number: The number of the strip.
            strip: The strip.
            waiting_R: The number of counted keys in each stretch, over all ranks.
            owner: Whether this rank writes the blocks.
        """
        for p, slot_N, key_N1 in self.slots.of_pieces(
            number, strip.pieces, true_indices(self.counts.rows[: self.slots.used, 0] == 0)
        ):
            counts = RowsToWrite.of(self.counts.rows, slot_N)
            yield from _of_waiting(strip, Numbered.of(waiting_R, p), key_N1, counts, owner)

    def begin_load(self, rows: int) -> None:
        """Make room for the counts of a load, because later growth would move yielded ones."""
        self.slots.begin_load()
        self.counts.grow(self.slots.used + rows)

    def blocks_to_load(
        self, number: int, strip: DynamicStrip, waiting_R: list[int], owner: bool
    ) -> Iterator[Block]:
        """Yield blocks for the keys and counts of every piece of a strip, which a checkpoint fills.
        Arguments as for `blocks`.
        """
        for p in strip.pieces:
            numbered = Numbered.of(waiting_R, p)
            here, key_N1 = self.slots.load(number, p, len(numbered.rows))
            yield from _of_waiting(strip, numbered, key_N1, self.counts.rows[here], owner)


class SketchCounter:
    """A count-min sketch of the keys of a strip, one for each stretch of positions.

    Args:
        width: The number of counts in each line, over all stretches.
        device: Device of the counts.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self.width = width // STRETCHES
        shape = (STRETCHES, SKETCH_LINES * self.width)
        self.counts_RC = torch.zeros(shape, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the counts."""
        return self.counts_RC.nbytes

    def _cells(self, position_U: Tensor) -> Tensor:
        """Return the indices of each key's counts, [lines, U]."""
        first_U = stretches_of(position_U) * self.counts_RC.shape[1]
        lines = [
            first_U + line * self.width + ((position_U * odd >> 33) & 0x7FFFFFFF) % self.width
            for line, odd in enumerate(_LINE_MULTIPLIERS)
        ]
        return torch.stack(lines)

    def count(self, position_U: Tensor) -> Tensor:
        """Add one to the count of each distinct key, and return upper bounds of the counts."""
        cell_LU = self._cells(position_U)
        flat = self.counts_RC.view(-1)
        one = torch.ones(cell_LU.numel(), dtype=torch.int32, device=flat.device)
        flat.index_add_(0, cell_LU.view(-1), one)
        return flat[cell_LU].amin(0)

    def clear(self, strip: int) -> None:
        """Forget all counts."""
        self.counts_RC.zero_()

    def blocks(
        self, number: int, strip: DynamicStrip, waiting_R: list[int], owner: bool
    ) -> Iterator[Block]:
        """Yield the counts of the stretches of every piece."""
        shape = (STRETCHES, self.counts_RC.shape[1])
        for p in strip.pieces:
            data = self.counts_RC[p.rows.start : p.rows.stop]
            yield Block(strip.table.name, SKETCH, shape, p.rows, range(shape[1]), data, owner)

    # they are views, which a checkpoint fills
    blocks_to_load = blocks


def _of_waiting(
    strip: DynamicStrip, numbered: Numbered, key_N1: Tensor, count_N1: Any, owner: bool
) -> Iterator[Block]:
    """Yield the blocks of counted keys."""
    total, rows = numbered
    for tensor, data in (("waiting_keys", key_N1), (WAITING_COUNTS, count_N1)):
        yield Block(strip.table.name, tensor, (total, 1), rows, range(1), data, owner)


KeyCounter = ExactCounter | SketchCounter
