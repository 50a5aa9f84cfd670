"""What a run says of the rows that it reads: files, labels, and what is left out."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_files import write_columns

from recapp.dataset import click_rows as record
from recapp.dataset.click_rows import open_rows, rows_read
from recapp.dataset.data_settings import DataSettings
from recapp.dataset.schema import Schema
from recapp.reporting.summary import print_rows_read

SCHEMA = Schema(
    ("bought", "liked", "stars"),
    (),
    ("item",),
    soft_labels=("liked",),
    real_labels=("stars",),
)


@pytest.fixture
def logs(tmp_path):
    """Write two partitions of 40 rows in two files each, and much that is no data."""
    for day in (1, 2):
        folder = tmp_path / "logs" / f"dt={day}"
        folder.mkdir(parents=True)
        for part in (0, 1):
            write_columns(
                folder / f"part-{part}.parquet",
                bought=[1] + [0] * 19,
                liked=[0.5] * 20,
                stars=[4.0] * 20,
                item=list(range(20)),
            )
        for name in ("_SUCCESS", ".part-0.parquet.crc", "notes.txt"):
            (folder / name).write_text("x\n")
    (tmp_path / "logs" / "_metadata").touch()
    (tmp_path / "logs" / "empty").mkdir()
    return tmp_path / "logs"


def read(logs, schema=SCHEMA, **settings):
    rows = open_rows(DataSettings(path=str(logs), **settings), schema)
    paths = {"dataset.path": rows.settings.path, "dataset.val_path": rows.settings.val_path}
    return rows_read({"train": rows.train, "val": rows.val}, schema, paths)


def test_files_rows_and_shares_of_labels_are_those_of_each_split(logs):
    found = read(logs, val_share="1/8")["splits"]
    train, val = found["train"], found["val"]
    first, last = (str(logs / name) for name in ("dt=1/part-0.parquet", "dt=2/part-1.parquet"))
    assert train == {
        "files": 4,
        "first": first,
        "last": last,
        "rows": 70,
        "positives": {"bought": 4 / 70, "liked": 0.5},  # and no share of the stars
        "positives_of": 70,
    }
    assert val == {
        "files": 1,
        "first": last,
        "last": last,
        "rows": 10,
        "positives": {"bought": 0, "liked": 0.5},
        "positives_of": 10,
    }
    assert "val" not in read(logs, val_share=0)["splits"]


def test_what_is_left_out_is_counted_by_its_reason_with_the_first_names(logs):
    found = {one["why"]: (one["count"], one["names"]) for one in read(logs)["left_out"]}
    assert found == {
        "hidden": (5, ["_metadata", "dt=1/.part-0.parquet.crc", "dt=1/_SUCCESS"]),
        "directories": (1, ["empty"]),
        "in no known format": (2, ["dt=1/notes.txt", "dt=2/notes.txt"]),
    }
    assert read(logs / "dt=*")["left_out"] and not read(logs / "dt=*/*.parquet")["left_out"]


def test_shares_of_many_rows_are_those_of_the_first(logs, monkeypatch):
    monkeypatch.setattr(record, "LABEL_ROWS", 10)
    train = read(logs, val_share=0)["splits"]["train"]
    assert (train["rows"], train["positives_of"], train["positives"]["bought"]) == (80, 10, 0.1)


def test_a_value_that_is_no_label_leaves_the_share_open_and_its_row_to_the_training(logs):
    table = pq.read_table(logs / "dt=2/part-1.parquet")
    wrong = table.set_column(0, "bought", pa.array([2] * 20))
    pq.write_table(wrong, logs / "dt=2/part-1.parquet")
    found = read(logs)["splits"]
    assert found["train"]["positives"] == found["val"]["positives"] == {}


def test_the_terminal_and_the_page_say_it(logs, monkeypatch, capsys):
    monkeypatch.setattr(record, "LABEL_ROWS", 40)
    plain = json.loads(json.dumps(read(logs, val_share="1/8")))
    print_rows_read(plain)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"Data in {logs}" and max(map(len, lines[1:])) <= 80
    assert [line.split() for line in lines[3:5]] == [
        ["train", "4", "70", "5.00%", "50.00%", "dt=1/part-0.parquet", "dt=2/part-1.parquet"],
        ["validate", "1", "10", "0.00%", "50.00%", "dt=2/part-1.parquet"],
    ]
    said = " ".join(lines[5:])
    for part in (
        "shares: counted on the first 40 of 70 rows to train",
        "left out: hidden 5 (_metadata, dt=1/.part-0.parquet.crc, dt=1/_SUCCESS, ..); directories",
        "1 (empty); in no known format 2 (dt=1/notes.txt, dt=2/notes.txt)",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("paths", "title", "names"),
    [
        (("s3://b/logs/x/1.csv", "s3://b/logs/y/2.csv"), "Data in s3://b/logs", ["x/1.csv"]),
        (("s3://b/logs/1.csv", "/logs/2.csv"), "Data in", ["s3://b/logs/1.csv", "/logs/2.csv"]),
    ],
)
def test_files_of_other_places_are_shown_below_what_they_have_in_common(
    paths, title, names, capsys
):
    one = {"files": 1, "rows": 2, "positives": {}, "positives_of": 2}
    splits = {
        name: {**one, "first": path, "last": path}
        for name, path in zip(("train", "val"), paths, strict=True)
    }
    print_rows_read({"splits": splits, "left_out": []})
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].rstrip() == title
    assert all(name in shown.split() for name in names)
