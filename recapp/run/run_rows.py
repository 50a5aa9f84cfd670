"""The rows of a recipe's data set, read without starting a rank or importing Lightning.

recipe -> rows -> sizes of tables, statistics of ids, batches of validation rows
"""

from collections.abc import Sequence

import pyarrow as pa

from recapp import console
from recapp.dataset.click_rows import ClickRows, open_rows
from recapp.dataset.collate import Collate, RawTable
from recapp.dataset.data_settings import DataSettings
from recapp.dataset.schema import Schema
from recapp.dataset.sequential_rows import COUNTED_ROWS, decoded_chunks, table_rows
from recapp.dataset.source import Source
from recapp.dataset.synthetic import write_clicks
from recapp.errors import DataError
from recapp.run.recipe import OnPaper, Recipe, Train
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.tables.config import EmbeddingConfig, TableLookup
from recapp.tables.positions import EXPECTED_ROWS
from recapp.tables.statistics import TableStatistics


def rows_of(recipe: Recipe) -> ClickRows:
    """Return the rows of the data set.

    Raises:
        DataError: The files do not exist.
    """
    return open_rows(recipe.dataset.scaled, recipe.schema, recipe.order_seed)


def statistics_of(
    recipe: Recipe, tables: Sequence[EmbeddingConfig], lookups: Sequence[TableLookup]
) -> dict[str, TableStatistics]:
    """Return id statistics by table, from the first training rows; empty if there are no files.

    Args:
        recipe: The recipe.
        tables: The tables of the model.
        lookups: The lookups of the tables.
    """
    if not {x.feature for x in lookups} <= set(recipe.schema.features):
        return {}  # the tables are of another data set
    try:
        rows = rows_of(recipe).fitted()
    except DataError:
        return {}
    return rows.statistics(tables, lookups)


def sized_on_paper(recipe: OnPaper) -> OnPaper:
    """Return a recipe whose derived columns are fitted and whose tables are sized by their ids, as
    in training. Print the source of the sizes.

    Sizes are assumed, and no rows read, if `statistics=assumed` or the data do not exist.
    """
    if not recipe.counts_ids and not recipe.schema.fits:
        return recipe
    why = "statistics=assumed"
    if recipe.statistics != "assumed":
        try:
            rows = rows_of(recipe).fitted()
            counted = None
            if recipe.counts_ids:
                counted = table_rows(rows.train, rows.schema, recipe.most_rows)
        except DataError as error:
            why = str(error)
        else:
            if counted is not None:
                console.note(
                    f"tables are sized by the distinct ids of the first {COUNTED_ROWS:,} training "
                    "rows, as in training"
                )
            return recipe.sized(counted, rows.schema.values or None)
    if recipe.counts_ids:
        assumed = recipe.most_rows or EXPECTED_ROWS
        console.note(f"every table is assumed to have {assumed:,} rows, no ids were counted: {why}")
    else:
        console.note(f"tables of derived columns have the rows that settings say: {why}")
    return recipe


def write_generated(dataset: DataSettings) -> None:
    """Write the data set that the settings describe, unless it exists. Show progress."""
    small = dataset.scaled
    assert small.generate is not None and isinstance(small.path, str)
    rows = small.generate.rows
    with console.progress(f"writing {console.short_path(small.path)}", rows) as advance:
        written = 0

        def show(done: int, _total: int) -> None:
            nonlocal written
            advance(done - written)
            written = done

        write_clicks(small.path, small.generate, small.table_rows, show)


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
    """Return one row that any model of this schema can score: numbers of 0 and the first ids
    that every table of a feature has.

    Args:
        schema: The columns.
        lookups: The lookups of the model.
    """
    numbers = (*schema.dense, *schema.id_weight_columns)
    dense = {name: pa.array([0.0], pa.float32()) for name in numbers}
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
