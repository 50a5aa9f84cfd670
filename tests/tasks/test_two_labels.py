"""A task of two labels and two outputs in a package of the user's own trains, validates, resumes,
sweeps and predicts, without a change in recapp.
"""

import csv
import json
import os
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jobs import command, metrics_of, validation

from recapp import load_model
from recapp.errors import ConfigError

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


def test_it_trains_on_two_ranks_and_says_what_its_task_shows(trained):
    found, job = trained
    metrics = metrics_of(job)
    assert set(validation(metrics)) == {"val_click_auc", "val_order_loss"}
    assert 0.5 < metrics["val_click_auc"] <= 1 and metrics["status"] == "ok"
    assert "validation AUC of clicks" in found.out and "validation log loss of orders" in found.out
    assert ", validation: AUC of clicks 0." in found.err and "log loss of orders 0." in found.err
    stored = json.loads((job / "task.json").read_text())
    assert stored["best"] == "order_loss" and len(stored["metrics"]) == 2


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


def test_a_label_that_the_data_do_not_name_is_refused_before_ranks_start(shop):
    wrong = [one for one in settings(shop) if not str(one).startswith("dataset.label")]
    found = command("train", *wrong, "dataset.label=[clicked]", cwd=shop, PYTHONPATH=HERE).error()
    assert found.startswith("dataset.label=clicked: ShopTask compares order with the label ordered")


def test_artefacts_and_scorers_say_that_they_have_one_output(trained, shop):
    _, job = trained
    says = "ShopTask has the outputs click (sigmoid), order (sigmoid)"
    last = job / "checkpoints/last.ckpt"
    named = (f"ckpt_path={last}", TRUST, "output=artefact", "compile=false")
    assert says in command("export", *named, cwd=shop, PYTHONPATH=HERE).error()
    assert not (shop / "artefact").exists()
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_model(last, trust=["shop_task"])
