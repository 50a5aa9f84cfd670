"""Raw rows of a caller, such as a request to a server, as a batch.

    Arrow table, any of the namings that training knows  ->  Batch without labels

They go the way of training's rows: the same schema finds the columns, the same decoder reads ids
and numbers, the same transform is applied.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from recapp.dataset.arrow_types import has_views, is_list, without_views
from recapp.dataset.collate import Collate, SourceRows, check_transform
from recapp.dataset.schema import Schema
from recapp.errors import DataError
from recapp.sparse.batch import Batch

RawTable: TypeAlias = pa.Table
"""Raw columns, under the names that a schema knows; others are left out."""

SOURCE = "the rows"  # what stands where errors of files name the file


def as_table(rows: Any) -> RawTable:
    """Return raw rows as an Arrow table.

    Args:
        rows: A table, a record batch, a data frame (of pandas, polars or another library with
            `__arrow_c_stream__`), or a mapping of names to columns. NaN in lists and arrays of a
            mapping is a missing value, as in data frames.

    Raises:
        DataError: The rows are none of these, or their columns have different lengths.
    """
    if isinstance(rows, pa.Table):
        return rows
    try:
        if isinstance(rows, Mapping):
            rows = {name: _column(values) for name, values in rows.items()}
        return pa.table(rows)
    except (TypeError, ValueError, pa.ArrowException) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"rows of type {type(rows).__name__} are no table ({said}): pass an Arrow table, a "
            "data frame, or a mapping of names to columns"
        ) from None


class RawRows:
    """Reads raw rows by the schema of a model.

    Args:
        schema: The columns of the model; its label is not read.
        transform: How dense numbers are transformed, a key of
            `recapp.dataset.collate.DENSE_TRANSFORMS`.

    Raises:
        ConfigError: There is no such transform.
    """

    def __init__(self, schema: Schema, transform: str) -> None:
        check_transform(transform)
        self.schema = schema.unlabelled()
        self.transform = transform
        self._last: tuple[pa.Schema, dict[str, str], list[str], Collate] | None = None

    def batch(self, rows: Any) -> Batch:
        """Return rows as a batch on the CPU, without labels.

        A sparse feature whose column is a list is a bag; of any other column each row has one id,
        or none.

        Args:
            rows: Raw columns, as `as_table` takes them; there may be none of the rows.

        Raises:
            DataError: They are no table, or a column is missing, has a type that cannot be read, or
                holds a value that cannot; the error names the column, and the row counted from 0.
        """
        table = as_table(rows)
        columns, views, collate = self._of(table.schema)
        held = table.select(list(columns.values())).rename_columns(list(columns))
        for name in views:
            held = held.set_column(held.schema.get_field_index(name), name, _plain(held[name]))
        own_names = dict(zip(columns, columns, strict=True))
        parts = []
        first = 0
        for part in held.combine_chunks().to_batches():
            numbers_N = np.arange(first, first + part.num_rows, dtype=np.int64)
            parts.append(collate.rows(part, own_names, SourceRows(SOURCE, numbers_N)))
            first += part.num_rows
        return collate.batch(parts)

    def no_rows(self) -> Batch:
        """Return a batch without rows."""
        return Collate(self.schema, frozenset(), self.transform).batch([])

    def _of(self, arrow_schema: pa.Schema) -> tuple[dict[str, str], list[str], Collate]:
        """Return for rows with these columns: their own names of them, those of view types, and the
        decoder.

        Rows come with the same columns again and again, so the result for the last ones is kept. It
        is read and replaced as a whole, because other threads may read other rows meanwhile.
        """
        last = self._last
        if last is None or not last[0].equals(arrow_schema):
            columns = self.schema.resolve(arrow_schema, SOURCE)
            kinds = {name: arrow_schema.field(own).type for name, own in columns.items()}
            bags = frozenset(name for name in self.schema.sparse if is_list(kinds[name]))
            views = [name for name, kind in kinds.items() if has_views(kind)]
            last = (arrow_schema, columns, views, Collate(self.schema, bags, self.transform))
            self._last = last
        return last[1:]


def _column(values: Any) -> pa.Array | pa.ChunkedArray:
    """Return a column of a mapping; one of Arrow is taken as it is."""
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    return pa.array(values, from_pandas=True)


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column without views, which data frames of polars have for text."""
    kind = without_views(pa.nulls(0, column.type)).type
    return pa.chunked_array([without_views(chunk) for chunk in column.chunks], kind)
