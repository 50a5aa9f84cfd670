"""Decide which keys of dynamic tables get rows, and which rows are evicted.

    absent key --counted--> seen often enough? --room in its stretch?--> admitted, others evicted

A key counts once per step (a step ends with an update), however often and wherever it occurs. Each
of the 64 stretches of positions has its own limit of rows and evicts its own rows. No plan cuts a
stretch, so decisions depend on neither the plan nor the number of ranks. Rows that the step uses
stay. Where the rows of the step fill a stretch, the new keys with the smallest positions are
admitted first, and the other keys keep their counts.

A full stretch evicts a sixteenth of its rows at once. Otherwise every new key would search the rows
of its stretch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recapp.engine.dynamic_keys import NO_LIMIT, ExactCounter, KeyCounter, SketchCounter
from recapp.kernels.backend import Backend
from recapp.kernels.reference import SortedIndex
from recapp.kernels.row_memory import RowMemory
from recapp.sparse.transfer import to_device, to_host, true_indices
from recapp.tables.positions import STRETCHES, Counter, DynamicRows, Eviction, stretches_of

NOT_HELD = 0  # last use of a slot that holds no row; steps of other slots count from 1
EVICTED_AT_ONCE = 16  # a full stretch evicts 1 / EVICTED_AT_ONCE of its rows
SWEEPS = 8  # searches for expired rows in one time to live: more searches find their end sooner


@dataclass
class Changes:
    """Count the new, admitted and evicted keys of a table.

    Args:
        new: Keys without a row in training steps. A key counts once per step.
        admitted: Keys that got a row.
        evicted: Rows that left: for new keys, after their time to live, or beyond `max_rows`.
    """

    new: int = 0
    admitted: int = 0
    evicted: int = 0

    def __add__(self, other: "Changes") -> "Changes":
        return Changes(
            self.new + other.new, self.admitted + other.admitted, self.evicted + other.evicted
        )


class Admission:
    """Decide which keys of one store get rows, and which rows are evicted.

    Args:
        settings: The settings of each strip's table.
        index: The index that finds the rows of the store.
        stretches: The stretches whose rows the store may hold.
        backend: Kernels.
        device: Device of the rows.

    All strips are treated together: a *part* is a stretch of a strip, and the letter A counts
    parts. On a GPU the numbers stay there, and the host reads whether any part is over its limit. A
    checkpoint stores the tensors of `tracked` with the rows. In a step in which the host has no
    part in decisions, a GPU counts new keys in both of `added`, those that wait for their rows in
    `counting`, and the use of rows in `of_use`. With a limit, this is a step of at most `room`
    keys, as long as no key got a row since the host has read the `room` of the fullest part.
    """

    def __init__(
        self,
        settings: Sequence[DynamicRows],
        index: SortedIndex,
        stretches: Sequence[int],
        backend: Backend,
        device: torch.device,
    ) -> None:
        self.settings = list(settings)
        self.index = index
        counts = torch.zeros(4, len(settings) * STRETCHES, dtype=torch.int64, device=device)
        self._new_A, self._admitted_A, self._evicted_A, self._loaded_A = self._counts_4A = counts
        self.added = self._new_A, self._admitted_A
        most_A = [s.most_rows(stretch) for s in settings for stretch in range(STRETCHES)]
        self._limits = any(most is not None for most in most_A)
        self.room = min(NO_LIMIT if most is None else most for most in most_A)
        self._most_A = to_device([NO_LIMIT if most is None else most for most in most_A], device)
        self._seen_I = to_device([s.seen for s in settings], device)
        self._by_uses_I = to_device([s.eviction is Eviction.LFU for s in settings], device)
        self._loaded = False
        self._tracks = any(s.tracks_use for s in settings)
        capacity = index.positions.capacity if self._tracks else 0
        self.last_used = RowMemory(capacity, 1, torch.int32, device)
        self.uses = RowMemory(capacity, 1, torch.int32, device)
        exact_I = [s.seen > 1 and s.counter is Counter.EXACT for s in settings]
        self._exact_I = to_device(exact_I, device)
        self.exact = ExactCounter(stretches, backend, device) if any(exact_I) else None
        self.sketches = {
            strip: SketchCounter(s.sketch_width, device)
            for strip, s in enumerate(settings)
            if s.seen > 1 and s.counter is Counter.SKETCH
        }

    @property
    def nbytes(self) -> int:
        """Return the bytes of the memory for admission and eviction."""
        counters = sum(sketch.nbytes for sketch in self.sketches.values())
        counters += self.exact.nbytes if self.exact else 0
        return self.last_used.nbytes + self.uses.nbytes + counters

    @property
    def counting(self) -> tuple[Tensor, ...]:
        """Return the arrays by which a GPU counts keys that wait for their rows, if any does."""
        if self.exact is None:
            return ()
        rows = [memory.rows for memory in (*self.exact.slots.memories, self.exact.counts)]
        return self.exact.slots.index.numbers, *rows, self._seen_I

    @property
    def of_use(self) -> tuple[Tensor, ...]:
        """Return the arrays by slot in which a GPU notes the use of rows, if eviction needs it."""
        return tuple(rows for _, rows in self.tracked())

    @property
    def changes(self) -> list[Changes]:
        """Return the counts of each strip."""
        counts_3I = self._counts_4A[:3].view(3, -1, STRETCHES).sum(2)
        return [Changes(*counts) for counts in to_host(counts_3I).T.tolist()]

    @property
    def rows_IR(self) -> Tensor:
        """Return the number of rows in each stretch of each strip."""
        rows_A: Tensor = self._admitted_A + self._loaded_A - self._evicted_A
        return rows_A.view(-1, STRETCHES)

    def tracked(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the tensor, by slot, of each value that eviction keeps per row."""
        if self._tracks:
            yield "last_used", self.last_used.rows
            yield "uses", self.uses.rows

    def counter(self, strip: int) -> KeyCounter | None:
        """Return the counter of a strip's keys without rows; None where the first step gives a
        row. All exact counts are in one counter.
        """
        settings = self.settings[strip]
        exact = settings.seen > 1 and settings.counter is Counter.EXACT
        return self.exact if exact else self.sketches.get(strip)

    def forget(self, strip: int) -> None:
        """Forget the counts of a strip, whose rows are gone."""
        self._loaded_A.view(-1, STRETCHES)[strip] -= self.rows_IR[strip]
        if counter := self.counter(strip):
            counter.clear(strip)

    def begin(self, slot_M: Tensor | slice, step: int) -> None:
        """Mark slots as rows whose first use is this step."""
        if self._tracks:
            self.last_used.rows[slot_M] = step + 1
            self.uses.rows[slot_M] = 1

    def count_in(self, strip: int, position_N: Tensor) -> None:
        """Add loaded rows to the count of a strip."""
        part_N = _parts_of(torch.full_like(position_N, strip), position_N)
        self._loaded_A.index_add_(0, part_N, torch.ones_like(part_N))
        self._loaded = True

    def grow(self, slots: int) -> None:
        """Make room for a number of slots."""
        if self._tracks:
            self.last_used.grow(slots)
            self.uses.grow(slots)

    def note_use(self, slot_N: Tensor, step: int) -> None:
        """Record that a step uses rows."""
        if not self._tracks:
            return
        last_S = self.last_used.rows.view(-1)
        uses_S = self.uses.rows.view(-1)
        again_N = last_S.index_select(0, slot_N) != step + 1
        last_S.index_fill_(0, slot_N, step + 1)
        # duplicate slots all write the same number
        uses_S.index_copy_(0, slot_N, uses_S.index_select(0, slot_N) + again_N)

    def decide(
        self, position_U: Tensor, strip_U: Tensor, step: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Decide which new keys of a step get rows.

        Args:
            position_U: The positions of the keys, distinct within a strip.
            strip_U: The strips of the keys.
            step: The number of updates so far.

        Returns:
            Whether each key is admitted, and the slots of the rows that are evicted for them; None
            where every key is admitted, and where no row is evicted.
        """
        part_U = _parts_of(strip_U, position_U)
        one_U = torch.ones_like(part_U)
        self._new_A.index_add_(0, part_U, one_U)
        admitted_U = evicted_E = None
        if self.exact or self.sketches:
            admitted_U = self._seen_often(position_U, strip_U)
        if self._limits:
            wanted_U = one_U if admitted_U is None else admitted_U.long()
            added_A = torch.zeros_like(self._most_A).index_add_(0, part_U, wanted_U)
            room_A = self._most_A - self.rows_IR.view(-1) - added_A
            (self.room,) = to_host(room_A.amin(0, keepdim=True)).tolist()
            if self.room < 0:
                over_A = torch.where(added_A > 0, -room_A, 0)
                admitted_U = wanted_U > 0
                evicted_E = self._make_room(over_A, added_A, position_U, part_U, admitted_U, step)
        if self.exact and admitted_U is not None:
            counted_M = true_indices(admitted_U & self._exact_I[strip_U.long()].bool())
            self.exact.forget(position_U[counted_M], strip_U[counted_M])
        added_U = one_U if admitted_U is None else admitted_U.long()
        self._admitted_A.index_add_(0, part_U, added_U)
        return admitted_U, evicted_E

    def _seen_often(self, position_U: Tensor, strip_U: Tensor) -> Tensor:
        """Count new keys, and return whether each was seen often enough for a row."""
        seen_U = self._seen_I[strip_U.long()]
        count_U = seen_U.clone()
        if self.exact:
            own_M = true_indices(self._exact_I[strip_U.long()] > 0)
            count_U[own_M] = self.exact.count(position_U[own_M], strip_U[own_M]).long()
        for strip, sketch in self.sketches.items():
            own_M = true_indices(strip_U == strip)
            count_U[own_M] = sketch.count(position_U[own_M]).long()
        return count_U >= seen_U

    def _make_room(
        self,
        over_A: Tensor,
        added_A: Tensor,
        position_U: Tensor,
        part_U: Tensor,
        admitted_U: Tensor,
        step: int,
    ) -> Tensor:
        """Evict rows from the parts in which new rows exceed the limit, and refuse the new rows
        that find no room.

        Args:
            over_A: The number of rows above the limit of each part; of no interest below 1.
            added_A: The number of new rows.
            position_U: The positions of the new keys.
            part_U: The parts of the new keys.
            admitted_U: Whether each new key is admitted; set to false for the refused ones.
            step: The number of updates so far.

        Returns:
            The slots of the evicted rows.
        """
        over_A = over_A.clamp(min=0)
        at_once_A = torch.maximum(over_A, self._most_A // EVICTED_AT_ONCE)
        evicted_E, left_A = self._evict(torch.where(over_A > 0, at_once_A, 0), step + 1)
        # a loaded table may have more rows than its limit
        surplus_A = torch.minimum(over_A - left_A, added_A)
        refused_K = true_indices(admitted_U & (surplus_A > 0)[part_U])
        last_K = _first_of_parts(part_U[refused_K], [~position_U[refused_K]], surplus_A)
        admitted_U[refused_K[last_K]] = False
        return evicted_E

    def _evict(self, most_A: Tensor, kept: int) -> tuple[Tensor, Tensor]:
        """Evict rows of some parts. Among equal rows the position decides.

        Args:
            most_A: The number of rows to evict from each part, if it has so many.
            kept: The last use of rows that stay.

        Returns:
            The slots of the rows, and the number of evicted rows in each part.
        """
        slot_E = self.index.slots_of_stretches((most_A > 0).view(-1, STRETCHES))
        slot_E = slot_E[true_indices(self.last_used.rows[slot_E, 0] != kept)]
        strip_E = self.index.strips.rows[slot_E, 0].long()
        position_E = self.index.positions.rows[slot_E, 0]
        uses_E = self.uses.rows[slot_E, 0] * self._by_uses_I[strip_E]
        keys = [position_E, self.last_used.rows[slot_E, 0], uses_E]
        slot_E = slot_E[_first_of_parts(_parts_of(strip_E, position_E), keys, most_A)]
        return slot_E, self._left(slot_E)

    def _left(self, slot_E: Tensor) -> Tensor:
        """Subtract rows from the counts, release their slots, and return their number in each
        part.
        """
        rows = self.index.strips.rows[slot_E, 0], self.index.positions.rows[slot_E, 0]
        part_E = _parts_of(*rows)
        left_A = torch.zeros_like(self._most_A).index_add_(0, part_E, torch.ones_like(part_E))
        self._evicted_A += left_A
        self.release(slot_E)
        return left_A

    def expired(self, step: int, stopped: Tensor | None) -> Iterator[Tensor]:
        """Yield the slots of rows that no step has used for their time to live, and subtract these
        rows from the counts. Where the device has `stopped`, there are none.

        The search runs `SWEEPS` times per time to live.
        """
        for number, settings in enumerate(self.settings):
            life = settings.ttl_steps
            if life is None or step % max(1, life // SWEEPS):
                continue
            last_S = self.last_used.rows[: self.last_used.held, 0]
            goes_on = True if stopped is None else stopped == 0
            slot_E = true_indices((last_S != NOT_HELD) & (last_S <= step - life) & goes_on)
            slot_E = slot_E[true_indices(self.index.strips.rows[slot_E, 0] == number)]
            self._left(slot_E)
            yield slot_E

    def surplus(self) -> Iterator[Tensor]:
        """Yield the slots of rows beyond `max_rows`, and subtract these rows from the counts. A
        loaded table has such rows where `max_rows` was lowered after its checkpoint was written.
        """
        if self._loaded and self._limits:
            over_A = self.rows_IR.view(-1) - self._most_A
            yield self._evict(over_A.clamp(min=0), NOT_HELD)[0]
        self._loaded = False

    def release(self, slot_M: Tensor) -> None:
        """Record that slots hold no rows any more."""
        if self._tracks:
            self.last_used.rows[slot_M] = NOT_HELD

    def waiting_of_stretches(self, strip: int) -> list[int]:
        """Return the number of keys with an exact count in each stretch."""
        counter = self.counter(strip)
        if isinstance(counter, ExactCounter):
            return counter.keys_of_stretches(strip)
        return [0] * STRETCHES


def _parts_of(strip_N: Tensor, position_N: Tensor) -> Tensor:
    """Return the number of the part of each key, strip by strip."""
    return stretches_of(position_N).add_(strip_N, alpha=STRETCHES)


def _first_of_parts(part_E: Tensor, keys: Sequence[Tensor], most_A: Tensor) -> Tensor:
    """Return the entries that come first in their part: at most so many of each part.

    Args:
        part_E: The part of each entry.
        keys: The numbers by which the entries of a part are sorted; the last ones come first.
        most_A: The largest number of entries of each part.
    """
    order_E = torch.arange(len(part_E), device=part_E.device)
    for key_E in (*keys, part_E):
        order_E = order_E[key_E[order_E].argsort(stable=True)]
    sorted_E = part_E[order_E]
    first_E = torch.searchsorted(sorted_E, sorted_E)
    nth_E = torch.arange(len(part_E), device=part_E.device) - first_E
    return order_E[true_indices(nth_E < most_A[sorted_E])]
