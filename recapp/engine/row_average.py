"""An average of the rows of a store, beside the rows: an exponential moving average, or the mean of
many steps.

    trained rows       weights[R, width], in the type of the table
    their average      [R, width], in the compute type: a type of 16 bits would lose small changes
    average += weight * (rows - average)      rows that no id touched take part

The average of a shard needs the rows of that shard alone, so ranks send nothing. It is computed
element by element, so it has the same bits under every plan.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recapp.kernels.row_memory import RowMemory

CONVERTED_ROWS = 16384  # rows of a narrower type that are converted at a time


class RowAverage:
    """The average of the rows of a store.

    Args:
        like: The trained rows.
        dtype: The type of the average.
        device: The device of the rows.
    """

    def __init__(self, like: RowMemory, dtype: torch.dtype, device: torch.device) -> None:
        self._memory = RowMemory(like.capacity, like.width, dtype, device)
        self._memory.grow(like.held)
        self._stored = like.rows.dtype
        self._device = device
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
        return self._stored != self._memory.rows.dtype

    def rounded(self) -> "Tensor | Rounded":
        """Return the average in the type of the table."""
        return Rounded(self.rows, self._stored) if self.is_wider else self.rows

    def grow(self, rows: int) -> None:
        """Make room for a number of rows."""
        for memory in {id(m): m for m in (self._memory, self._shown) if m is not None}.values():
            memory.grow(rows)

    def update(self, trained: RowMemory, weight: float) -> None:
        """Move the average towards the trained rows.

        Args:
            trained: The trained rows.
            weight: The share of the way; 1 copies the rows.
        """
        held = trained.held
        step = CONVERTED_ROWS if self.is_wider else max(held, 1)
        for first in range(0, held, step):
            here = slice(first, min(first + step, held))
            rows = trained.rows[here].to(self.rows.dtype)
            if weight == 1:
                self.rows[here] = rows
            else:
                self.rows[here].lerp_(rows, weight)

    def begin(self, row_M: Tensor, trained: Tensor) -> None:
        """Take over trained rows as they are, because they have just begun.

        Args:
            row_M: The numbers of the rows.
            trained: All trained rows.
        """
        values = trained[row_M]
        self.rows[row_M] = values.to(self.rows.dtype)
        if self._shown is not None and self._shown is not self._memory:
            self._shown.rows[row_M] = values

    def show(self) -> None:
        """Let lookups read the average, in the type of the table."""
        memory = self._memory
        if self.is_wider:
            memory = RowMemory(memory.capacity, memory.width, self._stored, self._device)
            memory.grow(self._memory.held)
            memory.rows[: memory.held] = self._memory.rows[: memory.held]
        self._shown = memory

    def hide(self) -> None:
        """Let lookups read the trained rows again."""
        self._shown = None


@dataclass(frozen=True)
class Rounded:
    """Rows in a narrower type, converted when they are read. They take the place of a tensor in a
    block to be written.

    Args:
        rows: The rows.
        dtype: The narrower type.
    """

    rows: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Return the number of rows and of columns."""
        return self.rows.shape

    def element_size(self) -> int:
        """Return the bytes of an element."""
        return self.dtype.itemsize

    def numel(self) -> int:
        """Return the number of elements."""
        return self.rows.numel()

    def narrow(self, dim: int, start: int, length: int) -> "Rounded":
        """Return a part of the rows, not converted yet."""
        return Rounded(self.rows.narrow(dim, start, length), self.dtype)

    def __getitem__(self, rows: Any) -> Tensor:
        """Return a converted copy of some of the rows."""
        return self.rows[rows].to(self.dtype)
