"""Rows that do not come from a data set's files but from whoever asks for scores, as a batch.

    Arrow table, any of the namings that training knows  ->  Batch without labels

They go the way of training's rows: the same schema finds the columns, the same decoder reads ids
and numbers, the same transform is applied.
"""

from dataclasses import replace
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from recapp.dataset.arrow_types import is_list
from recapp.dataset.collate import Collate, SourceRows, check_transform
from recapp.dataset.schema import Schema
from recapp.sparse.batch import Batch

RawTable: TypeAlias = pa.Table
"""Raw columns, under the names that a schema knows; others are left out."""

SOURCE = "the rows"  # what stands where errors of files name the file


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
        self.schema = replace(schema, label=None)
        self.transform = transform

    def batch(self, rows: RawTable) -> Batch:
        """Return rows as a batch on the CPU; its labels are NaN.

        A sparse feature whose column is a list is a bag; of any other column each row has one id,
        or none.

        Args:
            rows: Raw columns; there may be none of the rows.

        Raises:
            DataError: A column is missing, has a type that cannot be read, or holds a value that
                cannot; the error names the column, and the row counted from 0.
        """
        columns = self.schema.resolve(rows.schema, SOURCE)
        held = pa.RecordBatch.from_arrays(
            [_whole(rows.column(own)) for own in columns.values()], names=list(columns)
        )
        bags = frozenset(
            name for name in self.schema.sparse if is_list(held.schema.field(name).type)
        )
        collate = Collate(self.schema, bags, self.transform)
        own_names = dict(zip(columns, columns, strict=True))
        numbers_N = np.arange(held.num_rows, dtype=np.int64)
        return collate.batch([collate.rows(held, own_names, SourceRows(SOURCE, numbers_N))])


def _whole(column: pa.ChunkedArray) -> pa.Array:
    whole = column.combine_chunks()
    return whole.combine_chunks() if isinstance(whole, pa.ChunkedArray) else whole
