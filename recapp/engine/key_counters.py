"""Counters of dynamic keys without rows: exact counts, or a count-min sketch."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from recapp.engine.dynamic_blocks import (
    SKETCH,
    WAITING_COUNTS,
    DynamicStrip,
    Numbered,
    SlotRows,
    check_positions,
)
from recapp.engine.free_slots import FreeSlots
from recapp.kernels.backend import Backend
from recapp.kernels.row_memory import RowMemory, most_bytes
from recapp.sharding.layout import Block, Piece
from recapp.sparse.transfer import true_indices
from recapp.tables.dynamic import (
    RUNS,
    SKETCH_LINES,
    Counter,
    DynamicRows,
    keys_of,
    positions_of,
    runs_of,
)

# odd numbers, one for each line: the first fractional bits of the square roots of primes
_LINE_MULTIPLIERS = (
    0x6A09E667F3BCC909,
    0x3C6EF372FE94F82B,
    0x510E527FADE682D1,
    0x1F83D9ABFB41BD6B,
)
_BYTES_OF_A_COUNT = 20  # at least, with the index


class KeyCounter(ABC):
    """Count the steps that saw a key, for the keys of a strip."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Return the bytes of the counts and their index."""

    @abstractmethod
    def count(self, position_U: Tensor) -> Tensor:
        """Add one to the count of each distinct key, and return the counts."""

    @abstractmethod
    def forget(self, position_U: Tensor) -> None:
        """Forget the counts of some keys, where the counter can tell keys apart."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all counts."""

    @abstractmethod
    def blocks(self, strip: DynamicStrip, waiting_R: list[int], owner: bool) -> Iterator[Block]:
        """Yield the blocks of counts that a checkpoint writes (`Admission.blocks`)."""

    @abstractmethod
    def blocks_to_load(
        self, strip: DynamicStrip, waiting_R: list[int], owner: bool
    ) -> Iterator[Block]:
        """Yield the blocks that a checkpoint fills with its counts."""

    def loaded(self, table: str) -> None:  # noqa: B027
        """Continue from the loaded counts. A counter whose blocks are views has nothing to do.

        Raises:
            CheckpointError: A key occurs twice or lies in a run where it does not belong.
        """


def make_counter(
    settings: DynamicRows, runs: Sequence[int], backend: Backend, device: torch.device
) -> KeyCounter:
    """Return the counter that a table's settings ask for."""
    if settings.counter is Counter.SKETCH:
        return SketchCounter(settings.sketch_width, device)
    return ExactCounter(runs, backend, device)


class ExactCounter(KeyCounter):
    """A count for each key of a strip that was seen and has no row.

    Args:
        runs: Runs of positions that the store may hold.
        backend: Kernels.
        device: Device of the counts.
    """

    def __init__(self, runs: Sequence[int], backend: Backend, device: torch.device) -> None:
        capacity = min(FreeSlots.MOST, most_bytes(device) // _BYTES_OF_A_COUNT)
        self.slots = FreeSlots(device)
        self.index = backend.key_index(runs, capacity, device)
        self.counts = RowMemory(capacity, 1, torch.int32, device)
        self._pieces_loaded: list[tuple[Piece, Tensor, Tensor]] = []

    @property
    def nbytes(self) -> int:
        """Return the bytes of the counts and their index."""
        index = self.index
        return int(index.nbytes + index.positions.nbytes + index.strips.nbytes + self.counts.nbytes)

    def count(self, position_U: Tensor) -> Tensor:
        """Add one to the count of each distinct key, and return the counts."""
        strip_U = torch.zeros_like(position_U, dtype=torch.int16)
        slot_U = self.index.find(position_U, strip_U)
        absent_M = true_indices(slot_U < 0)
        if len(absent_M):
            fresh_M = self.slots.take(len(absent_M))
            self.counts.grow(self.slots.used)
            self.counts.rows[fresh_M] = 0
            slot_U[absent_M], _ = self.index.insert(
                position_U[absent_M], strip_U[absent_M], fresh_M
            )
        self.counts.rows[slot_U] += 1
        return self.counts.rows[slot_U, 0]

    def clear(self) -> None:
        """Forget all counts."""
        self.slots.clear()
        self.index.clear()

    def keys_of_runs(self) -> list[int]:
        """Return the number of counted keys in each run."""
        run_N = runs_of(self.index.positions.rows[self.index.slots_of(0), 0])
        counted: list[int] = torch.bincount(run_N, minlength=RUNS).tolist()
        return counted

    def blocks(self, strip: DynamicStrip, waiting_R: list[int], owner: bool) -> Iterator[Block]:
        """Yield keys and counts of every piece."""
        slot_N = self.index.slots_of(0)
        run_N = runs_of(self.index.positions.rows[slot_N, 0])
        for p in strip.pieces:
            held_N = slot_N[(run_N >= p.rows.start) & (run_N < p.rows.stop)]
            numbered = Numbered.of(waiting_R, p)
            key_N1 = keys_of(self.index.positions.rows[held_N])
            yield from _of_waiting(
                strip, numbered, key_N1, SlotRows(self.counts.rows, held_N), owner
            )

    def blocks_to_load(
        self, strip: DynamicStrip, waiting_R: list[int], owner: bool
    ) -> Iterator[Block]:
        """Yield blocks for keys and counts of every piece."""
        counted = sum(len(Numbered.of(waiting_R, p).rows) for p in strip.pieces)
        self.counts.grow(self.slots.used + counted)  # now: later growth would move yielded counts
        for p in strip.pieces:
            numbered = Numbered.of(waiting_R, p)
            slot_N = self.slots.take(len(numbered.rows))
            here = slice(self.slots.used - len(slot_N), self.slots.used)
            key_N1 = torch.zeros(len(slot_N), 1, dtype=torch.int64, device=slot_N.device)
            self._pieces_loaded.append((p, slot_N, key_N1))
            yield from _of_waiting(strip, numbered, key_N1, self.counts.rows[here], owner)

    def loaded(self, table: str) -> None:
        """Put the loaded keys into the index (`KeyCounter.loaded`)."""
        for p, slot_N, key_N1 in self._pieces_loaded:
            position_N = positions_of(key_N1[:, 0])
            check_positions(position_N, p.rows, table)
            if len(slot_N):
                strip_N = torch.zeros_like(position_N, dtype=torch.int16)
                self.index.insert(position_N, strip_N, slot_N)
        self._pieces_loaded = []

    def forget(self, position_U: Tensor) -> None:
        """Forget the counts of some keys, all of which have a count."""
        if len(position_U):
            slot_U = self.index.find(position_U, torch.zeros_like(position_U, dtype=torch.int16))
            self.index.remove(slot_U)
            self.slots.give_back(slot_U)


class SketchCounter(KeyCounter):
    """A count-min sketch of the keys of a strip, one for each run of positions.

    Args:
        width: The number of counts in each line, over all runs.
        device: Device of the counts.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self.width = width // RUNS
        shape = (RUNS, SKETCH_LINES * self.width)
        self.counts_RC = torch.zeros(shape, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the counts."""
        return self.counts_RC.nbytes

    def _cells(self, position_U: Tensor) -> Tensor:
        """Return the indices of each key's counts, [lines, U]."""
        first_U = runs_of(position_U) * self.counts_RC.shape[1]
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

    def forget(self, position_U: Tensor) -> None:
        """Do nothing: a sketch cannot tell keys apart."""

    def clear(self) -> None:
        """Forget all counts."""
        self.counts_RC.zero_()

    def blocks(self, strip: DynamicStrip, waiting_R: list[int], owner: bool) -> Iterator[Block]:
        """Yield the counts of the runs of every piece."""
        shape = (RUNS, self.counts_RC.shape[1])
        for p in strip.pieces:
            data = self.counts_RC[p.rows.start : p.rows.stop]
            yield Block(strip.table.name, SKETCH, shape, p.rows, range(shape[1]), data, owner)

    def blocks_to_load(
        self, strip: DynamicStrip, waiting_R: list[int], owner: bool
    ) -> Iterator[Block]:
        """Yield the counts of the runs of every piece, as views."""
        return self.blocks(strip, waiting_R, owner)


def _of_waiting(
    strip: DynamicStrip, numbered: Numbered, key_N1: Tensor, count_N1: Any, owner: bool
) -> Iterator[Block]:
    """Yield the blocks of counted keys."""
    total, rows = numbered
    for tensor, data in (("waiting_keys", key_N1), (WAITING_COUNTS, count_N1)):
        yield Block(strip.table.name, tensor, (total, 1), rows, range(1), data, owner)
