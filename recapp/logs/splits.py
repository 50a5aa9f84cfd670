"""Splits of the rows of a log into training, validation and test rows.

    order    the first rows train, the next ones validate, the last ones test, in file order
    time     the same by a column of times: rows of one time are in one split
    user     by a hash of a column of ids and a seed: all rows of a user are in one split

A split is a function of a row, so parts of a log are split by themselves, in any order.

Letter: N rows.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from recapp.dataset.counter_hash import uniform
from recapp.dataset.decode import decode_ids
from recapp.dataset.schema import TextIds
from recapp.logs.log_parts import naming

SPLITS = ("train", "val", "test")
Rule = Literal["order", "time", "user"]
_STREAM = 0x5B117


@dataclass(frozen=True)
class Split:
    """A rule that gives each row its split.

    Args:
        rule: The rule.
        shares: The shares of training, validation and test rows; their sum is 1.
        column: The column of times or users; None for `order`.
        seed: The seed of the hash of users.
        cuts: The first row number, or the first time, that validates, and the first that tests;
            None before they are known (`with_cuts`).
    """

    rule: Rule
    shares: tuple[float, float, float]
    column: str | None = None
    seed: int = 1
    cuts: tuple[int, int] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The splits that have a share."""
        return tuple(name for name, share in zip(SPLITS, self.shares, strict=True) if share > 0)

    def of(self, chunk: pa.RecordBatch, path: str, first: int) -> npt.NDArray[np.int8]:
        """Return the number of the split of each row, an index into `SPLITS`, [N].

        Args:
            chunk: Rows of the log.
            path: Their file, for errors.
            first: The number of the first row in the log.

        Raises:
            DataError: A value is no id of a user, or no time.
        """
        if self.rule == "user":
            assert self.column is not None
            ends = np.cumsum(self.shares)[:2]
            draws_N = uniform((_STREAM, self.seed), users_of(chunk, self.column, path, first))
            return np.searchsorted(ends, draws_N, side="right").astype(np.int8)
        assert self.cuts is not None
        values_N = first + np.arange(chunk.num_rows)
        if self.rule == "time":
            assert self.column is not None
            values_N = times_of(chunk, self.column, path, first)
        return np.searchsorted(self.cuts, values_N, side="right").astype(np.int8)


def users_of(chunk: pa.RecordBatch, name: str, path: str, first: int) -> npt.NDArray[np.int64]:
    """Return the ids of a column of users, [N]. Arguments and errors as for `Split.of`."""
    with naming(name, path, first):
        return decode_ids(chunk.column(name))


def times_of(chunk: pa.RecordBatch, name: str, path: str, first: int) -> npt.NDArray[np.int64]:
    """Return the times of a column as whole numbers in their own unit, [N]; a missing one is the
    least. Arguments and errors as for `Split.of`; text must spell whole numbers.
    """
    column = chunk.column(name)
    if pt.is_temporal(column.type):
        column = column.cast(pa.timestamp("ns")).cast(pa.int64())
    with naming(name, path, first):
        return decode_ids(column, TextIds.INTEGERS)


def cuts_of_order(shares: tuple[float, float, float], rows: int) -> tuple[int, int]:
    """Return the first row that validates, and the first that tests."""
    return round(shares[0] * rows), round((shares[0] + shares[1]) * rows)


def cuts_of_times(
    shares: tuple[float, float, float],
    values_N: npt.NDArray[np.int64],
    counts_N: npt.NDArray[np.int64],
) -> tuple[int, int]:
    """Return the first time that validates, and the first that tests, so that no time is in two
    splits, and the shares are as near to the wanted ones as that allows.

    Args:
        shares: The shares of training, validation and test rows.
        values_N: The distinct times, ascending, [N].
        counts_N: The number of rows of each, [N].
    """
    before_N = np.concatenate([[0], np.cumsum(counts_N)])
    wanted = np.array(cuts_of_order(shares, int(before_N[-1])))
    place = np.abs(before_N[None, :] - wanted[:, None]).argmin(axis=1)
    behind = int(values_N[-1]) + 1
    first, second = (int(values_N[n]) if n < len(values_N) else behind for n in place.tolist())
    return first, second
