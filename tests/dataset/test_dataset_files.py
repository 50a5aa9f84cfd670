"""Logs as people keep them: partitions, text, paths that are no directories."""

import os

import numpy as np
import pyarrow as pa
import pytest
from dataset_files import one_batch, row_numbers, write_numbered

from recapp.dataset.decode import decode_ids
from recapp.dataset.files import file_names
from recapp.dataset.schema import Schema, criteo_schema
from recapp.dataset.sequential_rows import decoded_chunks
from recapp.dataset.source import open_source
from recapp.errors import DataError
from recapp.sparse.missing_ids import MISSING

ROW = Schema("label", ("row",), ("one",))


@pytest.fixture
def partitions(tmp_path):
    """Write dt=2026-1-2 and dt=2026-1-10 with hour=2 and hour=10 below.

    Some of them have two files, and there are things that are no data.
    """
    first = 0
    for day in ("2026-1-10", "2026-1-2"):
        for hour in (10, 2):
            directory = write_numbered(tmp_path / "logs" / f"dt={day}" / f"hour={hour}", [[1], [1]])
            (directory / "_SUCCESS").touch()
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


def test_a_partition_is_a_column_where_it_is_named(partitions):
    schema = Schema("label", ("hour",), ("dt", "one"))
    source = open_source(str(partitions), schema)
    found = [
        (rows.numbers_IN[0], rows.ids_SN[0]) for rows in decoded_chunks(source, schema, "none")
    ]
    hours = np.concatenate([numbers for numbers, _ in found])
    days = np.concatenate([ids for _, ids in found])
    assert hours.tolist() == [2, 2, 10, 10] * 2
    texts = pa.array(["2026-1-2"] * 4 + ["2026-1-10"] * 4)
    assert days.tolist() == decode_ids(texts).tolist()
    assert source.types.names == ["label", "hour", "dt", "one"]
    with pytest.raises(DataError, match="no column for day"):
        open_source(str(partitions), Schema("label", (), ("day", "one")))


def test_a_column_of_the_file_goes_before_a_partition_of_its_name(tmp_path):
    directory = write_numbered(tmp_path / "one=7" / "dt=a%20b", [[3]])
    (tmp_path / "one=7" / "dt=__HIVE_DEFAULT_PARTITION__").mkdir()
    write_numbered(tmp_path / "one=7" / "dt=__HIVE_DEFAULT_PARTITION__", [[3]])
    schema = Schema("label", (), ("one", "dt"))
    source = open_source(str(directory.parent), schema)
    ids_SN = np.concatenate([rows.ids_SN for rows in decoded_chunks(source, schema)], axis=1)
    assert 7 not in ids_SN[0]
    assert {*ids_SN[1].tolist()} == {MISSING, *decode_ids(pa.array(["a b"])).tolist()}


def test_files_beside_partitions_are_refused_because_one_of_both_would_be_left_out(partitions):
    write_numbered(partitions, [[1]])
    with pytest.raises(
        DataError,
        match=(
            r"holds part-0\.parquet beside partitions such as dt=2026-1-2; "
            rf".*{partitions}/\*\.parquet or "
        ),
    ):
        file_names(str(partitions))


def test_a_hive_directory_without_files_has_no_data(tmp_path):
    (tmp_path / "dt=1").mkdir()
    with pytest.raises(
        DataError, match=r"no Parquet, CSV, JSON lines or Arrow files .*; the directory has dt=1"
    ):
        file_names(str(tmp_path))


def test_a_file_uri_is_refused_with_the_path_that_it_means():
    with pytest.raises(DataError, match=r"file:///data/x: write the path itself, /data/x$"):
        file_names("file:///data/x")


def rows_of(path, schema=ROW):
    return row_numbers(one_batch(path, schema, dense_transform="none"))


def refused(path):
    """Return the one line that refuses a path."""
    with pytest.raises(DataError) as error:
        file_names(str(path))
    assert "\n" not in str(error.value)
    return str(error.value)


def csv_file(path, row=7):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"label,row,one\n0,{row},a\n")
    return path


def file_list(directory, *lines):
    (directory / "_file_list.txt").write_text("\n".join(lines))
    return directory / "_file_list.txt"


CSV = "label,row,one\n0,1,a\n1,2,7\n"


@pytest.mark.parametrize("given", ["", "*.csv", "day_*"])
def test_text_of_a_directory_and_of_a_glob_is_read(tmp_path, given):
    for day in (1, 2):
        (tmp_path / f"day_{day}.csv").write_text(CSV.replace(",1,", f",{day}0,"))
    if not given:
        (tmp_path / "README.md").write_text("no data")
    assert rows_of(tmp_path / given) == [10, 2, 20, 2]


def test_text_without_a_suffix_is_recognised_by_its_bytes(tmp_path):
    for day in (1, 2):
        (tmp_path / f"day_{day}").write_text(CSV.replace(",1,", f",{day}0,").replace(",", "|"))
    assert rows_of(tmp_path) == rows_of(tmp_path / "day_?") == [10, 2, 20, 2]


def test_a_directory_without_data_says_what_is_there(tmp_path):
    (tmp_path / "clicks.inter").write_text(CSV)
    assert refused(tmp_path).endswith("the directory has clicks.inter")
    assert rows_of(tmp_path / "*.inter") == [1, 2]


def test_raw_criteo_text_without_a_header_is_read_by_position(tmp_path):
    lines = [
        "\t".join([str(label), *map(str, range(13)), *(f"{label:02x}{n:06x}" for n in range(26))])
        for label in (0, 1, 1)
    ]
    lines[1] = lines[1].replace("\t3\t", "\t\t")
    (tmp_path / "day_0.tsv").write_text("\n".join(lines) + "\n")
    batch = one_batch(tmp_path / "day_0.tsv", criteo_schema(), dense_transform="none")
    assert batch.labels_B.tolist() == [0, 1, 1]
    assert batch.dense_BI[:, 3].tolist() == [3, 0, 3]
    assert batch.sparse["C26"].values().tolist() == [25, 2**24 + 25, 2**24 + 25]


@pytest.mark.parametrize("kinds", ["csv parquet", "csv glob"])
def test_text_and_parquet_are_not_mixed_unless_each_is_named(tmp_path, kinds):
    write_numbered(tmp_path, [[2]])
    csv_file(tmp_path / "a.csv")
    assert "holds a.csv and part-0.parquet, files of several formats: name those that are " in (
        refused(tmp_path / ("*" if "glob" in kinds else ""))
    )
    listing = file_list(tmp_path, "2", "a.csv", "part-0.parquet")
    assert rows_of(listing) == [7, 0, 1]


def test_what_is_no_file_and_what_cannot_be_opened_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.parquet")
    with pytest.raises(DataError, match=r"pipe\.parquet: is neither a file nor a directory"):
        file_names(str(tmp_path / "pipe.parquet"))
    with pytest.raises(
        DataError,
        match=r"no Parquet, CSV, JSON lines or Arrow files .*; the directory has pipe\.parquet",
    ):
        file_names(str(tmp_path))
    with pytest.raises(
        DataError, match=r"^dataset\.path=x+: cannot be read \(File name too long\)"
    ):
        file_names("x" * 5000)


# ---- nothing is left out or read twice in silence


@pytest.mark.parametrize("below", ["part", "part/deeper"])
@pytest.mark.parametrize("name", ["a.parquet", "a.csv"])
@pytest.mark.parametrize("top", ["dt=1", "."])
def test_data_below_partitions_in_a_directory_that_is_none_are_refused(tmp_path, top, below, name):
    write_numbered(tmp_path / "dt=2", [[1]])
    csv_file(tmp_path / top / below / name)
    text = refused(tmp_path)
    assert f"data in {tmp_path / top / 'part'}, which is no partition; rename that" in text


def test_directories_without_data_may_lie_among_partitions(partitions):
    csv_file(partitions / "dt=2026-1-2" / "_logs" / "a.csv")
    csv_file(partitions / "dt=2026-1-2" / "notes" / ".kept" / "a.csv")
    csv_file(partitions / "notes" / "README.md")
    assert len(file_names(str(partitions))) == 8


def test_text_beside_partitions_is_refused(partitions):
    csv_file(partitions / "a.csv")
    assert "holds a.csv beside partitions such as dt=2026-1-2; name what is meant, " in refused(
        partitions
    )


@pytest.mark.parametrize("name", ["part-0.PARQUET", "part-0.Pq"])
def test_the_case_of_a_suffix_does_not_matter(tmp_path, name):
    for directory in (tmp_path / "flat", tmp_path / "hive" / "dt=1"):
        (write_numbered(directory, [[1]]) / "part-0.parquet").rename(directory / name)
    assert [file_names(str(tmp_path / kind))[0] for kind in ("flat", "hive")] == [
        str(tmp_path / "flat" / name),
        str(tmp_path / "hive" / "dt=1" / name),
    ]
    assert "but in flat, hive; name one" in refused(tmp_path)


@pytest.mark.parametrize("given", ["", "dt=*", "dt=*/*/*.csv"])
def test_text_in_partitions_is_read(tmp_path, given):
    for day in (1, 2):
        csv_file(tmp_path / f"dt={day}" / "hour=1" / "a.csv", day)
    assert rows_of(tmp_path / given) == [1, 2]


@pytest.mark.parametrize("given", ["b[1]", "b[1]/*.parquet", "b[1]/part-[0]*"])
def test_a_directory_that_is_there_by_its_very_name_is_no_pattern(tmp_path, given):
    for name in ("b[1]", "b1"):
        write_numbered(tmp_path / name, [[1]])
    assert file_names(str(tmp_path / given)) == [str(tmp_path / "b[1]" / "part-0.parquet")]
    (tmp_path / "b[1]").rename(tmp_path / "elsewhere")
    assert file_names(str(tmp_path / given)) == [str(tmp_path / "b1" / "part-0.parquet")]


def test_a_missing_file_of_a_directory_that_looks_like_a_pattern_is_no_pattern(tmp_path):
    write_numbered(tmp_path / "b[1]", [[1]])
    assert "no such file or directory; did you mean part-0.parquet?" in refused(
        tmp_path / "b[1]" / "part-1.parquet"
    )


@pytest.mark.parametrize(
    ("given", "link", "target", "first"),
    [
        ("", "dt=2/k=1", "..", ""),
        ("", "dt=2/k=1", ".", "dt=2"),
        ("", "dt=2/k=1", "../dt=1", "dt=1"),
        ("dt=*", "dt=latest", "dt=1", "dt=1"),
    ],
)
def test_a_link_to_a_directory_that_is_read_already_is_refused(
    tmp_path, given, link, target, first
):
    for day in (1, 2):
        write_numbered(tmp_path / f"dt={day}", [[1]])
    (tmp_path / link).symlink_to(target)
    text = refused(tmp_path / given)
    assert f"{tmp_path / first} and {tmp_path / link} are one directory, whose files would" in text


def test_a_partition_may_be_a_link_to_files_elsewhere(tmp_path):
    write_numbered(tmp_path / "elsewhere", [[1]])
    write_numbered(tmp_path / "logs" / "dt=1", [[1]])
    (tmp_path / "logs" / "dt=2").symlink_to(tmp_path / "elsewhere")
    assert len(file_names(str(tmp_path / "logs"))) == 2


def test_lines_of_a_file_list_that_are_one_file_here_are_refused(tmp_path):
    write_numbered(tmp_path, [[1]])
    names = ("/nfs/other/part-0.parquet", "/nfs/other2/part-0.parquet")
    text = refused(file_list(tmp_path, "2", *names))
    assert f"names {names[0]} and {names[1]}, which are one file here, {tmp_path}/part-0" in text


@pytest.mark.parametrize("count", ["\u00b2", "9" * 5000, "\u0661", "-1", "1.0", "1_0"])
def test_a_count_of_a_file_list_that_is_no_number_is_refused(tmp_path, count):
    write_numbered(tmp_path, [[1]])
    assert refused(file_list(tmp_path, count, "part-0.parquet")).endswith(
        "the first line must be the number of paths that follow; 1 follow"
    )


def test_a_file_list_that_names_no_files_is_refused(tmp_path):
    assert refused(file_list(tmp_path, "0")).endswith(
        "names no files: 0 paths follow the first line"
    )


def test_a_file_list_may_begin_with_the_mark_of_an_editor(tmp_path):
    write_numbered(tmp_path, [[1]])
    assert len(file_names(str(file_list(tmp_path, "\ufeff1", "part-0.parquet")))) == 1
