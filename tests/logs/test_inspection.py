"""`recapp.data inspect`: facts of columns against Python's own counts, uses, and settings that
train.
"""

import csv
import json
import math
from collections import Counter
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from jobs import command, metrics_of
from omegaconf import OmegaConf

from recapp.data import main, with_path
from recapp.dataset.data_settings import DataSettings
from recapp.dataset.decode import decode_labels
from recapp.dataset.schema import schema_of
from recapp.dataset.source import open_raw, open_source
from recapp.dataset.stream import BatchStream
from recapp.dataset.text_rows import times_of_text
from recapp.errors import DataError
from recapp.logs.inspection import facts_of_columns
from recapp.logs.sampled_counts import SampledCounts
from recapp.logs.suggestion import as_yaml, suggest_settings
from recapp.settings.records import record
from recapp.tables.table_settings import TablesOfDataset

ROWS = 2000


def clicks(rows=ROWS):
    random = Random(3)
    return {
        "row_id": [f"r{n}" for n in range(rows)],
        "click": [int(random.random() < 0.3) for _ in range(rows)],
        "user": [f"u{int(random.paretovariate(1))}" for _ in range(rows)],
        "item": [random.randrange(50) if n < rows // 2 else 90 for n in range(rows)],
        "price": [
            round(random.random() * 9, 2) if random.random() < 0.9 else None for _ in range(rows)
        ],
        "tags": ["|".join(random.sample("abcdef", 1 + n % 3)) for n in range(rows)],
        "ts": [1_600_000_000 + 60 * n for n in range(rows)],
        "country": ["DE"] * rows,
    }


@pytest.fixture
def logs(tmp_path):
    table = clicks()
    with open(tmp_path / "shop.csv", "w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(table)
        lines.writerows(zip(*table.values(), strict=True))
    return tmp_path / "shop.csv"


def facts(path, rows=None):
    source = open_raw(str(path))
    columns = facts_of_columns(source.slice(0, rows or source.rows))
    return {one.name: one for one in columns}


def test_facts_are_those_that_python_counts(logs):
    found = facts(logs)
    for name, values in clicks().items():
        present = [str(value) for value in values if value is not None]
        counts = Counter(present)
        one = found[name]
        assert (one.rows, one.missing, one.distinct) == (ROWS, ROWS - len(present), len(counts))
        assert one.counted == "exact"
        assert one.singles == pytest.approx(sum(n == 1 for n in counts.values()) / len(counts))
        most = [n for _, n in counts.most_common(10)]
        assert one.tops[:2] == pytest.approx([most[0] / len(present), sum(most) / len(present)])
        assert all(counts[text] == number for text, number in one.top)
    assert found["price"].numbers[0] == min(p for p in clicks()["price"] if p is not None)
    assert found["ts"].numbers[2] == pytest.approx(1_600_000_000 + 60 * ROWS / 2, abs=60)
    assert found["user"].numbers is None


def test_the_label_over_time_and_drift_follow_the_order_of_the_rows(logs):
    found = facts(logs)
    clicked = np.array(clicks()["click"]).reshape(20, -1).mean(axis=1)
    assert found["click"].means == pytest.approx(clicked.tolist())
    assert found["item"].drift == found["item"].new == 1
    assert found["click"].drift < 0.1 and found["click"].new == 0
    assert found["ts"].drift == 1  # numbers, by buckets


def test_each_column_gets_the_use_that_fits(logs):
    source = open_raw(str(logs))
    suggestion = suggest_settings(facts_of_columns(source), source.files[0].types)
    assert {name: use for name, (use, _) in suggestion.uses.items()} == {
        "row_id": "left out",
        "click": "label",
        "user": "id",
        "item": "id",
        "price": "number",
        "tags": "list",
        "ts": "time",
        "country": "left out",
    }
    assert suggestion.settings["separator"] == {"tags": "|"}
    assert suggestion.settings["times"] == {"ts": "s"}
    assert suggestion.command == ()


def test_types_of_parquet_tell_lists_vectors_and_times(tmp_path):
    rows = 120
    table = pa.table(
        {
            "y": pa.array([n % 2 for n in range(rows)], pa.int8()),
            "ids": pa.array([[n % 7, n % 5] for n in range(rows)]),
            "vector": pa.array([[0.5 + n, 1.25] for n in range(rows)]),
            "when": pa.array([n * 10**9 for n in range(rows)], pa.timestamp("ns")),
            "word": pa.array([str(n % 3) for n in range(rows)]).dictionary_encode(),
            "nested": pa.array([{"a": 1, "b": {"n": n % 5}} for n in range(rows)]),
            "nothing": pa.nulls(rows, pa.int64()),
            "lists": pa.array([[[n]] for n in range(rows)]),
            "flag": pa.array([n % 3 > 0 for n in range(rows)]),
            "took": pa.array(range(rows), pa.duration("s")),
            "history": pa.array([list(range(n % 4)) for n in range(rows)]),
            "seconds": pa.array([[0.5] * (n % 4) for n in range(rows)]),
            "odd": pa.array([[0.5] * (n % 3) for n in range(rows)]),
            "price": pa.array([n % 7 + 0.25 for n in range(rows)]).cast(pa.decimal128(9, 2)),
            "session": pa.ExtensionArray.from_storage(
                pa.uuid(), pa.array([bytes([n % 9] * 16) for n in range(rows)], pa.binary(16))
            ),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=50)
    suggestion = suggest_settings(list(facts(tmp_path).values()), table.schema)
    assert {name: use for name, (use, _) in suggestion.uses.items()} == {
        "y": "label",
        "ids": "list",
        "vector": "vector",
        "when": "time",
        "word": "id",
        "nested.a": "left out",
        "nested.b.n": "id",
        "nothing": "left out",
        "lists": "left out",
        "flag": "number",
        "took": "left out",
        "history": "list",
        "seconds": "weights",
        "odd": "left out",
        "price": "number",
        "session": "id",
    }
    assert suggestion.settings["vectors"] == {"vector": 2}
    assert suggestion.settings["id_weights"] == {"history": "seconds"}
    settings = {name: one for name, one in suggestion.settings.items() if name != "times"}
    dataset = record(DataSettings, {"path": str(tmp_path), **settings}, "dataset")
    schema = schema_of(dataset, TablesOfDataset())
    stream = BatchStream(open_source(dataset.path, schema), schema, batch_size=rows, lanes=1)
    assert len(next(iter(stream)).labels_B) == rows


@pytest.mark.parametrize(
    ("time", "use"),
    [
        ("2026-11-29 17:16:11 UTC", "time"),
        ("2026-11-29T17:16:11.5+01:00", "time"),
        ("2026-11-29", "time"),
        ("0000-00-00 00:00:00", "id"),
        ("2026-13-01", "id"),
        ("2026-11-29 05:16 PM", "id"),
    ],
)
def test_only_texts_that_training_reads_are_times(tmp_path, time, use):
    rows = [f"{n % 2},{time if n == 9 else f'2026-11-{n:02d}'}\n" for n in range(1, 29)]
    (tmp_path / "x.csv").write_text("".join(["label,when\n", *rows]))
    source = open_raw(str(tmp_path / "x.csv"))
    found = suggest_settings(facts_of_columns(source), source.types)
    assert found.uses["when"][0] == use
    if use == "time":
        times = times_of_text(pa.array([time]), found.settings["text"]["times"]["when"])
        assert times[0].is_valid


def test_true_and_false_are_a_label_as_pandas_writes_them(tmp_path):
    rows = [f"{n % 3 == 0},{n % 7},{n % 5 > 0}\n" for n in range(90)]
    (tmp_path / "x.csv").write_text("".join(["clicked,user,seen\n", *rows]))
    source = open_raw(str(tmp_path / "x.csv"))
    found = suggest_settings(facts_of_columns(source), source.types)
    assert {name: use for name, (use, _) in found.uses.items()} == {
        "clicked": "label",
        "user": "id",
        "seen": "id",
    }
    assert decode_labels(pa.array([row.split(",")[0] for row in rows])).sum() == 30


def test_what_keeps_the_command_from_training_is_said(tmp_path):
    """A label that is missing; a model of one feature; a name that settings would resolve."""
    rows = [f"{n % 2 if n % 9 else ''},{n % 7}\n" for n in range(90)]
    (tmp_path / "x.csv").write_text("".join(["label,${oc.env:HOME}\n", *rows]))
    source = open_raw(str(tmp_path / "x.csv"))
    found = suggest_settings(facts_of_columns(source), source.types)
    assert found.command == ("model=logistic",)
    assert found.notes[0].startswith("label is missing in 10 rows, so it does not train")
    written = OmegaConf.create(as_yaml("x.csv", found, []))
    assert list(written.sparse) == ["${oc.env:HOME}"]


def test_many_values_are_estimated_and_frequent_ones_counted_exactly():
    random = np.random.default_rng(1)
    counted = SampledCounts(most=1000)
    for _ in range(50):
        values, counts = np.unique(random.integers(0, 40_000, 3000), return_counts=True)
        counted.add(values + 7, counts)
        counted.add(np.array([3, 5]), np.array([400, 300]))
    result = counted.result()
    assert result.share < 1
    assert result.distinct == pytest.approx(39_000, rel=0.1)
    assert result.most_frequent(2)[1].tolist() == [20_000, 15_000]
    assert len(result.values_N) <= 1000 + 1024


def test_the_command_writes_settings_that_read_the_logs(logs, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["inspect", str(logs), f"out={out}", "format=json"]) == 0
    said = json.loads(capsys.readouterr().out)
    settings = yaml.safe_load((out / "dataset" / "shop.yaml").read_text())
    assert settings.pop("defaults") == ["custom"]
    dataset = record(DataSettings, settings, "dataset")
    schema = schema_of(dataset, TablesOfDataset())
    assert open_source(dataset.path, schema).rows == ROWS == said["rows_read"]
    assert dataset.cardinality is None and dataset.batch_size % dataset.lanes == 0
    assert said["train"].endswith(f"--config-dir {out} dataset=shop")
    assert "<svg" not in (out / "shop.html").read_text()  # pictures are images with a text
    assert (out / "shop.html").read_text().count("<img") == 5
    assert [row["column"] for row in said["rows"]] == [*clicks()]
    assert all(not math.isnan(row["missing_share"]) for row in said["rows"])


@pytest.mark.full
def test_two_commands_make_a_trained_model_of_a_text(logs, tmp_path):
    found = command("data", "inspect", logs.name, "format=json", cwd=tmp_path)
    assert found.code == 0, found.err
    train = json.loads(found.out)["train"].split()
    trained = command("train", *train[3:], "hydra.run.dir=run", "trainer.devices=2", cwd=tmp_path)
    assert trained.code == 0, trained.err
    assert 0 < metrics_of(tmp_path / "run")["val_log_loss"] < 1


def test_settings_of_files_go_into_the_suggestion(tmp_path, capsys):
    lines = [f"{n % 7}::{n % 5}::{1 + n % 5}::2020-01-0{1 + n % 9} 10:00:00\n" for n in range(200)]
    (tmp_path / "ratings.dat").write_text("".join(lines) + "odd::row\n")
    arguments = ["file_format=csv", "text.columns=[user,item,rating,when]", "bad_rows=skip:1"]
    out = tmp_path / "out"
    command = ["inspect", str(tmp_path / "ratings.dat"), f"out={out}", "format=json"]
    assert main([*command, *arguments]) == 0
    said = json.loads(capsys.readouterr().out)
    settings = yaml.safe_load((out / "dataset" / "ratings.yaml").read_text())
    assert settings["text"] == {
        "columns": ["user", "item", "rating", "when"],
        "times": {"when": "iso"},
    }
    assert (settings["format"], settings["bad_rows"]) == ("csv", "skip:1")
    assert (settings["label"], settings["sparse"]) == ("rating", ["user", "item"])
    assert said["train"].endswith("dataset=ratings task=rating")
    assert main([*command, *arguments[:2]]) == 1
    assert "ratings.dat: line 201" in capsys.readouterr().err


def test_settings_that_were_changed_by_hand_stay(logs, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["inspect", str(logs), f"out={out}", "name=mine"]
    assert main([*command, "rows=500"]) == 0
    file = out / "dataset" / "mine.yaml"
    file.write_text(file.read_text().replace("1/10", "1/5"))
    assert main([*command, "rows=500"]) == 1
    assert "overwrite=true" in capsys.readouterr().err and "1/5" in file.read_text()
    assert main([*command, "rows=500", "overwrite=true"]) == 0
    assert "1/10" in file.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "path must be given"),
        (["no_such.csv"], "path=no_such.csv: no such file"),
        (["name=a/b"], "name=a/b: must be letters"),
    ],
)
def test_wrong_input_is_one_line(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", *arguments]) == 1
    assert words in capsys.readouterr().err and not (tmp_path / "inspected").exists()


def test_files_of_two_kinds_are_refused(tmp_path):
    for name, column in (("a", "x"), ("b", "z")):
        pq.write_table(pa.table({column: [1]}), tmp_path / f"{name}.parquet")
    with pytest.raises(DataError, match=r"a\.parquet has a column x, .*b\.parquet has none"):
        open_raw(str(tmp_path))


def test_a_path_may_stand_alone_behind_the_verb():
    assert with_path(["inspect", "a b.csv", "rows=3"]) == ["inspect", "path='a b.csv'", "rows=3"]
    assert with_path(["inspect", "logs/dt=1"]) == ["inspect", "path='logs/dt=1'"]
    for same in (["inspect", "path=a"], ["inspect", "--help"], ["inspect"], []):
        assert with_path(same) == same
