"""The rows that training validated on, for whoever measures or tries a model without a trainer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from recapp import console
from recapp.app.build_rows import data_settings, rows_of
from recapp.dataset.collate import Collate
from recapp.dataset.files import file_names
from recapp.dataset.raw_rows import RawTable
from recapp.dataset.schema import Schema, schema_from
from recapp.dataset.sequential_chunks import arrow_chunks, decoded_chunks
from recapp.dataset.source import Source, open_files
from recapp.errors import DataError
from recapp.sparse.batch import Batch
from recapp.tables.config import EmbeddingConfig


def validation_source(settings: Mapping[str, Any]) -> Source | None:
    """Return the validation rows of a run's data set; None where its files are not here, which is
    noted.
    """
    try:
        val = rows_of(settings).val
    except DataError as error:
        console.note(f"validation rows are not here, so nothing is measured on them: {error}")
        return None
    return val if val.rows else None


def validation_batches(source: Source, settings: Mapping[str, Any], most: int) -> list[Batch]:
    """Return the first validation rows, decoded, in file order.

    Args:
        source: The rows.
        settings: Those of the run.
        most: The largest number of rows.
    """
    schema = schema_from(settings)
    transform = settings["dataset"]["dense_transform"]
    rows = source.slice(0, min(most, source.rows))
    collate = Collate(schema, rows.bags, transform)
    return [collate.batch([part]) for part in decoded_chunks(rows, schema, transform)]


def example_rows(source: Source, schema: Schema, rows: int) -> RawTable:
    """Return the first rows as their files have them, under canonical names and without a label."""
    wanted = (*schema.dense, *schema.sparse)
    parts = []
    for file, _, chunk in arrow_chunks(source.slice(0, rows)):
        columns = {name: chunk.column(file.columns[name]) for name in wanted}
        parts.append(pa.table({name: _plain(column) for name, column in columns.items()}))
    return pa.concat_tables(parts).combine_chunks()


def first_file_rows(settings: Mapping[str, Any], rows: int) -> RawTable:
    """Return the first rows of the first validation file, or of the first training file where no
    file is of validation alone, as `example_rows` does. No other file is opened.

    Args:
        settings: Those of the run.
        rows: The largest number of rows.

    Raises:
        DataError: The file is not here, has no row, or has other columns.
    """
    data = data_settings(settings)
    paths = data.val_path or data.path
    first = file_names(paths if isinstance(paths, str) else list(paths))[:1]
    schema = replace(schema_from(settings), label=None)
    source = open_files(first, schema)
    if not source.rows:
        raise DataError(f"{first[0]}: has no row")
    return example_rows(source, schema, min(rows, source.rows))


def made_up_rows(schema: Schema, tables: Mapping[str, EmbeddingConfig]) -> RawTable:
    """Return one row that any model of this schema can score: numbers of 0, first ids.

    Args:
        schema: The columns.
        tables: A table that each sparse feature reads.
    """
    dense = {name: pa.array([0.0], pa.float32()) for name in schema.dense}
    first = {name: tables[name].min_key if name in tables else 0 for name in schema.sparse}
    text = {name: str(number) for name, number in first.items()}
    sparse = {
        name: pa.array([text[name]]) if name in schema.hex else pa.array([number], pa.int64())
        for name, number in first.items()
    }
    return pa.table({**dense, **sparse})


def _plain(column: pa.Array) -> pa.Array:
    """Return a column that is encoded as a dictionary as its values."""
    if pa.types.is_dictionary(column.type):
        return column.cast(column.type.value_type)
    return column
