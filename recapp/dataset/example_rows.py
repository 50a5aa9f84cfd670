"""Read the first rows of a source undecoded, as the example of a stored model.

file -> Arrow table -> plain values in a checkpoint's manifest -> Arrow table
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from recapp.dataset.raw_rows import RawTable
from recapp.dataset.schema import Schema
from recapp.dataset.sequential_chunks import arrow_chunks
from recapp.dataset.source import Source

PlainRow = Mapping[str, Any]
"""A row by column name: numbers, text, None, and lists of these."""


def example_rows(source: Source, schema: Schema, rows: int) -> RawTable:
    """Return the first rows undecoded, under canonical names and without labels."""
    wanted = (*schema.dense, *schema.sparse)
    parts = []
    for file, _, chunk in arrow_chunks(source.slice(0, rows)):
        columns = {name: chunk.column(file.columns[name]) for name in wanted}
        parts.append(pa.table({name: _decoded(column) for name, column in columns.items()}))
    return pa.concat_tables(parts).combine_chunks()


def plain_rows(table: RawTable) -> list[dict[str, Any]]:
    """Return rows as values for JSON: bytes as text, NaN and infinities as None."""
    return [{name: _plain(value) for name, value in row.items()} for row in table.to_pylist()]


def table_of(rows: Sequence[PlainRow], schema: Schema) -> RawTable:
    """Return the table of plain rows, with the columns of a schema.

    Raises:
        ValueError: A row lacks a column, or the values of a column do not share an Arrow type.
        KeyError: As for ValueError.
    """
    columns = {}
    for name in (*schema.dense, *schema.sparse):
        column = pa.array([row[name] for row in rows])
        if pa.types.is_null(column.type):  # all values are missing, so the type is unknown
            column = pa.nulls(len(rows), pa.float32() if name in schema.dense else pa.int64())
        columns[name] = column
    return pa.table(columns)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _decoded(column: pa.Array) -> pa.Array:
    """Return a column without its dictionary."""
    if pa.types.is_dictionary(column.type):
        return column.cast(column.type.value_type)
    return column
