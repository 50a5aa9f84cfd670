"""Convert raw rows of a caller, such as a request to a server, to a batch.

    Arrow table, in any naming of the schema -> Batch without labels

Raw rows are read like training rows: with the same schema, the same decoder of ids and numbers, and
the same transform.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from recapp.dataset.arrow_types import has_views, is_list, without_views
from recapp.dataset.collate import Collate
from recapp.dataset.schema import Schema
from recapp.errors import DataError
from recapp.sparse.batch import Batch

RawTable: TypeAlias = pa.Table
"""Raw columns, under names that a schema knows; other columns are skipped."""

SOURCE = "the rows"  # the name in errors in place of a file


def as_table(rows: Any) -> RawTable:
    """Return raw rows as an Arrow table.

    Args:
        rows: A table, a record batch, a data frame (of pandas, polars or another library with
            `__arrow_c_stream__`), or a mapping of names to columns. NaN in lists and arrays of a
            mapping is a missing value, as in data frames.

    Raises:
        DataError: The rows have another type, or their columns have different lengths.
    """
    if isinstance(rows, pa.Table):
        return rows
    try:
        if isinstance(rows, Mapping):
            rows = {
                name: values
                if isinstance(values, pa.Array | pa.ChunkedArray)
                else pa.array(values, from_pandas=True)
                for name, values in rows.items()
            }
        return pa.table(rows)
    except (TypeError, ValueError, pa.ArrowException) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"rows of type {type(rows).__name__} are no table ({said}): pass an Arrow table, a "
            "data frame, or a mapping of names to columns"
        ) from None


class RawRows:
    """Decode raw rows by the schema of a model.

    Args:
        schema: The columns of the model; its labels are not read.
        transform: The transform of dense numbers, a key of
            `recapp.dataset.collate.DENSE_TRANSFORMS`.
    """

    def __init__(self, schema: Schema, transform: str) -> None:
        self.schema = schema.unlabelled()
        self.transform = transform
        self._last: tuple[pa.Schema, dict[str, str], list[str], Collate] | None = None

    def batch(self, rows: Any) -> Batch:
        """Return rows as a batch on the CPU, without labels.

        A sparse feature with a column of lists is a bag; any other column has one id, or none, for
        each row. A null is an empty bag in features that had bags in training, and one missing id
        in the others.

        Args:
            rows: Raw columns, as for `as_table`; they may have no rows.

        Raises:
            DataError: `rows` is not a table, or a column is missing, has an unreadable type, or has
                an unreadable value; the error names the column, and the row counted from 0.
        """
        table = as_table(rows)
        columns, views, collate = self._of(table.schema)
        held = table.select(list(columns.values())).rename_columns(list(columns))
        for name in views:
            kind = without_views(pa.nulls(0, held[name].type)).type
            plain = pa.chunked_array([without_views(chunk) for chunk in held[name].chunks], kind)
            held = held.set_column(held.schema.get_field_index(name), name, plain)
        own_names = dict(zip(columns, columns, strict=True))
        parts = []
        first = 0
        for part in held.combine_chunks().to_batches():
            numbers_N = np.arange(first, first + part.num_rows, dtype=np.int64)
            parts.append(collate.rows(part, own_names, SOURCE, numbers_N))
            first += part.num_rows
        return collate.batch(parts)

    def no_rows(self) -> Batch:
        """Return a batch without rows."""
        return Collate(self.schema, frozenset(), self.transform).batch([])

    def _of(self, arrow_schema: pa.Schema) -> tuple[dict[str, str], list[str], Collate]:
        """Return three facts about rows with these columns: their own names, the names of columns
        with view types, and the decoder.

        The result for the last columns is cached, because callers send rows with the same columns
        again and again. The cache is read and replaced as a whole, because other threads may read
        other rows meanwhile.
        """
        last = self._last
        if last is None or not last[0].equals(arrow_schema):
            columns = self.schema.resolve(arrow_schema, SOURCE)
            kinds = {name: arrow_schema.field(own).type for name, own in columns.items()}
            lists = frozenset(name for name in self.schema.sparse if is_list(kinds[name]))
            bags = self.schema.bags(lists)
            views = [name for name, kind in kinds.items() if has_views(kind)]
            last = (arrow_schema, columns, views, Collate(self.schema, bags, self.transform))
            self._last = last
        return last[1:]
