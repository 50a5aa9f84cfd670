"""Files are found as people keep them; what cannot be read says so in one line."""

from fractions import Fraction

import pyarrow as pa
import pytest
from dataset_files import SCHEMA, numbered_source, numbered_table, write_columns, write_numbered

from recapp.dataset.data_settings import DataSettings
from recapp.dataset.source import open_source, split
from recapp.errors import ConfigError, DataError
from recapp.trainer.datamodule import ClickData


def opened(*paths):
    return open_source([str(path) for path in paths], SCHEMA)


def names(source):
    return [file.path.rpartition("/")[2] for file in source.files]


@pytest.fixture
def days(tmp_path):
    """Write files day_1, day_2, day_10 of 10, 20 and 30 rows, among things that are no data."""
    for day, rows in ((1, 10), (2, 20), (10, 30)):
        write_numbered(tmp_path / "made", [[rows]])
        (tmp_path / "made" / "part-0.parquet").rename(tmp_path / f"day_{day}.parquet")
    (tmp_path / "made").rmdir()
    for other in ("_metadata", "_SUCCESS", ".hidden.parquet", "_part.parquet", "README.md"):
        (tmp_path / other).write_text("no data")
    return tmp_path


def test_a_directory_gives_its_parquet_files_in_natural_order(days):
    assert names(opened(days)) == ["day_1.parquet", "day_2.parquet", "day_10.parquet"]
    assert opened(days).rows == 60


def test_a_glob_gives_matching_files_in_natural_order(days):
    assert names(opened(days / "*day_1*")) == ["day_1.parquet", "day_10.parquet"]


def test_a_list_keeps_its_order_and_a_file_is_itself(days):
    assert names(opened(days / "day_10.parquet", days / "day_1.parquet")) == [
        "day_10.parquet",
        "day_1.parquet",
    ]
    assert open_source(str(days / "day_2.parquet"), SCHEMA).rows == 20


def test_a_file_list_names_files_of_another_machine(days):
    (days / "_file_list.txt").write_text("2\n/elsewhere/day_10.parquet\nday_2.parquet\n")
    assert names(opened(days / "_file_list.txt")) == ["day_10.parquet", "day_2.parquet"]


def test_row_groups_are_segments_and_empty_ones_are_none(tmp_path):
    source = numbered_source(tmp_path, [[3, 0, 4], [5]])
    found = [(s.file, s.row_group, s.first, s.rows) for s in source.segments]
    assert found == [(0, 0, 0, 3), (0, 2, 0, 4), (1, 0, 0, 5)]
    assert source.bags == {"many"}


def test_a_slice_cuts_row_groups(tmp_path):
    source = numbered_source(tmp_path, [[3, 4], [5]])
    assert [(segment.first, segment.rows) for segment in source.slice(1, 9).segments] == [
        (1, 2),
        (0, 4),
        (0, 2),
    ]
    assert [
        (segment.first, segment.rows) for segment in source.slice(1, 9).slice(1, 3).segments
    ] == [(2, 1), (0, 1)]
    assert source.slice(4, 4).rows == 0


@pytest.mark.parametrize(("rows", "train"), [(7, 6), (8, 6), (13, 11), (14, 12)])
def test_the_split_is_in_file_order_and_rounds_the_training_part_down(tmp_path, rows, train):
    fit, val = split(numbered_source(tmp_path, [[5, rows - 5]]), Fraction(1, 7))
    assert (fit.rows, val.rows) == (train, rows - train)
    assert (fit.segments[0].first, val.segments[-1].first + val.segments[-1].rows) == (0, rows - 5)


def test_a_share_is_named_as_the_user_wrote_it(tmp_path):
    path = str(write_numbered(tmp_path, [[9]]))
    data = ClickData(DataSettings(path=path, val_share=0.999999), SCHEMA)
    with pytest.raises(ConfigError, match=r"dataset\.val_share=0\.999999: leaves none of 9 rows"):
        data.setup("fit")


def one_line(path, setting="dataset.path"):
    with pytest.raises(DataError) as error:
        open_source(path, SCHEMA, setting=setting)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_path_that_is_not_there_is_named_with_its_setting_and_close_matches(days):
    text = one_line(str(days / "day_3.parquet"), "dataset.val_path")
    assert text.startswith(
        f"dataset.val_path={days}/day_3.parquet: no such file or directory; did you mean"
    )
    assert one_line("/no/such/place").endswith("no such file or directory")
    assert one_line(str(days / "x*.parquet")).endswith("no file matches; check the pattern")
    assert "an empty list" in one_line([])


def test_a_directory_without_data_says_what_it_has(tmp_path):
    assert one_line(str(tmp_path)).endswith("the directory is empty")
    (tmp_path / "train.orc").write_text("a,b")
    assert one_line(str(tmp_path)).endswith("the directory has train.orc")
    write_numbered(tmp_path / "train", [[3]])
    assert one_line(str(tmp_path)).endswith(
        "no Parquet, CSV, JSON lines or Arrow files here, but in train; name one of those "
        "directories"
    )


def test_a_truncated_or_foreign_file_is_named(days):
    whole = (days / "day_2.parquet").read_bytes()
    for content in (whole[: len(whole) // 2], whole[:-1], b"\0\1\2", b""):
        (days / "day_2.parquet").write_bytes(content)
        text = one_line(str(days))
        assert f"{days}/day_2.parquet is not a whole Parquet file" in text


def test_a_missing_column_names_its_file(days):
    write_columns(days / "day_11.parquet", label=[1], row=[2], one=[3], many=[[4]])
    assert f"{days}/day_11.parquet: no column for other" in one_line(str(days))


def test_a_feature_that_is_a_list_in_one_file_only_is_refused(days):
    table = numbered_table(0, 4)
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    write_columns(days / "day_11.parquet", **{**columns, "many": pa.array([1, 2, 3, 4])})
    assert "column many (many) holds one id a row, in " in one_line(str(days))


def test_files_without_rows_are_no_data(tmp_path):
    write_numbered(tmp_path, [[0], []])
    assert one_line(str(tmp_path)).endswith("2 file(s) without a single row")


@pytest.mark.parametrize("text", ["", "day_1.parquet\n", "3\nday_1.parquet\n"])
def test_a_file_list_with_a_wrong_count_is_refused(days, text):
    (days / "_file_list.txt").write_text(text)
    assert "the first line must be the number of paths that follow" in one_line(
        str(days / "_file_list.txt")
    )


def test_a_file_list_that_names_a_missing_file_is_refused(days):
    (days / "_file_list.txt").write_text("1\n/elsewhere/day_9.parquet\n")
    assert "names /elsewhere/day_9.parquet, which is neither there nor beside the list" in one_line(
        str(days / "_file_list.txt")
    )
