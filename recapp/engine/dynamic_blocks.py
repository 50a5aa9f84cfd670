"""What a checkpoint stores of dynamic tables: rows in the order of their positions.

    rows of run 0, of run 1, ..., of run 63        numbered 0 .. N - 1 over all ranks

So the rows of any strip are a range of numbers, a stored table is N rows like any other, with the
tensor `keys` beside its weights, and any plan and number of ranks loads it: how many rows each run
has is in the manifest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from recapp.errors import CheckpointError
from recapp.sharding.layout import Piece
from recapp.tables.config import EmbeddingConfig
from recapp.tables.dynamic import RUNS, DynamicRows, runs_of

KEYS = "keys"
"""The tensor of a dynamic table that holds the key of each row, [N, 1]."""
ROWS = "rows"
WAITING = "waiting"
ALWAYS_LOADED = ("weight", KEYS)
"""What a model needs to predict; the rest is for going on with training."""
WAITING_COUNTS = "waiting_counts"
SKETCH = "sketch"
OF_ADMISSION = ("last_used", "uses", "waiting_keys", WAITING_COUNTS, SKETCH)
"""What decides on keys and rows of a dynamic table: it begins anew where it is not stored."""
RowsOfRuns = dict[str, dict[str, list[int]]]
"""By table: how many `rows` each of the 64 runs has, and how many keys that are `waiting`: counted,
because they have to be seen more often before they get a row.
"""


class DynamicStrip(NamedTuple):
    """A strip of a dynamic table, as its store knows it.

    Args:
        table: The table.
        cols: Its columns in the table.
        pieces: What the rank holds of it.
        key: The number of its first run among those of all strips of the group.
        seed: Seed of the start values.
    """

    table: EmbeddingConfig
    cols: range
    pieces: list[Piece]
    key: int
    seed: int

    @property
    def settings(self) -> DynamicRows:
        """Return which keys get rows and which rows leave."""
        assert self.table.dynamic is not None
        return self.table.dynamic


@dataclass(frozen=True)
class SlotRows:
    """Rows of some slots, which are brought together when they are read: what stands for a tensor
    in a block that is written.

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
        """Return some of the rows, copied."""
        return self.memory[self.slot_N[rows]]


class Numbered(NamedTuple):
    """The numbers of a piece's rows among those of its table.

    Args:
        total: Rows of the table.
        rows: Numbers of the piece's rows.
    """

    total: int
    rows: range

    @staticmethod
    def of(rows_R: list[int], piece: Piece) -> "Numbered":
        """Return the numbers of a piece's rows, where each run has so many."""
        first = sum(rows_R[: piece.rows.start])
        held = sum(rows_R[piece.rows.start : piece.rows.stop])
        return Numbered(sum(rows_R), range(first, first + held))


def merge_rows_of_runs(into: RowsOfRuns, more: Mapping[str, Mapping[str, list[int]]]) -> None:
    """Add what another strip or rank holds: a run that both hold has equally many in both."""
    for table, counts in more.items():
        held = into.setdefault(table, {})
        for name, count_R in counts.items():
            before = held.get(name, [0] * len(count_R))
            held[name] = [max(pair) for pair in zip(before, count_R, strict=True)]


def without_waiting(rows_of_runs: RowsOfRuns) -> RowsOfRuns:
    """Return the numbers of rows alone, with no keys that are counted."""
    return {t: {ROWS: c[ROWS], WAITING: [0] * RUNS} for t, c in rows_of_runs.items()}


def check_positions(position_N: Tensor, runs: range, table: str) -> None:
    """Check that loaded rows stand where they belong: by their positions, each once.

    Raises:
        CheckpointError: They do not.
    """
    run_N = runs_of(position_N)
    inside = bool(((run_N >= runs.start) & (run_N < runs.stop)).all())
    if not inside or bool((position_N[1:] <= position_N[:-1]).any()):
        raise CheckpointError(
            f"table {table}: the stored keys are not in the order of their positions: the "
            "checkpoint is damaged; use another one"
        )
