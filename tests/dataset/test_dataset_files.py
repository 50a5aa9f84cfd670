"""Where logs lie as people keep them: partitions, text that is converted first, places that are no directories."""

import gzip
import os

import pytest
from dataset_files import numbered_table, one_batch, row_numbers, write_columns, write_numbered

from recapp.dataset.files import file_names
from recapp.dataset.schema import Schema, criteo_schema
from recapp.dataset.source import open_source
from recapp.errors import DataError

ROW = Schema("label", ("row",), ("one",))


@pytest.fixture
def partitions(tmp_path):
    """dt=2026-1-2, dt=2026-1-10 with hour=2 and hour=10 below, some of them with two files, and things that are no data."""
    first = 0
    for day in ("2026-1-10", "2026-1-2"):
        for hour in (10, 2):
            place = write_numbered(tmp_path / "logs" / f"dt={day}" / f"hour={hour}", [[1], [1]])
            (place / "_SUCCESS").touch()
            first += 1
    (tmp_path / "logs" / "_temporary").mkdir()
    (tmp_path / "logs" / "dt=2026-1-3").mkdir()
    return tmp_path / "logs"


def test_a_hive_directory_is_one_data_set_in_natural_order_of_partitions_then_files(partitions):
    names = [name.removeprefix(f"{partitions}/") for name in file_names(str(partitions))]
    assert names == [
        f"dt=2026-1-{day}/hour={hour}/part-{part}.parquet"
        for day in (2, 10)
        for hour in (2, 10)
        for part in (0, 1)
    ]
    assert open_source(str(partitions), ROW).rows == 8


def test_a_glob_of_partitions_gives_their_files(partitions):
    names = file_names(str(partitions / "dt=2026-1-*" / "hour=2"))
    assert [name.split("/")[-3] for name in names] == ["dt=2026-1-2"] * 2 + ["dt=2026-1-10"] * 2
    assert len(file_names(str(partitions / "dt=2026-1-1*"))) == 4


def test_the_name_of_a_partition_is_no_column(partitions):
    with pytest.raises(
        DataError,
        match=r"no column for dt; tried dt; it is a partition of the directory, .* write it into the files",
    ):
        open_source(str(partitions), Schema("label", (), ("dt", "one")))


def test_files_beside_partitions_are_refused_because_one_of_both_would_be_left_out(partitions):
    write_numbered(partitions, [[1]])
    with pytest.raises(
        DataError,
        match=rf"holds part-0\.parquet beside partitions such as dt=2026-1-2; .*{partitions}/\*\.parquet or ",
    ):
        file_names(str(partitions))


def test_a_hive_directory_without_files_has_no_data(tmp_path):
    (tmp_path / "dt=1").mkdir()
    with pytest.raises(DataError, match=r"no Parquet files .*; the directory has dt=1"):
        file_names(str(tmp_path))


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/logs",
        "gs://b/x.parquet",
        "hdfs://name/logs/*",
        "https://x.org/a.parquet",
        "abfs://c@a/x",
    ],
)
def test_a_uri_says_what_is_missing(uri):
    scheme = uri.partition("://")[0]
    with pytest.raises(
        DataError,
        match=rf"^dataset\.val_path={uri.replace('*', '.')}: .* no client for {scheme}://; mount it or copy",
    ):
        file_names([uri], setting="dataset.val_path")


def test_a_file_uri_is_told_as_the_path_that_it_is():
    with pytest.raises(DataError, match=r"file:///data/x: write the path itself, /data/x$"):
        file_names("file:///data/x")


def converted(path, setting="dataset.path"):
    """Run the very lines that the error shows, as a user would; the path that it names then."""
    with pytest.raises(DataError) as error:
        file_names(str(path), setting=setting)
    text, lines = str(error.value), error.value.__notes__
    assert "\n" not in text and text.startswith(f"{setting}={path}: ")
    assert len(lines) == 3 and not any("\n" in line for line in lines)
    exec("\n".join(lines), {})
    return text.rpartition(f"{setting}=")[2]


def rows_of(path, schema=ROW):
    return row_numbers(one_batch(path, schema, dense_transform="none"))


CSV = "label,row,one\n0,1,a\n1,2,7\n"


@pytest.mark.parametrize("name", ["logs.csv", "logs.tsv", "logs.csv.gz", "logs.tsv.gz", "day_0.gz"])
def test_the_lines_convert_a_file_whatever_its_delimiter_and_compression(tmp_path, name):
    text = CSV.replace(",", "\t") if "csv" not in name else CSV
    (tmp_path / name).write_bytes(
        gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
    )
    assert rows_of(converted(tmp_path / name)) == [1, 2]


@pytest.mark.parametrize("given", ["", "*.csv", "day_*"])
def test_the_lines_convert_a_directory_and_a_glob(tmp_path, given):
    for day in (1, 2):
        (tmp_path / f"day_{day}.csv").write_text(CSV.replace(",1,", f",{day}0,"))
    if not given:
        (tmp_path / "README.md").write_text("no data")
    assert rows_of(converted(tmp_path / given, "dataset.test_path")) == [10, 2, 20, 2]


def test_raw_criteo_text_without_a_header_is_converted_and_read_by_position(tmp_path):
    lines = [
        "\t".join([str(label), *map(str, range(13)), *(f"{label:02x}{n:06x}" for n in range(26))])
        for label in (0, 1, 1)
    ]
    lines[1] = lines[1].replace("\t3\t", "\t\t")
    (tmp_path / "day_0.tsv").write_text("\n".join(lines) + "\n")
    batch = one_batch(converted(tmp_path / "day_0.tsv"), criteo_schema(), dense_transform="none")
    assert batch.labels_B.tolist() == [0, 1, 1]
    assert batch.dense_BI[:, 3].tolist() == [3, 0, 3]
    assert batch.sparse["C26"].values().tolist() == [25, 2**24 + 25, 2**24 + 25]


@pytest.mark.parametrize(("header", "named"), [
    ("label,user,item", True), ("0,1,2", True), (",label,user", True), ('"label","user"', True), ("a;b;c", True),
    ("1,5,0", False), ("0,1,1", False), ("1,,abc", False), ("3,x,y", False), ("0.5,a", False),
])  # fmt: skip
def test_a_header_is_told_from_a_row(tmp_path, header, named):
    (tmp_path / "x.csv").write_text(f"{header}\n")
    with pytest.raises(DataError) as error:
        file_names(str(tmp_path / "x.csv"))
    assert ("autogenerate_column_names" not in error.value.__notes__[1]) == named


@pytest.mark.parametrize("content", [b"", b"\x1f\x8bno gzip", b"\xff\xfe\x00"])
def test_text_that_cannot_be_looked_at_is_refused_all_the_same(tmp_path, content):
    (tmp_path / "x.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"\.gz is read after it is converted"):
        file_names(str(tmp_path / "x.gz"))


def test_parquet_among_text_is_read_and_text_left_alone(tmp_path):
    table = numbered_table(0, 3)
    write_columns(
        tmp_path / "a.parquet",
        **{name: table[name].combine_chunks() for name in table.column_names},
    )
    (tmp_path / "a.csv").write_text(CSV)
    assert rows_of(tmp_path) == [0, 1, 2]


def test_what_is_no_file_and_what_cannot_be_looked_at_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.parquet")
    with pytest.raises(DataError, match=r"pipe\.parquet: is neither a file nor a directory"):
        file_names(str(tmp_path / "pipe.parquet"))
    with pytest.raises(DataError, match=r"no Parquet files .*; the directory has pipe\.parquet"):
        file_names(str(tmp_path))
    with pytest.raises(DataError, match=r"^dataset\.path=x+: cannot be read \(File name too long\)"):
        file_names("x" * 5000)
