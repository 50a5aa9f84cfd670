"""Whatever bytes a file has, it is read or refused in one line; the process lives, and
takes no memory to speak of.
"""

import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mutations import (
    OTHERS,
    WRITERS,
    ReadingProcess,
    footer_of,
    mutated,
    other_file,
    other_mutated,
    whole_file,
)
from mutations import read as read_here

from recapp.dataset.parquet import MOST_ROWS
from recapp.dataset.schema import Schema
from recapp.dataset.source import open_source
from recapp.dataset.stream import BatchStream
from recapp.errors import DataError

NUMBERS = range(1428)  # every way of damage for every kind of file, 21 or 22 times
SAMPLE = range(5, len(NUMBERS), 13)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    for suffix, content in (("parquet", whole_file(0)), *((o, other_file(o)) for o in OTHERS)):
        (folder / f"whole.{suffix}").write_bytes(content)
        read_here(folder / f"whole.{suffix}")  # compiles here, not within the reader's seconds
    process = ReadingProcess(folder)
    yield process
    process.stop()


def wrong(reader, numbers):
    """Return what went wrong with damaged files, by their numbers.

    It is checked that some of them were read and some refused.
    """
    answers = {number: reader.read(mutated(number)) for number in numbers}
    assert {isinstance(answer, str) for answer, _ in answers.values()} == {True, False}
    return {number: failure for number, (_, failure) in answers.items() if failure}


@pytest.mark.parametrize("kind", range(len(WRITERS)))
def test_the_files_are_whole_before_they_are_damaged(tmp_path, kind):
    (tmp_path / "whole.parquet").write_bytes(whole_file(kind))
    batches = read_here(tmp_path / "whole.parquet")
    assert not isinstance(batches, str), batches
    assert sum(len(labels) for labels, _, _ in batches) == 300


def test_a_sample_of_damaged_files_is_read_or_refused_in_one_line(reader):
    assert wrong(reader, SAMPLE) == {}


@pytest.mark.full
def test_1428_damaged_files_are_read_or_refused_in_one_line(reader):
    assert wrong(reader, NUMBERS) == {}


@pytest.mark.parametrize("suffix", OTHERS)
def test_files_of_other_formats_are_whole_before_they_are_damaged(tmp_path, suffix):
    (tmp_path / f"whole.{suffix}").write_bytes(other_file(suffix))
    batches = read_here(tmp_path / f"whole.{suffix}")
    assert not isinstance(batches, str), batches
    assert sum(len(labels) for labels, _, _ in batches) == 300


@pytest.mark.parametrize(
    ("suffix", "numbers"),
    [(suffix, range(12)) for suffix in OTHERS]
    + [pytest.param(suffix, range(12, 400), marks=pytest.mark.full) for suffix in OTHERS],
)
def test_damaged_files_of_other_formats_are_read_or_refused_in_one_line(reader, suffix, numbers):
    problems = {}
    for number in numbers:
        _, problem = reader.read(other_mutated(suffix, number), suffix)
        if problem:
            problems[number] = problem
    assert problems == {}


def varint(number):
    """Return a positive number as Thrift's compact protocol writes it."""
    number = 2 * number
    content = bytearray()
    while number > 127:
        content.append(number & 127 | 128)
        number >>= 7
    return bytes([*content, number])


def claiming(path, rows):
    """Write a file of 7,654 rows whose footer claims others, wherever it counts rows or values."""
    table = pa.table({"label": np.zeros(7654, np.int8), "id": np.arange(7654)})
    pq.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)
    content = path.read_bytes()
    begin = footer_of(content)
    footer = content[begin:-8]
    assert footer.count(varint(7654)) >= 4  # the file's, the row group's, and those of two columns
    footer = footer.replace(varint(7654), varint(rows))
    path.write_bytes(content[:begin] + footer + len(footer).to_bytes(4, "little") + b"PAR1")


@pytest.mark.parametrize("rows", [MOST_ROWS + 1, 2**40, 2**62])
def test_a_footer_that_claims_more_rows_than_a_row_group_may_have_is_refused_at_once(
    tmp_path, rows
):
    claiming(tmp_path / "f.parquet", rows)
    with pytest.raises(
        DataError,
        match=rf"f\.parquet: row group 0 claims {rows} rows; from 0 to {MOST_ROWS:,} are read",
    ):
        open_source(str(tmp_path), Schema("label", (), ("id",)))


@pytest.mark.parametrize("rows", [7655, 2**24])
def test_a_footer_that_claims_rows_that_are_not_there_is_found_out_while_reading(tmp_path, rows):
    claiming(tmp_path / "f.parquet", rows)
    schema = Schema("label", (), ("id",))
    began = time.monotonic()
    source = open_source(str(tmp_path), schema)
    assert source.rows == rows
    with pytest.raises(
        DataError,
        match=r"f\.parquet: row group 0 (has fewer rows than its footer says|cannot be read)",
    ):
        list(BatchStream(source, schema, batch_size=1024, training=False))
    assert time.monotonic() - began < 20


def test_a_page_whose_checksum_does_not_fit_names_file_and_row_group(tmp_path):
    path = tmp_path / "f.parquet"
    table = pa.table({"label": np.zeros(2000, np.int8), "id": np.arange(2000)})
    pq.write_table(
        table,
        path,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
        row_group_size=1000,
    )
    content = bytearray(path.read_bytes())
    content[content.find(np.int64(1500).tobytes() + np.int64(1501).tobytes())] ^= 1
    path.write_bytes(content)
    schema = Schema("label", (), ("id",))
    with pytest.raises(
        DataError,
        match=(
            r"f\.parquet: row group 1 cannot be read \(could not verify page integrity, CRC "
            r"checksum"
        ),
    ):
        list(
            BatchStream(
                open_source(str(path), schema), schema, batch_size=64, lanes=1, training=False
            )
        )


def test_text_in_delta_encodings_is_read_though_arrow_makes_no_dictionary_of_it(tmp_path):
    words = [f"item {number % 50}" for number in range(20_000)]
    for encoding in ("DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"):
        table = pa.table({"label": np.zeros(20_000, np.int8), "id": words})
        pq.write_table(
            table, tmp_path / "f.parquet", use_dictionary=False, column_encoding={"id": encoding}
        )
        schema = Schema("label", (), ("id",))
        source = open_source(str(tmp_path), schema)
        (batch,) = BatchStream(
            source, schema, batch_size=20_000, lanes=1, shuffle_rows=0, training=False
        )
        ids = batch.sparse.values().tolist()
        assert len(set(ids)) == 50 and ids[:50] == ids[50:100] == ids[-50:]
