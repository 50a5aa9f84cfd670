"""Vocabularies of columns: ids that count from the most frequent value of the training rows.

    value      counts      id
    "DE"        9,120       1          ids begin at 1, the most frequent first;
    "FR"        4,077       2          equal counts: by value
    "AQ"            1       0          0: less often than the threshold, or not in training at all
    null                 null          missing values stay missing

Memory holds the distinct values of a column and their counts.
"""

import pyarrow as pa
import pyarrow.compute as pc

from recapp.dataset.arrow_types import is_list

RARE = 0  # the id of values that are not in the vocabulary
_AT_ONCE = 1 << 20  # values that wait until they are added to the counts


class Occurrences:
    """Count the values of a column."""

    def __init__(self) -> None:
        self._parts: list[pa.Table] = []
        self._waiting = 0

    def add(self, column: pa.Array) -> None:
        """Count some values, those of all lists in a column of lists."""
        counted = pc.value_counts(
            (column.flatten() if is_list(column.type) else column).drop_null()
        )
        self.merge(pa.table([counted.field("values"), counted.field("counts")], _NAMES))

    def merge(self, counted: pa.Table) -> None:
        """Add counted values."""
        self._parts.append(counted)
        self._waiting += counted.num_rows
        if self._waiting > max(_AT_ONCE, self._parts[0].num_rows):
            self.result()

    def result(self) -> pa.Table:
        """Return the values so far, and the number of each."""
        summed = pa.concat_tables(self._parts).group_by("value").aggregate([("count", "sum")])
        self._parts = [pa.table([summed["value"], summed["count_sum"]], _NAMES)]
        self._waiting = 0
        return self._parts[0]


_NAMES = ["value", "count"]


def vocabulary(occurrences: Occurrences, least: int) -> pa.Table:
    """Return the values that occur at least so often, the most frequent first."""
    counted = occurrences.result()
    frequent = counted.filter(pc.greater_equal(counted["count"], least))
    return frequent.sort_by([("count", "descending"), ("value", "ascending")]).combine_chunks()


def encoded(column: pa.Array, values: pa.Array) -> pa.Array:
    """Return the ids of a column, or of its lists, as int32.

    Args:
        column: Values, or lists of values.
        values: The values of the vocabulary, in the order of their ids.
    """
    if is_list(column.type):
        column = pa.concat_arrays([column])  # without an offset
        ids = encoded(column.values, values)
        mask = column.is_null() if column.null_count else None
        return pa.ListArray.from_arrays(column.offsets, ids, mask=mask)
    ids = pc.add(pc.index_in(column, values), pa.scalar(1, pa.int32()))
    return pc.if_else(column.is_null(), pa.scalar(None, pa.int32()), pc.fill_null(ids, RARE))
