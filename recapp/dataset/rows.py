"""Decoded rows: columns as numpy arrays, which can be sliced, permuted and joined.

    dense_NI    [N, I]  numbers, transformed
    targets_NT  [N, T]  labels, then weights
    ids_NS      [N, S]  the single id of each row and single-valued feature
    bags                values_L, offsets_N1 of each multi-valued feature
    row_numbers_N  [N]  the place of each row in the data set, where it is wanted

Shapes: N rows of a chunk, I dense columns, T columns of labels and weights, S single-valued
features, L ids of a bag feature. Arrays are row-major, because lanes gather rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Bags:
    """The bags of one feature.

    Args:
        values_L: The ids of all rows, one bag after the other, [L].
        offsets_N1: The offset of each row's bag, and L at the end, [N + 1].
    """

    values_L: Int64Array
    offsets_N1: Int64Array

    @staticmethod
    def of(values_L: Int64Array, lengths_N: Int64Array) -> "Bags":
        """Make bags from the number of ids of each row, [N]."""
        return Bags(
            values_L, np.concatenate(([0], np.cumsum(lengths_N))).astype(np.int64, copy=False)
        )

    def slice(self, first: int, last: int) -> "Bags":
        """Return rows [first, last), without a copy of the ids."""
        offsets = self.offsets_N1[first : last + 1]
        return Bags(self.values_L[offsets[0] : offsets[-1]], offsets - offsets[0])

    def take(self, rows_M: Int64Array) -> "Bags":
        """Return the given rows, in the given order."""
        starts = self.offsets_N1[rows_M]
        lengths = np.diff(self.offsets_N1)[rows_M]
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        position_L = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return Bags(self.values_L[position_L], offsets)


@dataclass(frozen=True, slots=True)
class Rows:
    """Some decoded rows; the module docstring explains the arrays.

    Args:
        dense_NI: Transformed numbers, [N, I].
        targets_NT: Labels and weights, [N, T].
        ids_NS: Ids of single-valued features, [N, S].
        bags: The bags of each multi-valued feature, in schema order.
        row_numbers_N: The place of each row in the data set, [N]; None where nobody wants it.
    """

    dense_NI: Float32Array
    targets_NT: Float32Array
    ids_NS: Int64Array
    bags: tuple[Bags, ...]
    row_numbers_N: Int64Array | None = None

    def __len__(self) -> int:
        return len(self.targets_NT)

    def slice(self, first: int, last: int) -> "Rows":
        """Return rows [first, last) without a copy; `last` may exceed the number of rows."""
        last = min(last, len(self))
        bags = tuple(bag.slice(first, last) for bag in self.bags)
        return Rows(
            self.dense_NI[first:last],
            self.targets_NT[first:last],
            self.ids_NS[first:last],
            bags,
            None if self.row_numbers_N is None else self.row_numbers_N[first:last],
        )

    def take(self, rows_M: Int64Array) -> "Rows":
        """Return the given rows, in the given order."""
        bags = tuple(bag.take(rows_M) for bag in self.bags)
        numbers = None if self.row_numbers_N is None else self.row_numbers_N[rows_M]
        return Rows(
            self.dense_NI[rows_M], self.targets_NT[rows_M], self.ids_NS[rows_M], bags, numbers
        )


def join(parts: Sequence[Rows]) -> Rows:
    """Concatenate the rows of several chunks (at least one)."""
    if len(parts) == 1:
        return parts[0]
    bags = tuple(
        Bags.of(
            np.concatenate([bag.values_L for bag in same]),
            np.concatenate([np.diff(bag.offsets_N1) for bag in same]),
        )
        for same in zip(*(part.bags for part in parts), strict=True)
    )
    numbers = [part.row_numbers_N for part in parts if part.row_numbers_N is not None]
    return Rows(
        np.concatenate([part.dense_NI for part in parts]),
        np.concatenate([part.targets_NT for part in parts]),
        np.concatenate([part.ids_NS for part in parts]),
        bags,
        np.concatenate(numbers) if numbers else None,
    )
