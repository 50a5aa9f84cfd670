"""Read-only rows: in floating point or quantised, in memory or mapped from a file.

    number of a row           --> held[row]              ReadOnlyStore
    position of a key, strip  --> found among sorted     KeyedStore
                                  positions: held[row]; not found: its start value

The caller passes the rows to the store (`recapp/inference/held_tables.py` maps them from an
artefact). `KeyedStore` finds rows by sorted numbers. It holds all rows of dynamic tables, or only
the rows of static tables that some batches read.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from recapp.engine.row_store import RowStore, StoreBytes, StoredGroup
from recapp.errors import ConfigError
from recapp.kernels.links import Links
from recapp.kernels.quantised import QuantisedRows
from recapp.optim.rules import Rate
from recapp.sharding.layout import Block

# The rows of a store: floats [R, width], or packed rows.
Held = Tensor | QuantisedRows

# Returns the start values of keys without rows, from the number of a strip within its group and the
# positions [N] of the keys.
StartRows = Callable[[int, Tensor], Held]


class ReadOnlyStore(RowStore):
    """Read-only rows in the order of the layout.

    Args:
        group: The group of the rows, and the kernels that compute with them.
        held: The rows, on the group's device.

    Raises:
        ValueError: The shape of the rows is not the shape of the group.

    `pooled` is `held`, or a copy for one batch.
    """

    def __init__(self, group: StoredGroup, held: Held) -> None:
        super().__init__(group)
        width = held.width if isinstance(held, QuantisedRows) else held.shape[1]
        if width != self.width or not (self.finds_rows or len(held) == self.rows):
            raise ValueError(
                f"{len(held):,} rows x {width} where the layout has {self.rows:,} x {self.width}"
            )
        self.held = held
        self.pooled = held
        self.rows = len(held)

    @property
    def nbytes(self) -> StoreBytes:
        """Return the memory of the rows. For mapped rows this is the size after all were read."""
        return StoreBytes(values_of(self.held).nbytes, 0)

    def update(
        self, gradients: Tensor, links: Links, row_U: Tensor, mean_U: Tensor | None, lr: Rate
    ) -> None:
        """Refuse to update read-only rows.

        Raises:
            ConfigError: Always.
        """
        names = {table.name: None for _, _, table, _ in self.group.places}
        raise ConfigError(
            f"tables {', '.join(names)}: their rows are read-only: train the tables of the "
            "checkpoint and export it again"
        )

    def blocks(self, averaged: bool = False) -> Iterator[Block]:
        """Yield nothing: these rows are stored elsewhere."""
        yield from ()


class KeyedStore(ReadOnlyStore):
    """Read-only rows found by sorted numbers: positions of keys, or row numbers of the layout.

    A key without a row answers its start value. For a batch with such keys the store copies the
    rows of the batch side by side, with the start values behind them. The next batch replaces the
    copy.

    Args:
        group: The group of the rows, and the kernels that compute with them.
        held: The rows, strip by strip.
        number_R: The numbers of the rows, int64; ascending and distinct within each strip.
        edge_I1: Strip i of the group has the rows edge[i] .. edge[i + 1]. Where numbers identify
            strips, one range has all rows.
        start: Makes the start values of missing rows; None where no row is missing.
    """

    finds_rows = True

    def __init__(
        self,
        group: StoredGroup,
        held: Held,
        number_R: Tensor,
        edge_I1: Sequence[int],
        start: StartRows | None = None,
    ) -> None:
        super().__init__(group, held)
        self.number_R = number_R
        self.edge_I1 = list(edge_I1)
        self.start = start

    @property
    @override
    def nbytes(self) -> StoreBytes:
        size = super().nbytes
        return size._replace(rows=size.rows + self.number_R.nbytes)

    @override
    def locate(self, row_N: Tensor, strip_N: Tensor | None = None, trains: bool = False) -> Tensor:
        row_N = row_N.long()
        self.pooled = self.held
        found_N: Tensor = self.backend.find_sorted(self.number_R, self.edge_I1, row_N, strip_N)
        if bool((found_N < 0).any()):
            return self._with_start_rows(row_N, strip_N, found_N)
        return found_N

    def _with_start_rows(self, row_N: Tensor, strip_N: Tensor | None, found_N: Tensor) -> Tensor:
        """Copy the rows of a batch side by side, with the start values of missing rows behind the
        others.
        """
        assert self.start is not None, "rows that this store does not hold"
        here_M = (found_N >= 0).nonzero()[:, 0]
        parts = [self.held[found_N[here_M]]]
        order = [here_M]
        for strip in range(len(self.edge_I1) - 1):
            absent_N = found_N < 0
            if strip_N is not None:
                absent_N = absent_N & (strip_N == strip)
            absent_M = absent_N.nonzero()[:, 0]
            if len(absent_M):
                parts.append(self.start(strip, row_N[absent_M]))
                order.append(absent_M)
        self.pooled = join_rows(parts)
        at_N = torch.empty_like(found_N)
        at_N[torch.cat(order)] = torch.arange(len(at_N), device=at_N.device)
        return at_N


def values_of(rows: Held) -> Tensor:
    """Return the tensor of the rows, [R, ...]."""
    return rows.packed_RK if isinstance(rows, QuantisedRows) else rows


def like(rows: Held, values: Tensor) -> Held:
    """Return values as rows in the format of `rows`."""
    if isinstance(rows, QuantisedRows):
        return QuantisedRows(values, rows.width, rows.bits)
    return values


def join_rows(parts: Sequence[Held]) -> Held:
    """Return rows one after the other; a single part is not copied."""
    if len(parts) == 1:
        return parts[0]
    return like(parts[0], torch.cat([values_of(p) for p in parts]))
