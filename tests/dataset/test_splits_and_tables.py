"""Directories that hold more than one data set: training, validation and test files, and files that
the log of a table has removed. They are read as what they are, or refused.
"""

import gzip

import pytest
from dataset_files import numbered_table, write_columns, write_numbered

from recapp.dataset.files import file_names
from recapp.errors import DataError


def put(folder, *names):
    """Write a Parquet file of one row under each name."""
    table = numbered_table(0, 1)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        columns = {name: table[name].combine_chunks() for name in table.column_names}
        write_columns(folder / name, **columns)
    return folder


def refused(path, setting="dataset.path"):
    with pytest.raises(DataError) as error:
        file_names(str(path), setting=setting)
    assert "\n" not in str(error.value)
    return error.value


def files_of(folder, value):
    found = file_names(value if isinstance(value, str) else list(value))
    return {name.removeprefix(f"{folder}/") for name in found}


@pytest.mark.parametrize(
    ("train", "val", "test"),
    [
        (["train.parquet"], ["valid.parquet"], ["test.parquet"]),
        (["a b/train.pq", "a b/Train_2.pq"], ["a b/val.pq"], []),
        (
            [f"train-0000{n}-of-00002.parquet" for n in (0, 1)],
            [f"validation-0000{n}-of-00002.parquet" for n in (0, 1)],
            ["test-00000-of-00001.parquet"],
        ),
        (["shop_train.parquet"], ["shop_dev.parquet"], ["shop_test1.parquet"]),
        (["part-0.parquet", "part-1.parquet"], [], ["test.parquet"]),
        (["split=train/0.parquet", "split=train/1.parquet"], [], ["split=test/0.parquet"]),
        (["train/0.parquet", "train/1.parquet"], ["eval/0.parquet"], []),
    ],
)
@pytest.mark.parametrize("glob", ["", "*"])
def test_splits_in_one_directory_are_refused_with_the_settings_for_each(
    tmp_path, train, val, test, glob
):
    above = "a b" if "a b" in train[0] else ""
    put(tmp_path, *train, *val, *test)
    error = refused(tmp_path / above / glob)
    keys = [
        f"dataset.{key}"
        for key, names in (("path", train), ("val_path", val), ("test_path", test))
        if names
    ]
    words = f"of several splits, and would be read as one: set {' and '.join(keys)} each to"
    assert words in str(error)
    for names in (train, val, test):
        tops = [name.removeprefix(f"{above}/").partition("/")[0] for name in names]
        assert not names or any(top in str(error) for top in tops)


@pytest.mark.parametrize(
    "names",
    [
        ["train.parquet", "train_2.parquet", "more.parquet"],
        ["latest.parquet", "contest.parquet", "values.parquet", "developer-1.parquet"],
        ["test-0.parquet", "test-1.parquet"],
        ["dt=1/part-0.parquet", "dt=2/part-0.parquet", "dt=ab-test/part-0.parquet"],
    ],
)
def test_names_of_one_split_are_one_data_set(tmp_path, names):
    put(tmp_path / "test", *names)
    assert files_of(tmp_path / "test", str(tmp_path / "test")) == set(names)


def test_a_list_reads_every_split_that_it_names(tmp_path):
    put(tmp_path, "train.parquet", "test.parquet")
    both = [str(tmp_path / "train.parquet"), str(tmp_path / "test.parquet")]
    assert file_names(both) == both


def test_rows_to_score_of_several_splits_are_refused(tmp_path):
    put(tmp_path, "train.parquet", "test.parquet")
    words = str(refused(tmp_path, "input"))
    assert "test.parquet, train.parquet are of several splits" in words
    assert "name the files of one by a glob; a list, input=[...], reads all" in words


# ---- text


def test_days_of_which_some_are_compressed_are_one_data_set(tmp_path):
    for day in (0, 1):
        (tmp_path / f"day_{day}").write_text("0\t7\n1\t2\n")
    with gzip.open(tmp_path / "day_2.gz", "wt") as file:
        file.write("1\t5\n0\t5\n")
    (tmp_path / "README").write_text("Three days, of a shop\n\nand nothing else\n")
    assert files_of(tmp_path, str(tmp_path)) == {"day_0", "day_1", "day_2.gz"}


@pytest.mark.parametrize("names", ["day_0 day_0.gz", "a.csv a.csv.gz"])
def test_text_in_two_forms_is_not_read_twice(tmp_path, names):
    for name in names.split():
        (tmp_path / name).write_bytes(b"0\t1\n1\t2\n")
    one, other = names.split()
    assert f"{one} and {other} are one name in two forms, whose" in str(refused(tmp_path))


# ---- names that tell no format


@pytest.mark.parametrize("below", ["", "dt=1/"])
@pytest.mark.parametrize(
    "names",
    [
        ["part-0.parquet", "part-1", "part-2.snappy", "part-3.c000", "part-4.gz"],
        ["000000000000", "000000000001"],
        ["20260101_101010_00001_abcde_bucket-00000.gz"],
    ],
)
def test_the_first_bytes_of_files_without_a_suffix_tell_that_they_are_data(tmp_path, below, names):
    put(tmp_path, *[f"{below}{name}" for name in names])
    (tmp_path / below / "README").write_text("rows, of a shop\n\nand nothing else\n")
    (tmp_path / below / "part-5.tmp").write_bytes(b"PAR1")
    (tmp_path / below / "marker").touch()
    assert files_of(tmp_path, str(tmp_path)) == {f"{below}{name}" for name in names}


def test_a_file_that_is_neither_data_nor_text_is_refused_beside_data(tmp_path):
    put(tmp_path, "part-0.parquet")
    (tmp_path / "part-1").write_bytes(b"\0\1\2\3")
    assert "part-1 is in no known format and no text, and lies beside part-0.parquet" in str(
        refused(tmp_path)
    )


def test_rows_of_another_format_are_refused_beside_data(tmp_path):
    put(tmp_path, "part-0.parquet")
    for content in (b'{"a": 1}\n{"a": 2}\n', b"a,b\n1,2\n"):
        (tmp_path / "part-1").write_bytes(content)
        assert "holds part-0.parquet and part-1, files of several formats: name those" in str(
            refused(tmp_path)
        )


# ---- tables of other systems


def iceberg(folder):
    (folder / "metadata").mkdir()
    (folder / "metadata" / "v10.metadata.json").touch()
    return "Iceberg", "StaticTable.from_metadata("


def delta(folder):
    (folder / "_delta_log").mkdir()
    return "Delta Lake", "DeltaTable("


def hudi(folder):
    (folder / ".hoodie").mkdir()
    return "Hudi", "HudiTableBuilder.from_base_uri("


@pytest.mark.parametrize(
    ("mark", "given"),
    [(delta, ""), (iceberg, "data"), (hudi, "data/*.parquet"), (iceberg, "dat*"), (iceberg, "")],
)
def test_a_table_is_refused_with_what_lists_its_living_files(tmp_path, mark, given):
    table = tmp_path / "lake" / "shop"
    write_numbered(table / "data", [[1], [1]])
    name, lists = mark(table)
    text = str(refused(table / given))
    assert f"belongs to {table}, a table of {name}, whose removed rows are still in its" in text
    assert "_file_list.txt" in text and lists in text


def test_files_of_a_table_that_are_named_are_read(tmp_path):
    put(tmp_path, "part-0.parquet")
    (tmp_path / "_delta_log").mkdir()
    assert file_names([str(tmp_path / "part-0.parquet")])


def test_metadata_elsewhere_make_no_table(tmp_path):
    put(tmp_path / "logs", "part-0.parquet")
    iceberg(tmp_path)
    assert len(file_names(str(tmp_path / "logs"))) == 1
