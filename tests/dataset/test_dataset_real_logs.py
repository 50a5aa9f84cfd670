"""Real Criteo logs, read as they are: 83 files of strings, "" for missing."""

from fractions import Fraction

import pyarrow.parquet as pq
import pytest
import torch

from recapp.dataset.schema import criteo_schema
from recapp.dataset.source import open_source, split
from recapp.dataset.stream import BatchStream
from recapp.errors import DataError
from recapp.sparse.missing_ids import MISSING

SCHEMA = criteo_schema()


@pytest.fixture(scope="module")
def logs(real_data):
    return open_source(str(real_data / "criteo_kaggle_137k" / "train"), SCHEMA)


def read(source, world=1, threads=0, **settings):
    """Return all dense numbers, ids [rows, 26] and labels, in the order of global batches."""
    streams = [
        BatchStream(source, SCHEMA, batch_size=2048, rank=rank, world=world, **settings)
        for rank in range(world)
    ]
    for stream in streams:
        stream.num_threads = threads
    ranks = [list(stream) for stream in streams]
    batches = [batch for parts in zip(*ranks, strict=True) for batch in parts]
    ids = torch.cat([batch.sparse.values().view(26, -1).T for batch in batches])
    return (
        torch.cat([batch.dense_BI for batch in batches]),
        ids,
        torch.cat([batch.labels_B for batch in batches]),
    )


def test_all_rows_clicks_and_gaps_are_read(logs):
    dense, ids, labels = read(logs, training=False)
    assert (logs.rows, len(labels), int(labels.sum())) == (137_139, 137_139, 35_213)
    assert int((ids[:, 21] == MISSING).sum()) / 137_139 == pytest.approx(0.761, abs=0.001)
    assert not (ids[:, 0] == MISSING).any()
    assert ids[ids != MISSING].min() >= 0
    assert ids.max() < 2**32
    assert dense.min() == 0


def test_a_file_is_read_as_python_reads_it(real_data):
    file = min((real_data / "criteo_kaggle_137k" / "train").glob("*.parquet"))
    rows = pq.read_table(file).to_pylist()
    source = open_source(str(file), SCHEMA)
    stream = BatchStream(
        source,
        SCHEMA,
        batch_size=source.rows,
        lanes=1,
        shuffle_rows=0,
        training=False,
        dense_transform="none",
    )
    batch = next(iter(stream))
    assert batch.labels_B.tolist() == [float(row["label"]) for row in rows]
    for index in range(13):
        assert batch.dense_BI[:, index].tolist() == [
            float(row[f"I{index + 1}"] or 0) for row in rows
        ]
    for index in range(26):
        words = [row[f"C{index + 1}"] for row in rows]
        assert batch.sparse[f"C{index + 1}"].values().tolist() == [
            int(word, 16) if word else MISSING for word in words
        ]


@pytest.mark.parametrize(("world", "threads"), [(2, 0), (5, 0), (1, 2)])
def test_ranks_and_threads_do_not_change_the_order(logs, world, threads):
    part = logs.slice(0, 20_000)
    for one, other in zip(read(part), read(part, world, threads), strict=True):
        assert one.equal(other)


def test_the_default_split_is_the_last_seventh(logs):
    train, val = split(logs, Fraction(1, 7))
    assert (train.rows, val.rows) == (117_547, 19_592)
    assert read(val, training=False)[2].mean().item() == pytest.approx(0.2609, abs=0.0001)


def test_the_unlabelled_part_is_read_without_labels_and_refused_with(real_data):
    path = str(real_data / "criteo_kaggle_137k" / "test")
    with pytest.raises(DataError, match="no column for label"):
        open_source(path, SCHEMA)
    assert open_source(path, criteo_schema(label=None)).rows == 18_181


def test_the_directory_above_names_the_directories_with_data(real_data):
    with pytest.raises(DataError, match="test, train are of several splits"):
        open_source(str(real_data / "criteo_kaggle_137k"), SCHEMA)
