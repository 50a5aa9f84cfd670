"""Small Parquet sets whose rows carry their own number, so that a test sees which rows arrived
and in what order.
"""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recapp.dataset.schema import Schema
from recapp.dataset.source import open_source
from recapp.dataset.stream import BatchStream

SCHEMA = Schema(label="label", dense=("row",), sparse=("one", "many", "other"))


def numbered_table(first, rows):
    """Return rows first, first + 1, ...

    `one` is 10 * row, `many` holds row % 4 times the row, `other` is missing in every third row.
    """
    numbers = range(first, first + rows)
    return pa.table(
        {
            "label": pa.array([row % 2 for row in numbers], pa.int8()),
            "row": pa.array(list(numbers), pa.int64()),
            "one": pa.array([row * 10 for row in numbers], pa.int64()),
            "many": pa.array([[row] * (row % 4) for row in numbers], pa.list_(pa.int64())),
            "other": pa.array([None if row % 3 == 0 else row for row in numbers], pa.int64()),
        }
    )


def write_numbered(directory, files):
    """Write Parquet files of numbered rows and return their directory.

    Args:
        directory: The directory, which is made.
        files: For every file the sizes of its row groups.
    """
    directory.mkdir(parents=True, exist_ok=True)
    first = 0
    for number, groups in enumerate(files):
        with pq.ParquetWriter(
            directory / f"part-{number}.parquet", numbered_table(0, 0).schema
        ) as writer:
            for rows in groups:
                writer.write_table(numbered_table(first, rows), row_group_size=max(rows, 1))
                first += rows
    return directory


def numbered_source(directory, files):
    return open_source(str(write_numbered(directory, files)), SCHEMA)


def row_numbers(batch):
    return [int(number) for number in batch.dense_BI[:, 0]]


def rank_batches(source, *, world=1, threads=0, position=(0, 0), **settings):
    """Return a list for each rank: the row numbers of its batches."""
    ranks = []
    for rank in range(world):
        stream = BatchStream(
            source, SCHEMA, rank=rank, world=world, dense_transform="none", **settings
        )
        stream.set_position(*position)
        stream.num_threads = threads
        ranks.append([row_numbers(batch) for batch in stream])
    return ranks


def global_batches(source, **settings):
    """Return the row numbers of every global batch: the concatenation of the ranks' batches."""
    ranks = rank_batches(source, **settings)
    assert len({len(batches) for batches in ranks}) == 1, "ranks yield different numbers of batches"
    return [[row for batch in parts for row in batch] for parts in zip(*ranks, strict=True)]


def write_columns(path, **columns):
    """Write a set of one file and one row group with the given columns (arrays or lists)."""
    pq.write_table(
        pa.table(
            {
                name: column if isinstance(column, pa.Array) else pa.array(column)
                for name, column in columns.items()
            }
        ),
        path,
    )
    return path


def one_batch(path, schema, **settings):
    """Return everything in a small file as one batch, in file order."""
    source = open_source(str(path), schema)
    stream = BatchStream(
        source, schema, batch_size=source.rows, lanes=1, shuffle_rows=0, training=False, **settings
    )
    return next(iter(stream))


def values_of(batch, key):
    return batch.sparse[key].values().tolist()


def lengths_of(batch, key):
    return batch.sparse[key].lengths().tolist()


def random_groups(seed, total, largest):
    """Return row group sizes that add up to `total`."""
    random = np.random.default_rng(seed)
    sizes = []
    while sum(sizes) < total:
        sizes.append(int(min(random.integers(1, largest + 1), total - sum(sizes))))
    return sizes
