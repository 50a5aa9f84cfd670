"""Blocks of dynamic tables in a checkpoint: rows in the order of their positions.

    rows of run 0, of run 1, ..., of run 63        numbered 0 .. N - 1 over all ranks

So the rows of every strip are a range of numbers. A stored table has N rows, as a static table has,
and a tensor `keys` in addition to its weights. The manifest has the number of rows of each run, so
any plan and any number of ranks loads the table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from recapp.sharding.layout import Piece
from recapp.tables.config import EmbeddingConfig
from recapp.tables.dynamic import RUNS, DynamicRows

KEYS = "keys"
"""The tensor of a dynamic table that holds the key of each row, [N, 1]."""
ROWS = "rows"
WAITING = "waiting"
ALWAYS_LOADED = ("weight", KEYS)
"""The tensors that prediction needs. Only training needs the others."""
WAITING_COUNTS = "waiting_counts"
SKETCH = "sketch"
OF_ADMISSION = ("last_used", "uses", "waiting_keys", WAITING_COUNTS, SKETCH)
"""The tensors of admission and eviction. Where a checkpoint lacks them, they start empty."""
RowsOfRuns = dict[str, dict[str, list[int]]]
"""By table: the number of `rows` and of `waiting` keys in each of the 64 runs. A waiting key is
counted until it was seen often enough for a row.
"""


class DynamicStrip(NamedTuple):
    """A strip of a dynamic table, in the view of its store.

    Args:
        table: The table.
        cols: The columns of the strip in the table.
        pieces: The pieces of the strip that the rank holds.
        key: The number of the strip's first run among the runs of all strips of the group.
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


@dataclass(frozen=True)
class SlotRows:
    """The rows of some slots, gathered when they are read. They take the place of a tensor in a
    block to be written.

    Args:
        memory: Rows by slot.
        slot_N: The slots, in order.
    """

    memory: Tensor
    slot_N: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of rows and of columns."""
        return len(self.slot_N), self.memory.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of an element."""
        return self.memory.dtype

    def element_size(self) -> int:
        """Return the bytes of an element."""
        return self.memory.element_size()

    def numel(self) -> int:
        """Return the number of elements."""
        return len(self.slot_N) * self.memory.shape[1]

    def __getitem__(self, rows: slice) -> Tensor:
        """Return a copy of some of the rows."""
        return self.memory[self.slot_N[rows]]


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
        """Return the numbers of a piece's rows, from the number of rows in each run."""
        first = sum(rows_R[: piece.rows.start])
        held = sum(rows_R[piece.rows.start : piece.rows.stop])
        return Numbered(sum(rows_R), range(first, first + held))


def merge_rows_of_runs(into: RowsOfRuns, more: Mapping[str, Mapping[str, list[int]]]) -> None:
    """Add the runs of another strip or rank. A run that both hold has the same numbers in both."""
    for table, counts in more.items():
        held = into.setdefault(table, {})
        for name, count_R in counts.items():
            before = held.get(name, [0] * len(count_R))
            held[name] = [max(pair) for pair in zip(before, count_R, strict=True)]


def without_waiting(rows_of_runs: RowsOfRuns) -> RowsOfRuns:
    """Return the numbers of rows without the numbers of waiting keys."""
    return {t: {ROWS: c[ROWS], WAITING: [0] * RUNS} for t, c in rows_of_runs.items()}
