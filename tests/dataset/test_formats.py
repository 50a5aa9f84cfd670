"""Order, resume, validation and prediction take files of every format like those of Parquet."""

import bz2
import csv
import gzip
import io
import json
from fractions import Fraction

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from dataset_files import numbered_table, row_numbers

from recapp.dataset import text_rows
from recapp.dataset.data_file import Fingerprint, difference, file_facts
from recapp.dataset.data_settings import ScoringSettings
from recapp.dataset.schema import Schema
from recapp.dataset.scoring import open_input
from recapp.dataset.sequential_rows import check_first_rows, table_rows
from recapp.dataset.source import open_source, split
from recapp.dataset.stream import BatchStream
from recapp.errors import DataError

SCHEMA = Schema("label", ("row",), ("one", "other"), integers=("one",))
FILES = [40, 0, 25]


def delimited(table, delimiter, end="\n", quoting=csv.QUOTE_ALL):
    """Return a table as text."""
    text = io.StringIO()
    lines = csv.writer(text, delimiter=delimiter, quoting=quoting, lineterminator=end)
    lines.writerow(table.column_names)
    lines.writerows(zip(*table.to_pydict().values(), strict=True))
    return text.getvalue()


def json_lines(table):
    return "".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode()


def arrow(table, writer, rows, **options):
    sink = pa.BufferOutputStream()
    with writer(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as file:
        file.write_table(table, max_chunksize=rows)
    return sink.getvalue().to_pybytes()


def feather_of(table):
    sink = pa.BufferOutputStream()
    feather.write_feather(table, sink)
    return sink.getvalue().to_pybytes()


WRITERS = {
    "csv": lambda table: delimited(table, ",", quoting=csv.QUOTE_MINIMAL).encode(),
    "tsv": lambda table: delimited(table, "\t", "\r\n").encode("utf-8-sig"),
    "csv.gz": lambda table: gzip.compress(delimited(table, ";").encode()),
    "csv.zst": lambda table: pa.compress(delimited(table, "|").encode(), "zstd", asbytes=True),
    "tsv.bz2": lambda table: bz2.compress(delimited(table, "\t").encode("utf-16")),
    "jsonl": json_lines,
    "ndjson.gz": lambda table: gzip.compress(json_lines(table)),
    "arrow": lambda table: arrow(table, pa.ipc.new_file, 100),
    "arrows": lambda table: arrow(table, pa.ipc.new_stream, 7, compression="zstd"),
    "feather": feather_of,
}


@pytest.fixture
def directories(tmp_path):
    """The same rows in a directory of each format."""
    first = 0
    for name in (*WRITERS, "parquet"):
        (tmp_path / name).mkdir()
    for number, rows in enumerate(FILES):
        table = numbered_table(first, rows).drop(["many"])
        pq.write_table(table, tmp_path / "parquet" / f"{number}.parquet")
        for name, written in WRITERS.items():
            (tmp_path / name / f"{number}.{name}").write_bytes(written(table))
        first += rows
    return tmp_path / "csv", tmp_path / "parquet"


def batches(source, *, position=(0, 0), threads=0, **settings):
    stream = BatchStream(source, SCHEMA, batch_size=8, lanes=4, shuffle_rows=16, **settings)
    stream.set_position(*position)
    stream.num_threads = threads
    return list(stream)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"position": (1, 3)},  # resumed in the middle of an epoch
        {"rank": 1, "world": 2, "threads": 2},
        {"training": False},
    ],
)
def test_batches_are_those_of_the_same_rows_in_parquet(directories, settings):
    parquets = batches(open_source(str(directories[1]), SCHEMA), **settings)
    assert parquets
    for name in WRITERS:
        ours = batches(open_source(str(directories[1].parent / name), SCHEMA), **settings)
        for got, want in zip(ours, parquets, strict=True):
            assert got.dense_BI.equal(want.dense_BI) and got.labels_B.equal(want.labels_B), name
            assert got.sparse.values().equal(want.sparse.values()), name


@pytest.mark.parametrize("settings", [{}, {"training": False}, {"threads": 2, "training": False}])
@pytest.mark.parametrize("world", [1, 3])
def test_rows_have_their_places_in_the_data_set(directories, world, settings):
    for directory in directories:
        _, val = split(open_source(str(directory), SCHEMA), Fraction(2, 3))
        seen = []
        for rank in range(world):
            own = {"rank": rank, "world": world, "dense_transform": "none", "numbered": True}
            for batch in batches(val, **own, **settings):
                assert batch.row_numbers_B.tolist() == row_numbers(batch)
                seen += row_numbers(batch)
        assert settings == {} or sorted(seen) == list(range(sum(FILES) // 3, sum(FILES)))
    assert batches(val)[0].row_numbers_B is None


def test_validation_rows_are_cut_off_the_end(directories):
    fit, val = split(open_source(str(directories[0]), SCHEMA), Fraction(1, 5))
    read = batches(val, training=False, dense_transform="none")
    seen = [row for batch in read for row in row_numbers(batch)]
    assert sorted(seen) == list(range(fit.rows, sum(FILES)))


def test_rows_are_predicted_with_columns_beside_the_scores(directories):
    settings = ScoringSettings(input=str(directories[0]), columns=["other"], rows_per_batch=16)
    input = open_input(settings, SCHEMA, "none")
    read = list(input.batches(range(input.rows)))
    assert [row for batch in read for row in row_numbers(batch)] == list(range(sum(FILES)))
    others = [text for batch in read for text in batch.kept["other"].to_pylist()]
    assert others == ["" if row % 3 == 0 else str(row) for row in range(sum(FILES))]


def test_a_checkpoint_knows_whether_files_are_the_same(directories):
    folder, _ = directories
    trained = Fingerprint.of(file_facts(open_source(str(folder), SCHEMA).files))
    changed = (folder / "2.csv").read_text().replace("1,", "0,", 1)
    (folder / "2.csv").write_text(changed)
    found = difference(trained, file_facts(open_source(str(folder), SCHEMA).files))
    assert found == "2.csv has other contents, with as many rows and bytes as before"


def test_the_first_rows_size_tables_and_show_text_that_is_no_number(directories):
    source = open_source(str(directories[0]), SCHEMA)
    assert table_rows(source, SCHEMA, 100) == [100, 100]
    check_first_rows(source, SCHEMA)
    text = (directories[0] / "0.csv").read_text().replace("0,5,50", "0,x,50")
    (directories[0] / "0.csv").write_text(text.replace("1,5,50", "1,x,50"))
    with pytest.raises(DataError, match="column row, row 5 holds 'x'"):
        check_first_rows(open_source(str(directories[0]), SCHEMA), SCHEMA)


def test_errors_name_the_format_and_files_that_change_are_refused(directories):
    folder, _ = directories
    source = open_source(str(folder), SCHEMA)
    (folder / "0.csv").write_text("label,row,one,other\n1,2\n")
    with pytest.raises(DataError, match=r"0\.csv: has changed since it was opened"):
        batches(source)
    with pytest.raises(DataError, match=r"0\.csv: line 2 has 2 columns where 4 are expected"):
        open_source(str(folder), SCHEMA)


@pytest.mark.parametrize(
    "settings", [{}, {"position": (1, 3)}, {"rank": 1, "world": 2, "threads": 2}]
)
@pytest.mark.parametrize("name", ["csv", "tsv", "jsonl"])
def test_ranges_of_text_are_read_like_row_groups(tmp_path, monkeypatch, name, settings):
    monkeypatch.setattr(text_rows, "GROUP_ROWS", 8)
    monkeypatch.setattr(text_rows, "BATCH_ROWS", 4)
    monkeypatch.setattr(text_rows, "BLOCK_BYTES", 64)
    table = numbered_table(0, 65).drop(["many"])
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=8)
    (tmp_path / f"x.{name}").write_bytes(WRITERS[name](table))
    text, parquet = (
        batches(open_source(str(tmp_path / file), SCHEMA), **settings)
        for file in (f"x.{name}", "x.parquet")
    )
    assert len(text) == len(parquet) > 2
    for got, want in zip(text, parquet, strict=True):
        assert got.dense_BI.equal(want.dense_BI) and got.labels_B.equal(want.labels_B)
        assert got.sparse.values().equal(want.sparse.values())
