"""The validation rows of training, to measure or try a model without a trainer."""

from collections.abc import Sequence

import pyarrow as pa

from recapp import console
from recapp.dataset.collate import Collate
from recapp.dataset.raw_rows import RawTable
from recapp.dataset.schema import Schema
from recapp.dataset.sequential_rows import decoded_chunks
from recapp.dataset.source import Source
from recapp.errors import DataError
from recapp.run.recipe import Recipe, Train
from recapp.run.run_rows import rows_of
from recapp.sparse.batch import Batch
from recapp.tables.lookups import TableLookup


def validation_source(recipe: Recipe) -> Source | None:
    """Return the validation rows of a run's data set. If the files do not exist, print that and
    return None.
    """
    try:
        val = rows_of(recipe).val
    except DataError as error:
        console.note(f"there are no validation rows here, so nothing is measured: {error}")
        return None
    return val if val.rows else None


def validation_batches(source: Source, recipe: Train, most: int) -> list[Batch]:
    """Return the first validation rows, decoded, in file order.

    Args:
        source: The rows.
        recipe: The recipe of the run.
        most: The largest number of rows.
    """
    schema = recipe.labelled_schema
    transform = recipe.dataset.dense_transform
    rows = source.slice(0, min(most, source.rows))
    collate = Collate(schema, rows.bags, transform)
    return [collate.batch([part]) for part in decoded_chunks(rows, schema, transform)]


def made_up_rows(schema: Schema, lookups: Sequence[TableLookup]) -> RawTable:
    """Return one row that any model of this schema can score: dense values of 0 and the first ids
    that every table of a feature has.

    Args:
        schema: The columns.
        lookups: The lookups of the model.
    """
    dense = {name: pa.array([0.0], pa.float32()) for name in schema.dense}
    first = {
        name: max((x.table.min_key for x in lookups if x.feature == name), default=0)
        for name in schema.sparse
    }
    text = {name: str(number) for name, number in first.items()}
    sparse = {
        name: pa.array([text[name]]) if name in schema.hex else pa.array([number], pa.int64())
        for name, number in first.items()
    }
    times = {name: pa.array([0], pa.int64()) for name in schema.times}
    vectors = {
        name: pa.array([[0.0] * width], pa.list_(pa.float32()))
        for name, width in schema.vectors.items()
    }
    return pa.table({**dense, **sparse, **times, **vectors})
