"""A run on plain logs, without a word on ids or sizes: text ids, tables sized by what is there, and
what checkpoints keep of both.
"""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from jobs import refusal, validation

from recapp import load_model, plan
from recapp.dataset.data_settings import DataSettings, ScoringSettings
from recapp.dataset.schema import Schema
from recapp.errors import CheckpointError, ConfigError
from recapp.inference.export_settings import Export
from recapp.model_export import export_model
from recapp.stored.stored_model import read_manifest
from recapp.trainer.datamodule import ClickData

LENGTH = (
    "dataset.batch_size=64",
    "dataset.val_batch_size=64",
    "model.bottom_layers=[8]",
    "model.top_layers=[8,1]",
    "tables.dim=8",
)
DATA = ("dataset=custom", "dataset.sparse=[user,country,device,tags]", "tables.max_rows=3000")


def write(path, rows, users, seed=0):
    """`user` is decimal text, `country` one of four words, `device` a UUID of its own, `tags` lists
    of words.
    """
    random = np.random.default_rng(seed)
    user = random.integers(0, users, rows)
    country = np.array(["DE", "US", "FR", "10"])[random.integers(0, 4, rows)]
    clicked = (user % 3 == 0) ^ (country == "US") ^ (random.random(rows) < 0.1)
    table = pa.table(
        {
            "label": clicked,
            "user": [str(n) for n in user],
            "country": country,
            "device": [
                f"6ba7b810-9dad-11d1-80b4-{n:012x}" for n in random.integers(0, 2**40, rows)
            ],
            "tags": [[f"t{n % 5}"] * (n % 3) for n in user],
        }
    )
    pq.write_table(table, path, row_group_size=200)
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("sizes")
    write(base / "train.parquet", 1300, 50)
    write(base / "more.parquet", 1300, 900, seed=1)
    write(base / "few.parquet", 5, 50, seed=3)
    return base


@pytest.fixture(scope="module")
def run(base, jobs):
    """The directory of a run of two ranks, and its metrics."""
    metrics = jobs.train(
        base / "run", *DATA, *LENGTH, f"dataset.path={base}/train.parquet", "trainer.max_epochs=4"
    )
    return base / "run", metrics


def table_rows(path):
    return {
        table: blocks[0].shape[0]
        for (table, tensor), blocks in read_manifest(path).tensors.items()
        if tensor == "weight"
    }


def test_text_trains_without_dense_columns(run):
    _, metrics = run
    assert metrics["status"] == "ok" and metrics["val_auc"] > 0.75


def test_tables_are_sized_by_their_ids_and_every_record_of_the_run_says_so(run):
    directory, metrics = run
    rows = [256, 16, 3000, 32]
    checkpoint = metrics["checkpoint"]
    assert list(table_rows(checkpoint).values()) == rows and list(table_rows(checkpoint)) == [
        "user",
        "country",
        "device",
        "tags",
    ]
    assert read_manifest(checkpoint).config["dataset"]["table_rows"] == rows
    assert (
        yaml.safe_load((directory / "resolved.yaml").read_text())["dataset"]["table_rows"] == rows
    )


def test_the_checkpoint_keeps_how_text_was_read(run):
    stored = read_manifest(run[1]["checkpoint"]).info["ids"]
    assert stored == {"text": "xxh64", "hex": [], "lists": ["tags"]}


@pytest.fixture(scope="module", params=["checkpoint", "artefact"])
def stored_model(base, run, request):
    if request.param == "checkpoint":
        return run[1]["checkpoint"]
    folder = base / "art"
    export_model(run[1]["checkpoint"], folder, Export(compile=False, report_rows=0))
    return str(folder)


def test_a_row_has_one_score_whatever_rows_are_beside_it(run, stored_model):
    """Null tags are an empty list, alone and beside other rows."""
    model = load_model(stored_model)
    rest = {"user": "7", "country": "DE", "device": None}
    alone = [{**rest, "tags": tags} for tags in (None, [])]
    beside = [{**rest, "tags": tags} for tags in (["t1"], None)]
    scores = [model.predict(pa.Table.from_pylist([row])).item() for row in alone]
    pair = model.predict(pa.Table.from_pylist(beside)).tolist()
    assert scores[0] == scores[1] == pytest.approx(pair[1]) and pair[0] != pair[1]


@pytest.mark.full
def test_scored_files_without_a_list_are_read_as_training_read_its_own(base, jobs, stored_model):
    rows = pq.read_table(base / "few.parquet").drop_columns(["label"])
    place = rows.column_names.index("tags")
    scores = []
    for name, tags in (
        ("text", pa.nulls(len(rows), pa.string())),
        ("null", pa.nulls(len(rows))),
        ("lists", pa.array([[]] * len(rows), pa.list_(pa.string()))),
    ):
        pq.write_table(rows.set_column(place, "tags", tags), base / f"{name}.parquet")
        into = base / f"{Path(stored_model).stem}_{name}.parquet"
        given = [f"ckpt_path={stored_model}", f"input={base}/{name}.parquet", f"output={into}"]
        jobs.run("predict", base / f"job_{into.stem}", given, 1)
        scores.append(pq.read_table(into)["score"].to_pylist())
    assert scores[0] == scores[1] == scores[2] and len(set(scores[0])) > 1


@pytest.mark.parametrize("world", [1, pytest.param(4, marks=pytest.mark.full)])
def test_evaluation_has_the_checkpoints_sizes_whatever_the_data(base, run, jobs, world):
    checkpoint = run[1]["checkpoint"]
    measured = jobs.evaluate(base / f"eval{world}", f"ckpt_path={checkpoint}", world=world)
    assert validation(measured) == pytest.approx(validation(run[1]))
    other = jobs.evaluate(
        base / f"other{world}",
        f"ckpt_path={checkpoint}",
        f"dataset.path={base}/more.parquet",
        world=world,
    )
    assert other["status"] == "ok"


@pytest.mark.full
def test_training_goes_on_with_the_checkpoints_sizes_on_data_of_more_ids(base, run, jobs):
    given = (
        f"ckpt_path={run[1]['checkpoint']}",
        f"dataset.path={base}/more.parquet",
        "trainer.max_epochs=5",
    )
    more = jobs.train(base / "more", *given, world=1)
    assert table_rows(more["checkpoint"]) == table_rows(run[1]["checkpoint"])


def test_a_checkpoint_of_another_reading_is_refused_by_the_ranks_as_well(base, run):
    data = ClickData(
        DataSettings(path=str(base)), Schema("label", (), ("user", "country"), hex=("user",))
    )
    with pytest.raises(CheckpointError, match="on ids of user that were read as plain text"):
        data.check_ids(run[1]["checkpoint"], read_manifest(run[1]["checkpoint"]).info)


def test_rows_without_labels_are_for_prediction_only(base):
    data = ClickData(
        DataSettings(path=f"{base}/train.parquet"),
        Schema(None, (), ("user", "country")),
        scoring=ScoringSettings(input=f"{base}/train.parquet"),
    )
    for stage in ("fit", "validate", "test"):
        with pytest.raises(
            ConfigError, match=r"^dataset\.label=null: training and evaluation need"
        ):
            data.setup(stage)
    data.setup("predict")
    assert data.prediction_input.rows > 0


@pytest.mark.full
def test_ranks_without_a_row_validate_and_test(base, run, jobs):
    found = []
    for world in (1, 2, 4):
        given = (
            f"ckpt_path={run[1]['checkpoint']}",
            f"dataset.val_path={base}/few.parquet",
            f"dataset.test_path={base}/few.parquet",
        )
        found.append(validation(jobs.evaluate(base / f"few{world}", *given, world=world)))
        tested = jobs.evaluate(base / f"test{world}", *given, "split=test", world=world)
        assert tested["test_log_loss"] == pytest.approx(found[0]["val_log_loss"])
    assert found[1] == pytest.approx(found[0]) and found[2] == pytest.approx(found[0])


@pytest.mark.full
def test_ranks_without_a_row_to_validate_train(base, jobs):
    metrics = [
        jobs.train(
            base / f"train{world}",
            *DATA,
            *LENGTH,
            f"dataset.path={base}/train.parquet",
            f"dataset.val_path={base}/few.parquet",
            "trainer.max_steps=4",
            world=world,
        )
        for world in (1, 2, 4)
    ]
    for others in metrics[1:]:
        assert validation(others) == pytest.approx(validation(metrics[0]), rel=1e-5)


@pytest.mark.full
def test_a_mistake_that_counting_finds_is_raised_by_every_rank(base, jobs):
    write(base / "bad.parquet", 1300, 50)
    table = pq.read_table(base / "bad.parquet")
    reserved = pa.array([-(2**63) if n == 700 else n for n in range(1300)])
    pq.write_table(table.set_column(1, "user", reserved), base / "bad.parquet", row_group_size=200)
    kind, line = refusal(
        jobs.train, base / "bad", *DATA, *LENGTH, f"dataset.path={base}/bad.parquet"
    )
    assert (
        kind == "DataError"
        and "bad.parquet: column user, row 700 holds -9223372036854775808, the one number" in line
    )


@pytest.mark.parametrize(
    ("path", "more", "says", "rows"),
    [
        (
            "train.parquet",
            (),
            "tables are sized by the distinct ids of the first 65,536",
            [256, 16],
        ),
        (
            "train.parquet",
            ("statistics=assumed",),
            "to have 3,000 rows, no ids were counted: stat",
            [3000] * 2,
        ),
        ("nowhere", (), "to have 3,000 rows, no ids were counted: dataset.path=", [3000, 3000]),
    ],
)
def test_a_plan_on_paper_says_what_sizes_it_assumed(base, capsys, path, more, says, rows):
    given = [
        *DATA,
        f"dataset.path={base}/{path}",
        "dataset.sparse=[user,country]",
        "format=json",
        *more,
    ]
    assert plan.main(["explain", "trainer.devices=2", *given]) == 0
    printed = capsys.readouterr()
    assert says in printed.err.splitlines()[0]
    assert [table["rows"] for table in json.loads(printed.out)["rows"]] == rows
