"""Rows of a batch become positions here and nowhere else, where a plan mixes the rows of tables."""

from collections.abc import Callable, Sequence
from itertools import accumulate, groupby

import numpy as np
import torch
from torch import Tensor

from recapp.sharding.layout import Layout
from recapp.sparse.transfer import to_device
from recapp.tables.ids import Rows
from recapp.tables.row_order import affine

Kernel = Callable[[Tensor, Sequence[int], Tensor], Tensor]
"""All lookups in one pass: (rows_L, edges, numbers_F3) -> positions of the rows' dtype. The numbers
are those of `RowOrder`; its rows are 0 where a lookup's are not mixed.
"""


class MixedLookups:
    """The lookups of a layout whose tables' rows are mixed.

    Args:
        layout: Where the rows of all tables lie.
        kernel: A faster implementation for rows on the CPU; the torch operations here define the
            result. They take a run of neighbouring lookups at once.
    """

    def __init__(self, layout: Layout, kernel: Kernel | None = None) -> None:
        order_of = {t.name: order for t, order in zip(layout.tables, layout.orders, strict=True)}
        order_F = [order_of[x.table.name] for x in layout.lookups]
        runs = groupby(range(len(order_F)), key=lambda f: order_F[f] is not None)
        self._runs = [list(run) for mixed, run in runs if mixed]
        self._most = max((o.rows for o in order_F if o is not None), default=0)
        self._numbers_F3 = np.array(
            [(o.multiplier, o.shift, o.rows) if o else (1, 0, 0) for o in order_F], np.int64
        )
        self._kernel = kernel

    def positions_of(self, rows: Rows) -> Tensor:
        """Return the rows of a batch by their positions; those that are not mixed as they are."""
        if not self._runs:
            return rows.rows_L
        edges = [0, *accumulate(rows.per_F)]
        if self._kernel is not None:
            return self._kernel(rows.rows_L, edges, torch.from_numpy(self._numbers_F3))
        made_L = rows.rows_L.clone()
        for run in self._runs:
            part_N = made_L[edges[run[0]] : edges[run[-1] + 1]]
            part_N.copy_(self._run(part_N, run, rows.per_F))
        return made_L

    def _run(self, row_N: Tensor, run: list[int], per_F: list[int]) -> Tensor:
        numbers_R3 = self._numbers_F3[run]
        if len(run) == 1:
            multiplier, shift, rows = numbers_R3[0].tolist()
            return affine(row_N, multiplier, shift, rows, self._most)
        counts = np.array([per_F[f] for f in run], np.int64)
        *each, count_R = to_device(np.vstack([numbers_R3.T, counts]), row_N.device)
        multiplier_N, shift_N, rows_N = (
            torch.repeat_interleave(number_R, count_R, output_size=len(row_N)) for number_R in each
        )
        return affine(row_N, multiplier_N, shift_N, rows_N, self._most)
