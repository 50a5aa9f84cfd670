"""Rows of dynamic tables on one rank, found by the positions of their keys.

    position, strip --index--> slot --> weights[slot], state[slot]

`recapp/tables/positions.py` defines keys, positions and stretches. A slot holds one row of any
strip of the group, in memory that grows without moving rows. Rows come and go in the step of a
training batch, never during its look-ahead:

    a key without a row    gets a slot with its start value; it is an *unadmitted key* at first
    admitted               its row stays and trains (`recapp/engine/admission.py` decides)
    unadmitted key         answers its start value and is not trained: its slot is free again after
                           the update
    evicted                its slot is free; a key that comes back starts again without a row

These decisions depend only on the keys of this step and of earlier steps, stretch by stretch. So
they are the same under every plan and number of ranks. A batch that is not trained changes nothing:
a key without a row answers its start value.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from recapp.engine.admission import Admission, Changes
from recapp.engine.dynamic_keys import (
    BEFORE,
    KEYS,
    ROWS,
    WAITING,
    DynamicStrip,
    KeySlots,
    Numbered,
    RowsOfStretches,
    merge_rows_of_stretches,
    most_slots,
)
from recapp.engine.row_average import RowsToWrite
from recapp.engine.row_store import FloatRows, StoreBytes, StoredGroup
from recapp.kernels import row_memory
from recapp.optim.rules import RowRule
from recapp.sharding.layout import Block
from recapp.sparse.transfer import copy_to_device, to_device, true_indices
from recapp.tables.initial import start_hash, write_start_values
from recapp.tables.positions import keys_of, stretches_of


class DynamicStore(FloatRows):
    """The existing rows of dynamic tables in floating point, and the state of their row rule.

    Args:
        group: The strips, and the kernels that compute with them.
        rule: Optimiser of the rows; None for read-only rows.
        seeds: Seed of the start values, by table.
    """

    finds_rows = True

    def __init__(self, group: StoredGroup, rule: RowRule | None, seeds: Mapping[str, int]) -> None:
        super().__init__(group, rule, partial(most_slots, group.device))
        layout = group.layout
        self.strips = [
            DynamicStrip(
                layout.tables[s.table],
                s.cols,
                [p for p in group.pieces if p.strip == i],
                s.key,
                seeds[layout.tables[s.table].name],
            )
            for i, s in enumerate(layout.strips)
            if s.group == group.number
        ]
        stretches = sorted({stretch for s in self.strips for p in s.pieces for stretch in p.rows})
        self.slots = KeySlots(stretches, self.rows, self.backend, group.device)
        self.index = self.slots.index
        self._starts = self._start_numbers()
        self.step = 0
        self._counted = 0  # the steps that the device has counted
        self.admission = Admission(
            [s.settings for s in self.strips], self.index, stretches, self.backend, group.device
        )
        self.slots.limit = self.admission.room

        if group.device.type == row_memory.GPU:  # the first growth tells whether rows stay in place
            for slots, grow in self._growing:
                slots.make_room(1, grow)

    @property
    @override
    def nbytes(self) -> StoreBytes:
        size = super().nbytes
        return size._replace(rows=size.rows + self.slots.nbytes + self.admission.nbytes)

    @override
    def piece_keys(self, row_U: Tensor) -> Tensor:
        key_I = torch.tensor([s.key for s in self.strips], device=row_U.device)
        strip_U = self.index.strips.rows[row_U, 0].long()
        return key_I[strip_U] + stretches_of(self.index.positions.rows[row_U, 0])

    # ---- rows come and go

    @override
    def locate(self, row_N: Tensor, strip_N: Tensor | None = None, trains: bool = False) -> Tensor:
        assert strip_N is not None
        row_N = row_N.long()
        if not (trains and self.trains):
            return self._only_read(row_N, strip_N)
        slot_N, first_U = self.slots.find_or_insert(row_N, strip_N)
        if len(first_U):
            self._grow(self.slots.used)
            slot_U = slot_N[first_U]
            new = slot_U, row_N[first_U], strip_N[first_U]
            self._begin(*new)
            self.admission.begin(slot_U, self.step)
        self.admission.note_use(slot_N, self.step)
        if len(first_U):
            self._admit(*new)
        return slot_N

    @property
    def _growing(self) -> list[tuple[KeySlots, Callable[[int], None]]]:
        """The slots of rows, and those of exact counts, each with what else grows."""
        exact = self.admission.exact
        counts = [] if exact is None else [(exact.slots, exact.counts.grow)]
        return [(self.slots, self._grow), *counts]

    @property
    def adds_unread(self) -> bool:
        """Return whether training steps give rows to new keys without telling the host (`add`):
        rows keep their places in memory, no keys of this step pass, and no sketch counts keys. Near
        a limit of rows the host decides nevertheless (`KeySlots.has_room`).
        """
        return (
            self.trains
            and not self.admission.sketches
            and self._starts is not None
            and self._steps is None
            and self.average is None
            and all(memory.stays for memory in (self._weights, *self._state))
            and all(memory.stays for slots, _ in self._growing for memory in slots.memories)
            and not self.slots.passes
        )

    def expect(self, entries: int) -> None:
        """Make room for the new keys among a number of entries, ahead of `add`."""
        for slots, grow in self._growing:
            slots.expect(entries, grow)
        if self._counted != self.step and self.admission.of_use:
            self.index.numbers[BEFORE] = self.step
        self._counted = self.step + (entries > 0)
        self.slots.passes = self.admission.exact is not None and entries > 0

    def add(
        self,
        row_P: Tensor,
        key_P: Tensor,
        group: Tensor,
        entry: int,
        stopped: Tensor | None = None,
    ) -> None:
        """Replace the positions of entries of a training batch by the slots of their rows. Keys
        that have no row get one, at once or when they were seen often enough. The slots of others
        hold their start values, and no gradient reaches them.

        Args:
            row_P: The positions.
            key_P: The strips; slots behind the first key of the group take their place, or the key
                of no row.
            group: The place of the group in the arrays of the batch, int64 [`GroupPlace`].
            entry: The number of its first entry.
            stopped: An integer: where it is set, no key gets a row, and its entries take any.
        """
        slot_P, *of_entries = self.index.add(
            *(row_P, key_P, group, entry, stopped, self.admission.added, self.admission.counting)
        )
        rows = slot_P, *(memory.rows for memory in self.slots.memories)
        added = *of_entries, self.index.numbers, row_P, key_P, group, stopped
        self.backend.begin_rows(
            *(self._weights.rows, self._starts, rows, added, entry, self.admission.of_use)
        )

    def _only_read(self, position_N: Tensor, strip_N: Tensor) -> Tensor:
        """Return the slots of keys. Keys without a row get slots with start values behind all used
        slots, which the next batch may reuse.
        """
        slot_N: Tensor = self.index.find(position_N, strip_N)
        absent_M = true_indices(slot_N < 0)
        if len(absent_M):
            slot_M = self.slots.behind(len(absent_M))
            self._grow(self.slots.used + len(absent_M))
            self._begin(slot_M, position_N[absent_M], strip_N[absent_M])
            slot_N[absent_M] = slot_M
        return slot_N

    def _admit(self, slot_U: Tensor, position_U: Tensor, strip_U: Tensor) -> None:
        """Keep the rows of admitted keys among those that are new in this step, until they are
        evicted, and note the other ones.
        """
        admitted_U, evicted_E = self.admission.decide(position_U, strip_U, self.step)
        if evicted_E is not None:
            self._free(evicted_E)
        self.slots.limit = self.slots.most + self.admission.room
        if admitted_U is not None:
            self.slots.unadmitted.append(slot_U[true_indices(~admitted_U)])

    @override
    def trained(self, row_U: Tensor) -> Tensor | None:
        trained_U = super().trained(row_U)
        if not self.slots.unadmitted:
            return trained_U
        admitted_U = ~torch.isin(row_U, torch.cat(self.slots.unadmitted))
        return admitted_U if trained_U is None else admitted_U & trained_U

    @override
    def settle(self, step: int, stopped: Tensor | None = None) -> None:
        """End a step after its update: free the slots of unadmitted keys, of expired rows and of
        surplus rows. Where a load sets the number of updates and no step has ended, rows stay: a
        checkpoint that is not trained answers as it was saved.
        """
        gone = self.slots.unadmitted
        self.slots.unadmitted = []
        self.slots.passes = False
        if step == self.step + 1 and self.trains:
            gone += [*self.admission.expired(step, stopped), *self.admission.surplus()]
        if gone:
            self._free(torch.cat(gone))
        self.step = step
        self.settled += 1

    def _free(self, slot_M: Tensor) -> None:
        """Free slots whose keys have no row any more, with a state as that of new rows, of which
        `add` writes none.
        """
        self.slots.remove(slot_M)
        self.admission.release(slot_M)
        if self._starts is not None:
            self._begin_state(slot_M)

    def _grow(self, slots: int) -> None:
        before = self._state[-1].held if self._state else slots  # the last memory to grow
        super()._grow(slots)
        self.admission.grow(slots)
        if self.rule and self.rule.start and self._starts and slots > before:
            self._begin_state(slice(before, slots))  # `add` writes none

    def begin_anew(self, tables: Collection[str], epoch: int) -> None:
        """Write start values into the rows that exist (`RowStore.begin_anew`).

        Which keys have rows, and what is known of their use, stays. A key that gets its row later
        begins with the values that it answered without a row, those of epoch 0: a checkpoint
        answers the same.
        """
        for number, strip in enumerate(self.strips):
            if strip.table.name in tables:
                slot_M = self.index.slots_of(number)
                position_M = self.index.positions.rows[slot_M, 0]
                strip_M = torch.full_like(position_M, number)
                self._begin(slot_M, position_M, strip_M, epoch)

    def _begin(self, slot_M: Tensor, position_M: Tensor, strip_M: Tensor, epoch: int = 0) -> None:
        """Write the start values of rows and of their optimiser state."""
        if self._starts is not None and epoch == 0:
            rows = slot_M.contiguous(), position_M.contiguous(), strip_M.contiguous()
            self.backend.begin_rows(self._weights.rows, self._starts, rows)
        else:
            self._write_start_values(slot_M, position_M, strip_M, epoch)
        if self.average is not None:
            self.average.begin(slot_M)
        self._begin_state(slot_M)

    def _write_start_values(
        self, slot_M: Tensor, position_M: Tensor, strip_M: Tensor, epoch: int
    ) -> None:
        """Write the start values of rows, strip by strip."""
        key_M = keys_of(position_M)
        for number, strip in enumerate(self.strips):
            of_strip = true_indices(strip_M == number) if len(self.strips) > 1 else slice(None)
            slots = slot_M[of_strip]
            keys = key_M[of_strip]
            if not len(slots):
                continue
            write_start_values(
                self._weights.rows,
                slots,
                keys,
                strip.table,
                strip.seed,
                strip.cols,
                epoch,
                self.backend.write_start_values,
            )

    def _begin_state(self, slot_M: Tensor | slice) -> None:
        """Write the initial optimiser state of rows, which begin with the next step."""
        self._begin_steps(slot_M)
        starts = self.rule.starts() if self.rule else ()
        for state, (_, _, start) in zip(self.state, starts, strict=True):
            state[slot_M] = start

    def _start_numbers(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the numbers of each strip from which a kernel makes start values; None where no
        kernel does.
        """
        plain = not any(s.table.start_middle for s in self.strips)
        if self.backend.begin_rows is None or self._weights.rows.element_size() > 4 or not plain:
            return None
        device = self.group.device
        scales = [s.table.start_range / 2**24 for s in self.strips]
        return (
            to_device([start_hash(s.table, s.seed) for s in self.strips], device),
            to_device([s.cols.start for s in self.strips], device),
            copy_to_device(torch.tensor(scales, dtype=torch.float32, device="cpu"), device),
        )

    # ---- counted

    def changes(self) -> dict[str, Changes]:
        """Return by table the numbers of new, admitted and evicted keys so far. Only strips with
        the first columns of a table count, and only where this rank writes their blocks.
        """
        return {
            strip.table.name: changes
            for strip, changes in zip(self.strips, self.admission.changes, strict=True)
            if self._owns_rows(strip)
        }

    def rows_of_stretches(self) -> RowsOfStretches:
        """Return by table the number of rows and of keys counted for admission in each stretch."""
        counted: RowsOfStretches = {}
        rows_IR = self.admission.rows_IR.tolist()
        for number, (strip, rows_R) in enumerate(zip(self.strips, rows_IR, strict=True)):
            waiting_R = self.admission.waiting_of_stretches(number)
            merge_rows_of_stretches(counted, {strip.table.name: {ROWS: rows_R, WAITING: waiting_R}})
        return counted

    # ---- checkpoints

    def blocks(
        self, averaged: bool = False, rows_of_stretches: RowsOfStretches | None = None
    ) -> Iterator[Block]:
        """Yield the blocks of rows, keys and state that a checkpoint writes, piece by piece.

        The order of positions over all ranks numbers the rows.

        Args:
            averaged: Whether the weights are the average (`RowStore.blocks`).
            rows_of_stretches: The rows of the stretches on all ranks; None where this rank has all
                rows.
        """
        counts = self.rows_of_stretches() if rows_of_stretches is None else rows_of_stretches
        unadmitted = torch.cat([self.slots.behind(0), *self.slots.unadmitted])
        weights = self._saved_weights(averaged)
        for number, strip in enumerate(self.strips):
            stored = counts[strip.table.name]
            for p, slot_N, key_N1 in self.slots.of_pieces(number, strip.pieces, unadmitted):
                rows_of_piece = partial(RowsToWrite.of, slots=slot_N)
                numbered = Numbered.of(stored[ROWS], p)
                yield from self._blocks_of(strip, numbered, weights, rows_of_piece, key_N1)
            if counter := self.admission.counter(number):
                yield from counter.blocks(number, strip, stored[WAITING], self._owns_rows(strip))

    def _owns_rows(self, strip: DynamicStrip) -> bool:
        """Return whether this strip, on this rank, writes the values that exist once per row."""
        return self.group.writes_blocks and strip.cols.start == 0

    def _blocks_of(
        self,
        strip: DynamicStrip,
        numbered: Numbered,
        weights: list[tuple[str, Any]],
        rows_of_piece: Callable[[Tensor], Any],
        key_N1: Tensor,
    ) -> Iterator[Block]:
        """Yield the blocks of a piece.

        Args:
            strip: The strip of the piece.
            numbered: The numbers of the piece's rows.
            weights: The tensors of weights by slot, by name.
            rows_of_piece: A function that returns the piece's rows from a tensor by slot.
            key_N1: The keys of the rows.
        """
        owner = self.group.writes_blocks
        name = strip.table.name
        total, rows = numbered
        wide = (total, strip.table.embedding_dim)
        of_row = [(KEYS, key_N1)]
        for tensor, by_slot in weights:
            yield Block(name, tensor, wide, rows, strip.cols, rows_of_piece(by_slot), owner)
        for (tensor, kind), state in zip(self._kinds, self.state, strict=True):
            if kind == "element":
                yield Block(name, tensor, wide, rows, strip.cols, rows_of_piece(state), owner)
            else:
                of_row.append((tensor, rows_of_piece(state)))
        if strip.settings.tracks_use:
            of_row += [
                (tensor, rows_of_piece(memory)) for tensor, memory in self.admission.tracked()
            ]
        for tensor, data in of_row:
            yield Block(name, tensor, (total, 1), rows, range(1), data, self._owns_rows(strip))

    def blocks_to_load(
        self, rows_of_stretches: RowsOfStretches, step: int, averaged: bool = False
    ) -> Iterator[Block]:
        """Forget the rows of some tables, and yield the blocks that a checkpoint fills. `loaded`
        ends the load.

        Args:
            rows_of_stretches: The stored rows of these tables, by stretch.
            step: The number of updates of the stored rows.
            averaged: Whether to fill the average, too (`RowStore.blocks_to_fill`).
        """
        self.settle(step)
        loads = {n: s for n, s in enumerate(self.strips) if s.table.name in rows_of_stretches}
        for number in loads:
            slot_N = self.index.slots_of(number)
            self._free(slot_N)
            self.admission.forget(number)
        before = self.slots.used
        self.slots.begin_load()
        self._begin_state(slice(self.slots.used, before))
        more = _rows_here(rows_of_stretches, ROWS, loads.values())
        self._grow(self.slots.used + more)  # now: later growth would move yielded rows
        if exact := self.admission.exact:
            counted = [s for number, s in loads.items() if self.admission.counter(number) is exact]
            exact.begin_load(_rows_here(rows_of_stretches, WAITING, counted))
        for number, strip in loads.items():
            stored = rows_of_stretches[strip.table.name]
            for p in strip.pieces:
                numbered = Numbered.of(stored[ROWS], p)
                here, key_N1 = self.slots.load(number, p, len(numbered.rows))
                self._begin_state(here)
                self.admission.begin(here, step)
                rows_of_piece = itemgetter(here)
                weights = self._filled_weights(averaged)
                yield from self._blocks_of(strip, numbered, weights, rows_of_piece, key_N1)
            if counter := self.admission.counter(number):
                owner = self._owns_rows(strip)
                yield from counter.blocks_to_load(number, strip, stored[WAITING], owner)

    def loaded(self) -> None:
        """Put the loaded rows into the index.

        Raises:
            CheckpointError: A key occurs twice or lies in a stretch where it does not belong.
        """
        names = [strip.table.name for strip in self.strips]
        for number, position_N in self.slots.loaded(names):
            self.admission.count_in(number, position_N)
        if exact := self.admission.exact:
            list(exact.slots.loaded(names))


def _rows_here(
    rows_of_stretches: RowsOfStretches, counted: str, strips: Iterable[DynamicStrip]
) -> int:
    """Return the number of rows or waiting keys in the pieces of some strips."""
    return sum(
        len(Numbered.of(rows_of_stretches[strip.table.name][counted], p).rows)
        for strip in strips
        for p in strip.pieces
    )
