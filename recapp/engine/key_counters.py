"""Counters of dynamic keys without rows: exact counts, or a count-min sketch. Both count the steps
that saw a key, for the keys of a strip.
"""

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
)
from recapp.engine.key_slots import KeySlots, most_slots
from recapp.kernels.backend import Backend
from recapp.kernels.row_memory import RowMemory
from recapp.sharding.layout import Block
from recapp.sparse.transfer import true_indices
from recapp.tables.dynamic import RUNS, SKETCH_LINES, runs_of

# odd numbers, one for each line: the first fractional bits of the square roots of primes
_LINE_MULTIPLIERS = (
    0x6A09E667F3BCC909,
    0x3C6EF372FE94F82B,
    0x510E527FADE682D1,
    0x1F83D9ABFB41BD6B,
)
_BYTES_OF_A_COUNT = 20  # at least, with the index


class ExactCounter:
    """A count for each key of a strip that was seen and has no row.

    Args:
        runs: Runs of positions that the store may hold.
        backend: Kernels.
        device: Device of the counts.
    """

    def __init__(self, runs: Sequence[int], backend: Backend, device: torch.device) -> None:
        capacity = most_slots(device, _BYTES_OF_A_COUNT)
        self.slots = KeySlots(runs, capacity, backend, device)
        self.counts = RowMemory(capacity, 1, torch.int32, device)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the counts and their index."""
        return self.slots.nbytes + self.counts.nbytes

    def count(self, position_U: Tensor) -> Tensor:
        """Add one to the count of each distinct key, and return the counts."""
        strip_U = torch.zeros_like(position_U, dtype=torch.int16)
        slot_U = self.slots.index.find(position_U, strip_U)
        absent_M = true_indices(slot_U < 0)
        if len(absent_M):
            fresh_M = self.slots.take(len(absent_M))
            self.counts.grow(self.slots.used)
            self.counts.rows[fresh_M] = 0
            slot_U[absent_M], _ = self.slots.index.insert(
                position_U[absent_M], strip_U[absent_M], fresh_M
            )
        self.counts.rows[slot_U] += 1
        return self.counts.rows[slot_U, 0]

    def forget(self, position_U: Tensor) -> None:
        """Forget the counts of some keys, all of which have a count."""
        strip_U = torch.zeros_like(position_U, dtype=torch.int16)
        self.slots.remove(self.slots.index.find(position_U, strip_U))

    def clear(self) -> None:
        """Forget all counts."""
        self.slots.clear()

    def keys_of_runs(self) -> list[int]:
        """Return the number of counted keys in each run."""
        index = self.slots.index
        run_N = runs_of(index.positions.rows[index.slots_of(0), 0])
        counted: list[int] = torch.bincount(run_N, minlength=RUNS).tolist()
        return counted

    def blocks(self, strip: DynamicStrip, waiting_R: list[int], owner: bool) -> Iterator[Block]:
        """Yield the keys and counts of every piece, for a checkpoint to write.

        Args:
            strip: The strip.
            waiting_R: The number of counted keys in each run, over all ranks.
            owner: Whether this rank writes the blocks.
        """
        for p, slot_N, key_N1 in self.slots.of_pieces(0, strip.pieces):
            counts = SlotRows(self.counts.rows, slot_N)
            yield from _of_waiting(strip, Numbered.of(waiting_R, p), key_N1, counts, owner)

    def blocks_to_load(
        self, strip: DynamicStrip, waiting_R: list[int], owner: bool
    ) -> Iterator[Block]:
        """Yield blocks for the keys and counts of every piece, which a checkpoint fills. Arguments
        as for `blocks`.
        """
        self.slots.begin_load()
        numbered = [Numbered.of(waiting_R, p) for p in strip.pieces]
        more = sum(len(each.rows) for each in numbered)
        self.counts.grow(self.slots.used + more)  # now: later growth would move yielded counts
        for p, each in zip(strip.pieces, numbered, strict=True):
            here, key_N1 = self.slots.load(0, p, len(each.rows))
            yield from _of_waiting(strip, each, key_N1, self.counts.rows[here], owner)


class SketchCounter:
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
        """Yield the counts of the runs of every piece, as views that a checkpoint fills."""
        return self.blocks(strip, waiting_R, owner)


def _of_waiting(
    strip: DynamicStrip, numbered: Numbered, key_N1: Tensor, count_N1: Any, owner: bool
) -> Iterator[Block]:
    """Yield the blocks of counted keys."""
    total, rows = numbered
    for tensor, data in (("waiting_keys", key_N1), (WAITING_COUNTS, count_N1)):
        yield Block(strip.table.name, tensor, (total, 1), rows, range(1), data, owner)


KeyCounter = ExactCounter | SketchCounter
