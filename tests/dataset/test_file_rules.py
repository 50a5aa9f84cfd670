"""Settings of files: their format, what makes rows of text, rows that may be left out."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from jobs import command, recipe
from pyarrow import csv

from recapp.dataset.click_rows import open_rows, rows_of
from recapp.dataset.sequential_rows import arrow_chunks
from recapp.dataset.text_rows import times_of_text
from recapp.errors import CheckpointError, ConfigError, DataError
from recapp.stored.trust import judged, marked

TESTS = Path(__file__).resolve().parents[1]
HERE = os.pathsep.join([str(TESTS.parent), str(TESTS)])

ROWS = [("1", "5", "a"), ("0", "7", "b::c"), ("0", "", "d")]
COLUMNS = ["dataset=custom", "dataset.dense=[price]", "dataset.sparse=[item]"]


def read(path, *overrides, folders=()):
    """Return the rows that settings read, and what a run says of them."""
    made = recipe("train", [*COLUMNS, f"dataset.path={path}", "dataset.val_share=0", *overrides])
    rows = open_rows(made.dataset, made.schema)
    names = [*made.schema.targets, *made.schema.inputs]
    found = []
    for file, _, chunk in arrow_chunks(rows.train):
        columns = [chunk.column(file.columns[name]).to_pylist() for name in names]
        found += zip(*columns, strict=True)
    return found, rows_of(made.dataset, rows, ["train"])


def text_of(rows, delimiter, header=True):
    lines = [("label", "price", "item")] if header else []
    return "".join(delimiter.join(line) + "\n" for line in [*lines, *rows])


NO_HEADER = text_of(ROWS[::2], "::", header=False)
RULES = {  # text, settings, rows
    "columns": (NO_HEADER, ["text={columns: [label,price,item]}"], ROWS[::2]),
    "delimiter": (text_of(ROWS, "~~"), ["text.delimiter='~~'"], ROWS),
    "encoding": (text_of([("0", "7", "é")], ";"), ["text.encoding=cp1252"], [("0", "7", "é")]),
    "tsv": (text_of(ROWS, "\t"), ["format=tsv"], ROWS),
    "header": (text_of(ROWS, ",").replace("0,7", "label,7"), ["text.header=true"], None),
    "no header": (
        text_of(ROWS, ","),
        ["text={header: false, columns: [item,price,label]}"],
        None,
    ),
    "no quote": (text_of([("1", "5", '"a')], ","), ["text.quote=none"], [("1", "5", '"a')]),
    "quote": (text_of([("1", "5", "'a,\n'")], ","), ['text.quote="\'"'], [("1", "5", "a,\n")]),
    "json": ('{"label": 1, "item": "1", "price": null}\n', ["format=json_lines"], [(1, None, "1")]),
}


@pytest.mark.parametrize("name", RULES)
def test_settings_say_what_makes_rows_of_text(tmp_path, name):
    content, overrides, wanted = RULES[name]
    path = tmp_path / "ratings.dat"
    path.write_bytes(content.encode("cp1252" if name == "encoding" else "utf-8"))
    found, _ = read(path, "dataset.format=csv", *(f"dataset.{one}" for one in overrides))
    if name == "header":
        wanted = [ROWS[0], ("label", *ROWS[1][1:]), ROWS[2]]
    elif name == "no header":
        wanted = [("item", "price", "label"), *(row[::-1] for row in ROWS)]
    assert found == wanted


def test_rows_that_do_not_fit_are_left_out_counted_and_shown(tmp_path):
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text(text_of([*ROWS, ("1",), ("0", "1")], ","))
    with pytest.raises(DataError, match=r"a\.csv: line 5 has 1 columns where 3 are expected; mend"):
        read(tmp_path)
    with pytest.raises(DataError, match=r"b\.csv: line 6 .*; it is bad row 4, and .*skip:3 leaves"):
        read(tmp_path, "dataset.bad_rows=skip:3")
    found, said = read(tmp_path, "dataset.bad_rows=skip:4")
    assert found == ROWS * 2
    names = [f"{n}: line {k}" for n in ("a.csv", "b.csv") for k in (5, 6)]
    (left_out,) = said["left_out"]
    assert (left_out["why"], left_out["count"]) == ("bad rows", 4)
    assert [name[: len(names[0])] for name in left_out["names"]] == names[: len(left_out["names"])]


def test_a_named_format_reads_all_files_whatever_their_names(tmp_path):
    (tmp_path / "day_1.log").write_text(text_of(ROWS, "\t"))
    (tmp_path / "day_2.log").write_text(text_of(ROWS, "\t"))
    with pytest.raises(DataError, match="no Parquet, CSV, JSON lines or Arrow files"):
        read(tmp_path)
    assert read(tmp_path, "dataset.format=csv")[0] == ROWS * 2
    with pytest.raises(DataError, match=r"day_1\.log is not a whole Parquet file"):
        read(tmp_path, "dataset.format=parquet")


def test_a_page_beside_files_whose_names_tell_the_named_format_is_left_out(tmp_path):
    (tmp_path / "day_1.csv").write_text(text_of(ROWS, ","))
    (tmp_path / "day_2").write_text(text_of(ROWS, ","))
    for name in ("README.md", "LICENSE"):
        (tmp_path / name).write_text("Logs of a shop\n\nas of 2026\n")
    found, said = read(tmp_path, "dataset.format=csv")
    assert found == ROWS * 2
    (left_out,) = said["left_out"]
    assert left_out["names"] == ["LICENSE", "README.md"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("format=cvs", "dataset.format=cvs: did you mean csv"),
        ("text.delimiter=''", "dataset.text.delimiter: must be at least one sign"),
        ("text.quote=ab", "dataset.text.quote=ab: must be one ASCII character, or none"),
        ("text.columns=[a,b,a]", "dataset.text.columns: a is named more than once"),
        ("text.encoding=utf-9", "dataset.text.encoding=utf-9: Python knows no such encoding"),
        ("bad_rows=skip", "dataset.bad_rows=skip: must be error, or skip:N"),
        (
            "format={_target_: json.JSONDecoder}",
            "must be a class derived from recapp.dataset",
        ),
    ],
)
def test_settings_of_files_that_make_no_sense_are_one_line(tmp_path, override, said):
    (tmp_path / "x.csv").write_text(text_of(ROWS, ","))
    with pytest.raises(ConfigError) as info:
        read(tmp_path, f"dataset.{override}")
    assert said in str(info.value) and "\n" not in str(info.value)


# ---- a format of the user's own (tests/fixed_width.py)

OWN = {"_target_": "fixed_width.FixedWidth", "widths": "label:1 price:2 item:4"}
OWN_TEXT = "".join(f"{label}{price:2}{item:4}\n" for label, price, item in ROWS)


def test_a_format_of_ones_own_is_chosen_by_settings(tmp_path):
    (tmp_path / "x.fix").write_text(OWN_TEXT)
    settings = "{_target_: fixed_width.FixedWidth, widths: 'label:1 price:2 item:4'}"
    assert read(tmp_path, f"dataset.format={settings}")[0] == ROWS
    with pytest.raises(ConfigError, match=r"dataset\.format"):
        read(tmp_path, "dataset.format={_target_: fixed_width.FixedWidth, width: 3}")


def test_a_stored_format_of_ones_own_needs_trust():
    stored = marked({"dataset": {"format": OWN}})
    with pytest.raises(CheckpointError, match=r"is yours, say trust=\[fixed_width\]"):
        judged(stored, [])
    assert judged(stored, ["fixed_width"]) == {"dataset": {"format": OWN}}
    other = marked({"dataset": {"format": {"_target_": "shop_task.ShopTask"}}})
    with pytest.raises(CheckpointError, match=r"from recapp\.dataset\.data_file\.Format"):
        judged(other, ["shop_task"])


@pytest.mark.full
def test_a_model_of_it_trains_and_is_evaluated_by_commands(tmp_path):
    (tmp_path / "x.fix").write_text(OWN_TEXT.replace("b::c", "b  ") * 400)
    mine = tmp_path / "mine/dataset"
    mine.mkdir(parents=True)
    (mine / "shop.yaml").write_text(
        f"defaults: [custom]\npath: {tmp_path}/x.fix\ndense: [price]\nsparse: [item]\n"
        f"format: {json.dumps(OWN)}\n"
    )
    on = ("--config-dir", tmp_path / "mine", "dataset=shop", "dataset.batch_size=128")
    run = (*on, "tables.dim=4", "model.bottom_layers=[4]", "model.top_layers=[4,1]")
    done = command("train", *run, f"hydra.run.dir={tmp_path}/job", cwd=tmp_path, PYTHONPATH=HERE)
    assert done.code == 0, done.err
    last = f"ckpt_path={tmp_path}/job/checkpoints/last.ckpt"
    refused = command("eval", last, cwd=tmp_path, PYTHONPATH=HERE)
    assert "trust=[fixed_width]" in refused.err
    done = command("eval", last, "trust=[fixed_width]", cwd=tmp_path, PYTHONPATH=HERE)
    assert done.code == 0, done.err


# ---- times and labels


@pytest.mark.parametrize(
    ("form", "texts", "seconds"),
    [
        ("iso", ["1970-01-02T00:00:01Z", "", "1970-01-01 01:00:00+01:00"], [86_401, None, 0]),
        ("iso", ["1970-01-02 00:00:01 UTC", "1970-01-01 00:00:05.9 UTC"], [86_401, 5]),
        ("iso", ["1970-01-02", "1970-01-01 00:00:05.9"], [86_400, 5]),
        ("iso", ["1970-01-02T00:00:00Z", "1970-01-02T00:00:00"], [86_400, 86_400]),
        ("iso", ["1969-12-31T23:59:59.5"], [-1]),
        ("%y%m%d%H", ["70010203", "", "69123123"], [97_200, None, -3600]),
    ],
)
def test_text_spells_times(form, texts, seconds):
    times = times_of_text(pa.array(texts), form)
    assert times.type == pa.timestamp("s")
    assert times.cast(pa.int64()).to_pylist() == seconds


@pytest.mark.parametrize("form", ["iso", "%Y-%m-%d"])
def test_a_text_that_spells_no_time_names_its_row(tmp_path, form):
    (tmp_path / "x.csv").write_text("label,item,time\n1,a,2026-01-02\n0,b,soon\n")
    times = ["dataset.times={time: s}", f"dataset.text.times={{time: '{form}'}}"]
    with pytest.raises(DataError, match=r"x\.csv: row 1 holds 'soon', which is no time like"):
        read(tmp_path / "x.csv", *times, "dataset.dense=[]")


def test_times_of_text_are_those_of_parquet(tmp_path):
    table = pa.table({"label": [1, 0], "item": ["a", "b"], "price": [1.0, 2.0]})
    moments = ["2026-01-02T03:04:05", "2026-11-29T17:16:11"]
    csv.write_csv(table.append_column("time", pa.array(moments)), tmp_path / "x.csv")
    typed = pa.array(moments).cast(pa.timestamp("ms"))
    pq.write_table(table.append_column("time", typed), tmp_path / "x.parquet")
    on = ["dataset.times={time: ms}", "dataset.text.times={time: iso}"]
    made = [batches(tmp_path / name, *on) for name in ("x.csv", "x.parquet")]
    for one, other in zip(*made, strict=True):
        assert one.dense_BI.equal(other.dense_BI)
        assert one.sparse.values().equal(other.sparse.values())
    assert len(one.sparse.keys()) == 3  # item, hour, weekday


def test_labels_from_a_number_on_are_clicks(tmp_path):
    (tmp_path / "x.csv").write_text(
        text_of([("4", "1", "a"), ("3.5", "1", "b"), ("5", "1", "c")], ",")
    )
    with pytest.raises(DataError, match=r"label, row 0 holds '4'.* set dataset\.label_from=4"):
        batches(tmp_path / "x.csv")
    read_as = batches(tmp_path / "x.csv", "dataset.label_from=4")
    assert torch.cat([batch.labels_B for batch in read_as]).tolist() == [1, 0, 1]
    _, said = read(tmp_path / "x.csv", "dataset.label_from=4")
    assert said["splits"]["train"]["positives"] == {"label": 2 / 3}


def batches(path, *overrides):
    """Return the batches of a file, in their order."""
    on = [
        *COLUMNS,
        f"dataset.path={path}",
        "dataset.val_share=0",
        "dataset.batch_size=1",
        "dataset.lanes=1",
    ]
    made = recipe("train", [*on, *overrides])
    rows = open_rows(made.dataset, made.schema).fitted()
    return list(rows.stream(rows.train))
