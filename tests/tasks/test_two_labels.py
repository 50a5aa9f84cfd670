"""A task of two labels and two outputs in a package of the user's own trains, validates, resumes,
sweeps, predicts, exports and serves, without a change in recapp.
"""

import csv
import json
import os
from copy import deepcopy
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from jobs import command, metrics_of, validation
from serving.processes import ServerProcess
from serving.small_models import asked
from shop_task import ShopTask
from stored import copy

from recapp import load_model
from recapp.errors import ArtefactError, ConfigError
from recapp.serving.served_model import Served, check_model
from recapp.stored.manifest import sealed
from recapp.tasks.task import ClickTask

ROWS = 1200
TESTS = Path(__file__).resolve().parents[1]
HERE = os.pathsep.join([str(TESTS.parent), str(TESTS)])
TRUST = "trust=[shop_task]"


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A folder with logs of a shop and the options of the user's package."""
    folder = tmp_path_factory.mktemp("shop")
    random = np.random.default_rng(7)
    user = random.integers(0, 40, ROWS)
    columns = {
        "clicked": (user % 3 == 0).astype(np.int8),
        "ordered": (user % 7 == 0).astype(np.int8),
        "price": random.random(ROWS).astype(np.float32),
        "user": user,
        "item": random.integers(0, 30, ROWS),
    }
    pq.write_table(pa.table(columns), folder / "logs.parquet")
    options = {
        "task/shop.yaml": "_target_: shop_task.ShopTask\norder_weight: 1.0\n",
        "model/towers.yaml": "_target_: shop_task.TwoTowers\n",
    }
    for name, text in options.items():
        path = folder / "mine" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return folder


def settings(shop):
    return (
        *("--config-dir", shop / "mine", "task=shop", "model=towers", "dataset=custom"),
        *(f"dataset.path={shop}/logs.parquet", "dataset.label=[clicked,ordered]"),
        *("dataset.dense=[price]", "dataset.sparse=[user,item]", "dataset.batch_size=128"),
        *("tables.dim=4", "trainer.max_epochs=1", "optimizer.dense.lr=0.01"),
    )


def run(name, *arguments, cwd):
    found = command(name, *arguments, cwd=cwd, PYTHONPATH=HERE)
    assert found.code == 0, found.err
    return found


@pytest.fixture(scope="module")
def trained(shop):
    found = run(
        "train",
        *settings(shop),
        f"hydra.run.dir={shop}/whole",
        "trainer.devices=2",
        "trainer.val_check_interval=4",
        "trainer.log_every_n_steps=4",
        cwd=shop,
    )
    return found, shop / "whole"


@pytest.mark.full
def test_it_trains_on_two_ranks_and_says_what_its_task_shows(trained):
    found, job = trained
    metrics = metrics_of(job)
    assert set(validation(metrics)) == {"val_click_auc", "val_order_loss"}
    assert 0.5 < metrics["val_click_auc"] <= 1 and metrics["status"] == "ok"
    assert "validation AUC of clicks" in found.out and "validation log loss of orders" in found.out
    assert ", validation: AUC of clicks 0." in found.err and "log loss of orders 0." in found.err
    stored = json.loads((job / "task.json").read_text())
    assert stored["best"] == "order_loss" and len(stored["metrics"]) == 2


@pytest.mark.full
def test_its_best_checkpoint_is_that_of_its_best_metric(trained):
    _, job = trained
    with open(job / "csv/metrics.csv") as file:
        losses = [
            float(row["val_order_loss"]) for row in csv.DictReader(file) if row["val_order_loss"]
        ]
    assert len(losses) > 1 and metrics_of(job)["val_order_loss"] == min(losses)


@pytest.mark.full
def test_it_is_evaluated_to_the_metrics_it_was_saved_with(trained, shop):
    _, job = trained
    stored = metrics_of(job)
    named = (f"ckpt_path={stored['checkpoint']}", TRUST, f"hydra.run.dir={shop}/eval")
    run("eval", *named, "trainer.devices=1", cwd=shop)
    assert validation(metrics_of(shop / "eval")) == pytest.approx(validation(stored), abs=1e-12)


@pytest.mark.full
def test_going_on_gives_what_a_run_in_one_piece_gives(trained, shop):
    _, job = trained
    more = ("trainer.devices=2", "trainer.val_check_interval=4")
    run(
        *("train", *settings(shop), *more, "trainer.max_steps=5"),
        f"hydra.run.dir={shop}/part",
        cwd=shop,
    )
    last = shop / "part/checkpoints/last.ckpt"
    length = ("trainer.max_epochs=1", f"hydra.run.dir={shop}/part")
    run("train", f"ckpt_path={last}", TRUST, *length, cwd=shop)
    assert validation(metrics_of(shop / "part")) == validation(metrics_of(job))


@pytest.mark.full
def test_a_sweep_compares_its_metrics_and_reports_them(shop):
    sweep = ("-m", "task.order_weight=0.5,2", f"hydra.sweep.dir={shop}/sweep")
    found = run("train", *settings(shop), *sweep, "trainer.devices=1", cwd=shop)
    with open(shop / "sweep/comparison.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["ok", "ok"] and "val_auc" not in rows[0]
    losses = [float(row["val_order_loss"]) for row in rows]
    assert "validation log loss of orders" in found.out and "lower is better" in found.out
    best = f"{min(losses):.5f}"
    page = (shop / "sweep/report.html").read_text()
    assert best in page and "AUC of" in page and "validation AUC<" not in page


@pytest.mark.full
def test_a_prediction_has_a_column_for_each_output(trained, shop):
    _, job = trained
    wanted = (f"ckpt_path={job}/checkpoints/last.ckpt", TRUST, f"input={shop}/logs.parquet")
    output = shop / "scores.parquet"
    more = (f"output={output}", f"hydra.run.dir={shop}/predict", "trainer.devices=2")
    found = run("predict", *wanted, *more, cwd=shop)
    table = pq.read_table(output)
    assert table.column_names == ["click_score", "order_score"] and table.num_rows == ROWS
    logs = pq.read_table(shop / "logs.parquet")
    for label, column in (("clicked", "click_score"), ("ordered", "order_score")):
        positive = logs[label].to_numpy() > 0
        scores = table[column].to_numpy()
        assert scores[positive].mean() > scores[~positive].mean()
        assert metrics_of(shop / "predict")[f"mean_{column}"] == pytest.approx(scores.mean())
    assert "mean click_score" in found.out


def test_a_label_that_the_data_do_not_name_is_refused():
    with pytest.raises(ConfigError, match=r"^dataset.label=clicked: has no label ordered"):
        ShopTask().check_labels(("clicked",))


COLUMNS = ["click_score", "order_score"]


def exported(shop, job, name, *more):
    """The report of an export of the last checkpoint, and the artefact."""
    folder = shop / name
    named = (f"ckpt_path={job}/checkpoints/last.ckpt", TRUST, f"output={folder}", "name=clicks")
    found = run("export", *named, "format=json", *more, cwd=shop)
    return json.loads(found.out), folder


def loaded(path, **more):
    """A stored model of the shop."""
    return load_model(path, trust=["shop_task"], **more)


def logs_of(shop, rows=ROWS):
    return pq.read_table(shop / "logs.parquet").select(["price", "user", "item"]).slice(0, rows)


@pytest.fixture(scope="module")
def artefacts(trained, shop):
    """Reports and artefacts by width of the tables."""
    _, job = trained
    return {
        width: exported(shop, job, width, f"quantize={width}", "compile=false")
        for width in ("none", "int8")
    }


@pytest.mark.full
def test_an_artefact_scores_as_its_checkpoint_does(trained, shop, artefacts):
    _, job = trained
    rows = logs_of(shop)
    model = loaded(job / "checkpoints/last.ckpt")
    wanted = model.predict(rows)
    assert list(wanted) == COLUMNS and all(len(scores) == ROWS for scores in wanted.values())
    outputs = model(model.batch(rows.slice(0, 50)))
    assert list(outputs) == ["click", "order"]
    scores = model.scores(model.batch(rows.slice(0, 50)))
    for output, column in zip(outputs, COLUMNS, strict=True):
        assert torch.equal(scores[column], outputs[output].sigmoid())
    plain = loaded(artefacts["none"][1]).predict(rows)
    narrow = loaded(artefacts["int8"][1]).predict(rows)
    for column in COLUMNS:
        assert torch.equal(plain[column], wanted[column])
        assert 0 < (narrow[column] - wanted[column]).abs().max() < 0.05


@pytest.mark.full
def test_an_export_measures_the_metrics_of_its_task(trained, shop, artefacts):
    _, job = trained
    report, _ = artefacts["int8"]
    widths = {row["quantize"]: row for row in report["widths"]}
    own = ("quantize", "bytes", "click_auc", "order_loss", "order_loss_change", "largest_change")
    assert tuple(widths["exported"]) == own
    stored = validation(metrics_of(job))
    assert widths["none"]["click_auc"] == pytest.approx(stored["val_click_auc"])
    assert widths["none"]["order_loss"] == pytest.approx(stored["val_order_loss"])
    assert 0 < widths["int8"]["largest_change"] < widths["int4"]["largest_change"]


@pytest.mark.full
def test_an_export_chooses_by_the_metric_of_its_task(trained, shop):
    options = ("quantize=auto", "budget_ne=0.001", "compile=false")
    chosen, _ = exported(shop, trained[1], "auto", *options)
    assert chosen["widths"][-1]["order_loss_change"] <= 0.001
    assert {table["stored"] for table in chosen["tables"]} != {"fp32"}


@pytest.mark.full
def test_its_artefact_is_predicted_from_on_ranks(shop, artefacts):
    output = shop / "of_artefact.parquet"
    named = (f"ckpt_path={artefacts['int8'][1]}", TRUST, f"input={shop}/logs.parquet")
    run("predict", *named, f"output={output}", "trainer.devices=2", cwd=shop)
    table = pq.read_table(output)
    assert table.column_names == COLUMNS
    wanted = loaded(artefacts["int8"][1]).predict(logs_of(shop))
    for column in COLUMNS:
        found = torch.tensor(table[column].to_numpy())
        torch.testing.assert_close(found, wanted[column], rtol=0, atol=1e-6)


@pytest.mark.full
def test_an_artefact_stores_the_task_that_its_export_names(trained, shop):
    _, job = trained
    (shop / "mine/task/odds.yaml").write_text("_target_: shop_task.ShopTask\norder_weight: 0.5\n")
    more = ("--config-dir", shop / "mine", "task=odds", "compile=false", "report_rows=0")
    _, folder = exported(shop, job, "odds", *more)
    stored = json.loads((folder / "manifest.json").read_text())
    assert stored["config"]["task"]["order_weight"] == 0.5


@pytest.mark.full
def test_an_artefact_with_other_outputs_of_its_example_is_refused(shop, artefacts):
    model = copy(artefacts["none"][1], shop / "wrong")
    manifest = model / "manifest.json"
    entries = json.loads(manifest.read_text())
    del entries["checksum"]
    assert list(entries["outputs"]) == ["click", "order"]
    entries["outputs"]["order"][1] = 7.5
    manifest.write_text(sealed(json.dumps(entries)[:-1]))
    with pytest.raises(ArtefactError, match=r"row 1 has the order .*, must be 7\.500000"):
        loaded(model)


@pytest.mark.full
def test_a_server_answers_every_column_in_every_protocol(shop, artefacts):
    path = artefacts["int8"][1]
    table = logs_of(shop, 30)
    rows = table.to_pylist()
    wanted = {name: scores.tolist() for name, scores in loaded(path).predict(table).items()}
    answer = asked({"rows": rows}, "infer_rows", load=lambda: loaded(path)).json
    assert list(answer) == ["model_name", "model_version", "scores"]
    assert answer["scores"] == wanted
    kinds = {"price": "FP32", "user": "INT64", "item": "INT64"}
    inputs = [
        {"name": name, "datatype": kind, "shape": [30], "data": [row[name] for row in rows]}
        for name, kind in kinds.items()
    ]
    answer = asked({"inputs": inputs}, load=lambda: loaded(path)).json
    assert {each["name"]: each["data"] for each in answer["outputs"]} == wanted
    some = [{"name": "order"}, {"name": "click_score"}]
    answer = asked({"inputs": inputs, "outputs": some}, load=lambda: loaded(path)).json
    order, click = answer["outputs"]
    assert click["data"] == wanted["click_score"] and order["name"] == "order"
    logits = torch.tensor(order["data"], dtype=torch.float32)
    assert torch.equal(logits.sigmoid(), torch.tensor(wanted["order_score"]))
    refused = asked({"inputs": inputs, "outputs": [{"name": "score"}]}, load=lambda: loaded(path))
    assert refused.status == 400 and "output 'score': the model has none" in refused.error


@pytest.mark.full
def test_a_server_says_which_outputs_it_has_and_keeps_them(shop, artefacts):
    model = loaded(artefacts["int8"][1])
    names = [each["name"] for each in Served("clicks", model).metadata()["outputs"]]
    assert names == [*COLUMNS, "click", "order"]
    other = deepcopy(model)
    other.task = ClickTask()
    check_model(deepcopy(model), model)
    with pytest.raises(ConfigError, match=r"gives the scores score, and .*click_score, order"):
        check_model(other, model)


@pytest.mark.full
def test_the_commands_of_a_server_know_its_columns(shop, artefacts):
    path = artefacts["int8"][1]
    with ServerProcess(shop / "server", path, TRUST, PYTHONPATH=HERE) as server:
        rows = json.loads(server.ask("GET", "/v2/models/clicks/example")[2])["rows"]
        answer = json.loads(server.ask("POST", "/v2/models/clicks/infer_rows", {"rows": rows})[2])
        assert set(answer["scores"]) == {*COLUMNS}
        assert server.ask("GET", "/")[0] == 200
