"""An average of the rows of a store, beside the rows: an exponential moving average, or the mean of
many steps.

    trained rows       weights[R, width], in the type of the table
    their average      [R, width], in the compute type: a type of 16 bits would lose small changes
    average += weight * (rows - average)      rows that no id touched take part

The average of a shard needs the rows of that shard alone, so ranks send nothing. It is computed
element by element, so it has the same bits under every plan.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recapp.kernels.row_memory import RowMemory

CONVERTED_ROWS = 16384  # rows of a narrower type that are converted at a time


class RowAverage:
    """The average of the rows of a store.

    Args:
        trained: The trained rows.
        dtype: The type of the average.
    """

    def __init__(self, trained: RowMemory, dtype: torch.dtype) -> None:
        self._trained = trained
        self._memory = RowMemory(trained.capacity, trained.width, dtype, trained.rows.device)
        self._memory.grow(trained.held)
        self._shown: RowMemory | None = None

    @property
    def rows(self) -> Tensor:
        """Return the average, [R, width]."""
        return self._memory.rows

    @property
    def shown(self) -> Tensor | None:
        """Return the average in the type of the table while lookups read it, else None."""
        return None if self._shown is None else self._shown.rows

    @property
    def nbytes(self) -> int:
        """Return the bytes of the average, and of its copy that lookups read."""
        shown = self._shown
        copied = shown is not None and shown is not self._memory
        return self._memory.nbytes + (shown.nbytes if shown is not None and copied else 0)

    @property
    def is_wider(self) -> bool:
        """Return whether the average has another type than the trained rows."""
        return self._trained.rows.dtype != self.rows.dtype

    def rounded(self) -> "Tensor | RowsToWrite":
        """Return the average in the type of the table."""
        if not self.is_wider:
            return self.rows
        return RowsToWrite(self.rows, range(len(self.rows)), self._trained.rows.dtype)

    def grow(self, rows: int) -> None:
        """Make room for a number of rows."""
        for memory in {id(m): m for m in (self._memory, self._shown) if m is not None}.values():
            memory.grow(rows)

    def update(self, weight: float) -> None:
        """Move the average towards the trained rows.

        Args:
            weight: The share of the way; 1 copies the rows.
        """
        count = self._trained.held
        step = CONVERTED_ROWS if self.is_wider else max(count, 1)
        for first in range(0, count, step):
            here = slice(first, min(first + step, count))
            rows = self._trained.rows[here].to(self.rows.dtype)
            if weight == 1:
                self.rows[here] = rows
            else:
                self.rows[here].lerp_(rows, weight)

    def begin(self, row_M: Tensor) -> None:
        """Take over trained rows as they are, because they have just begun."""
        values = self._trained.rows[row_M]
        self.rows[row_M] = values.to(self.rows.dtype)
        if self._shown is not None and self._shown is not self._memory:
            self._shown.rows[row_M] = values

    def show(self, shown: bool) -> None:
        """Let lookups read the average, in the type of the table, or the trained rows again."""
        memory = self._memory
        if shown and self.is_wider:
            rows = self._trained.rows
            memory = RowMemory(memory.capacity, memory.width, rows.dtype, rows.device)
            memory.grow(self._memory.held)
            memory.rows[: memory.held] = self._memory.rows[: memory.held]
        self._shown = memory if shown else None


@dataclass(frozen=True)
class RowsToWrite:
    """Rows that are gathered, and converted to a type, when they are read. They take the place of a
    tensor in a block to be written.

    Args:
        memory: The rows by slot.
        slots: The slots of the rows, in order.
        dtype: The type in which they are read.
    """

    memory: Tensor
    slots: Tensor | range
    dtype: torch.dtype

    @staticmethod
    def of(memory: "Tensor | RowsToWrite", slots: Tensor) -> "RowsToWrite":
        """Return the rows of some slots of a memory, in the type in which it is read."""
        if isinstance(memory, RowsToWrite):
            return replace(memory, slots=slots)
        return RowsToWrite(memory, slots, memory.dtype)

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of rows and of columns."""
        return len(self.slots), self.memory.shape[1]

    def element_size(self) -> int:
        """Return the bytes of an element."""
        return self.dtype.itemsize

    def numel(self) -> int:
        """Return the number of elements."""
        return len(self.slots) * self.memory.shape[1]

    def narrow(self, dim: int, start: int, length: int) -> "RowsToWrite":
        """Return neighbouring rows, not read yet."""
        return replace(self, slots=self.slots[start : start + length])

    def __getitem__(self, rows: slice) -> Tensor:
        """Return a copy of some of the rows."""
        part = self.slots[rows]
        at = slice(part.start, part.stop) if isinstance(part, range) else part
        return self.memory[at].to(self.dtype)
