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

import numpy as np
import torch
from torch import Tensor

from recapp.engine.dynamic_keys import ExactCounter, KeyCounter, SketchCounter
from recapp.kernels.backend import Backend
from recapp.kernels.reference import SortedIndex
from recapp.kernels.row_memory import RowMemory
from recapp.sparse.transfer import to_host, true_indices
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

    `changes` has the counts of each strip. A checkpoint stores the tensors of `tracked` with the
    rows.
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
        self.changes = [Changes() for _ in settings]
        self.rows_IR = np.zeros((len(settings), STRETCHES), np.int64)
        self._decides = any(s.max_rows is not None or s.seen > 1 for s in settings)
        self._most_IR = np.array(
            [[s.most_rows(stretch) or 0 for stretch in range(STRETCHES)] for s in settings]
        )
        self._tracks = any(s.tracks_use for s in settings)
        capacity = index.positions.capacity if self._tracks else 0
        self.last_used = RowMemory(capacity, 1, torch.int32, device)
        self.uses = RowMemory(capacity, 1, torch.int32, device)
        self.counters = [_counter(s, stretches, backend, device) for s in settings]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the memory for admission and eviction."""
        counters = sum(c.nbytes for c in self.counters if c)
        return self.last_used.nbytes + self.uses.nbytes + counters

    def tracked(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the tensor, by slot, of each value that eviction keeps per row."""
        if self._tracks:
            yield "last_used", self.last_used.rows
            yield "uses", self.uses.rows

    def forget(self, strip: int, slot_N: Tensor) -> None:
        """Forget the counts of a strip and the use of its rows, which are in these slots."""
        self.rows_IR[strip] = 0
        self.release(slot_N)
        counter = self.counters[strip]
        if counter is not None:
            counter.clear()

    def begin(self, slot_M: Tensor | slice, step: int) -> None:
        """Mark slots as rows whose first use is this step."""
        if self._tracks:
            self.last_used.rows[slot_M] = step + 1
            self.uses.rows[slot_M] = 1

    def count_in(self, strip: int, position_N: Tensor) -> None:
        """Add rows to the count of a strip."""
        stretch_N = stretches_of(position_N)
        self.rows_IR[strip] += to_host(torch.bincount(stretch_N, minlength=STRETCHES)).numpy()

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
        self, slot_U: Tensor, position_U: Tensor, strip_U: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """Decide which new keys of a step get rows.

        Args:
            slot_U: The slots that the index has given the keys.
            position_U: The positions of the keys, distinct within a strip.
            strip_U: The strips of the keys.
            step: The number of updates so far.

        Returns:
            Whether each key is admitted, and the slots of the rows that are evicted for them.
        """
        admitted_U = torch.ones_like(slot_U, dtype=torch.bool)
        evicted = [slot_U[:0]]
        stretch_U = stretches_of(position_U)
        if self._decides:
            for number, settings in enumerate(self.settings):
                own_K = true_indices(strip_U == number)
                self.changes[number].new += len(own_K)
                counter = self.counters[number]
                if counter is not None and len(own_K):
                    often_K = counter.count(position_U[own_K]) >= settings.seen
                    admitted_U[own_K] = often_K
                    own_K = own_K[often_K]
                if settings.max_rows is not None and len(own_K):
                    out_K, gone = self._make_room(number, position_U[own_K], stretch_U[own_K], step)
                    admitted_U[own_K[out_K]] = False
                    own_K = own_K[~out_K]
                    evicted.append(gone)
                if counter is not None and len(own_K):
                    counter.forget(position_U[own_K])
        else:
            for number, new in enumerate(
                torch.bincount(strip_U, minlength=len(self.settings)).tolist()
            ):
                self.changes[number].new += new
        at_N = (strip_U.long() * STRETCHES + stretch_U)[admitted_U]
        added_IR = to_host(torch.bincount(at_N, minlength=self.rows_IR.size)).numpy()
        self.rows_IR += added_IR.reshape(self.rows_IR.shape)
        for changes, more in zip(
            self.changes, added_IR.reshape(len(self.settings), -1).sum(1).tolist(), strict=True
        ):
            changes.admitted += more
        return admitted_U, torch.cat(evicted)

    def _make_room(
        self, strip: int, position_K: Tensor, stretch_K: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """Evict rows of a strip from the stretches in which the new rows exceed the limit.

        Returns:
            Which new rows find no room, and the slots of the evicted rows.
        """
        out_K = torch.zeros_like(stretch_K, dtype=torch.bool)
        gone = [stretch_K[:0]]
        new_R = to_host(torch.bincount(stretch_K, minlength=STRETCHES)).numpy()
        most_R = self._most_IR[strip]
        over_R = self.rows_IR[strip] + new_R - most_R
        for stretch in np.flatnonzero((over_R > 0) & (new_R > 0)).tolist():
            over = int(over_R[stretch])
            slot_E = self.index.slots_of_stretch(stretch, strip)
            slot_E = slot_E[self.last_used.rows[slot_E, 0] != step + 1]
            at_once = max(over, int(most_R[stretch]) // EVICTED_AT_ONCE)
            leaving_E = self._first_to_leave(strip, slot_E, at_once)
            self._left(strip, leaving_E)
            gone.append(leaving_E)
            # a loaded table may have more rows than its limit
            surplus = min(over - len(leaving_E), int(new_R[stretch]))
            if surplus > 0:
                here_K = true_indices(stretch_K == stretch)
                out_K[here_K[position_K[here_K].argsort()[len(here_K) - surplus :]]] = True
        return out_K, torch.cat(gone)

    def _first_to_leave(self, strip: int, slot_E: Tensor, most: int) -> Tensor:
        """Return the `most` slots that are evicted first. Among equal rows the position decides."""
        order_E = self.index.positions.rows[slot_E, 0].argsort()
        keys = [self.last_used.rows[slot_E, 0]]
        if self.settings[strip].eviction is Eviction.LFU:
            keys.append(self.uses.rows[slot_E, 0])
        for key_E in keys:
            order_E = order_E[key_E[order_E].argsort(stable=True)]
        return slot_E[order_E[:most]]

    def _left(self, strip: int, slot_E: Tensor) -> None:
        """Subtract rows from the count of a strip, and release their slots."""
        stretch_E = stretches_of(self.index.positions.rows[slot_E, 0])
        self.rows_IR[strip] -= to_host(torch.bincount(stretch_E, minlength=STRETCHES)).numpy()
        self.release(slot_E)
        self.changes[strip].evicted += len(slot_E)

    def expired(self, step: int) -> Tensor:
        """Return the slots of rows that no step has used for their time to live, and subtract these
        rows from the counts.

        The search runs `SWEEPS` times per time to live.
        """
        slots = [torch.zeros(0, dtype=torch.int64, device=self.last_used.rows.device)]
        for number, settings in enumerate(self.settings):
            life = settings.ttl_steps
            if life is None or step % max(1, life // SWEEPS):
                continue
            last_S = self.last_used.rows[: self.last_used.held, 0]
            slot_E = true_indices((last_S != NOT_HELD) & (last_S <= step - life))
            slot_E = slot_E[self.index.strips.rows[slot_E, 0] == number]
            self._left(number, slot_E)
            slots.append(slot_E)
        return torch.cat(slots)

    def surplus(self) -> Tensor:
        """Return the slots of rows beyond `max_rows`, and subtract these rows from the counts. A
        loaded table has such rows where `max_rows` was lowered after its checkpoint was written.
        """
        slots = [torch.zeros(0, dtype=torch.int64, device=self.last_used.rows.device)]
        for number, settings in enumerate(self.settings):
            if settings.max_rows is None:
                continue
            over_R = self.rows_IR[number] - self._most_IR[number]
            for stretch in np.flatnonzero(over_R > 0).tolist():
                slot_E = self.index.slots_of_stretch(stretch, number)
                slot_E = slot_E[self.last_used.rows[slot_E, 0] != NOT_HELD]
                leaving_E = self._first_to_leave(number, slot_E, int(over_R[stretch]))
                self._left(number, leaving_E)
                slots.append(leaving_E)
        return torch.cat(slots)

    def release(self, slot_M: Tensor) -> None:
        """Record that slots hold no rows any more."""
        if self._tracks:
            self.last_used.rows[slot_M] = NOT_HELD

    def waiting_of_stretches(self, strip: int) -> list[int]:
        """Return the number of keys with an exact count in each stretch."""
        counter = self.counters[strip]
        return counter.keys_of_stretches() if isinstance(counter, ExactCounter) else [0] * STRETCHES


def _counter(
    settings: DynamicRows, stretches: Sequence[int], backend: Backend, device: torch.device
) -> KeyCounter | None:
    """Return the counter of a table's keys without rows; None where the first step gives a row."""
    if settings.seen == 1:
        return None
    if settings.counter is Counter.SKETCH:
        return SketchCounter(settings.sketch_width, device)
    return ExactCounter(stretches, backend, device)
