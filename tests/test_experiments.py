"""The experiments of `conf/experiment`: HugeCTR's training run under its two plans, scaled."""

import csv
import re

import pytest
import torch
import yaml
from jobs import command, metrics_of, recipe, resolved, small, validation

from recapp.run.constructors import make
from recapp.run.model import build_model
from recapp.run.run_checks import check_data
from recapp.settings.option_files import conf_dir

NOTEBOOK = "experiment=hugectr_notebook"
PLANS = ("dp_and_localized", "distributed")
SMALL = ("tables.dim=8", "model.bottom_layers=[16,8]", "model.top_layers=[16,1]")


def curve(directory, name):
    """The values of one name in a run's curves, as they are written."""
    with (directory / "csv/metrics.csv").open() as file:
        return [row[name] for row in csv.DictReader(file) if row[name]]


# ---- the settings


def test_no_experiment_sets_a_plan():
    files = sorted((conf_dir() / "experiment").glob("*.yaml"))
    assert files
    for file in files:
        content = yaml.safe_load(file.read_text())
        listed = [name for entry in content.get("defaults", []) for name in entry]
        assert "plan" not in content and not any("plan" in name for name in listed), file


def test_the_notebook_trains_as_hugectr_says():
    settings = resolved("train", [NOTEBOOK])
    trainer, optimizer = settings["trainer"], settings["optimizer"]
    assert [trainer[key] for key in ("max_steps", "max_epochs", "log_every_n_steps")] == [
        1000,
        None,  # as many as the steps take
        100,
    ]
    assert (trainer["val_check_interval"], trainer["limit_val_batches"]) == (100, 70)
    assert settings["dataset"]["batch_size"] == settings["dataset"]["val_batch_size"] == 65_536
    for part, kind in (("dense", "torch.optim.SGD"), ("sparse", "recapp.optim.rules.sgd")):
        assert optimizer[part]["_target_"] == kind and optimizer[part]["lr"] == 0.5
    assert optimizer["schedule"]["warmup_steps"] == 300
    assert optimizer["schedule"]["decay_start"] == 0
    assert settings["metrics"]["names"][0] == "log_loss"
    assert settings["choices"].get("plan") is None


def test_its_thousand_steps_are_one_and_eight_tenths_epochs_and_every_validation_row_counts():
    dataset = resolved("train", [NOTEBOOK])["dataset"]
    rows = dataset["generate"]["rows"]
    assert 1000 * dataset["batch_size"] / (rows * 8 / 9) == pytest.approx(1.79, abs=0.005)
    assert -(-rows // 9 // dataset["val_batch_size"]) == 70
    assert dataset["generate"]["positives"] == 0.032


def test_its_model_has_the_notebooks_numbers_of_parameters():
    model = build_model(recipe("train", [NOTEBOOK]), on_paper=True)
    tables = model.embedding_bag_collection.embedding_bag_configs()
    assert len(tables) == 26 and {table.embedding_dim for table in tables} == {128}
    assert sum(table.num_embeddings for table in tables) == 1_221_286
    assert sum(p.numel() for p in model.bottom.parameters()) == 171_392
    assert sum(p.numel() for p in model.top.parameters()) == 2_197_505


def test_after_step_100_the_rate_is_that_of_step_101_and_from_300_on_the_whole():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    wanted = recipe("train", [NOTEBOOK]).optimizer.schedule
    schedule = make(wanted, "optimizer.schedule", optimizer)
    shown = []
    for _ in range(1000):
        optimizer.step()
        schedule.step()
        shown.append(optimizer.param_groups[0]["lr"])
    assert shown[99] == 0.5 * 101 / 300 and f"{shown[99]:.6f}" == "0.168333"
    assert set(shown[299:]) == {0.5}


def test_the_scale_is_said_once(tmp_path, capfd):
    given = [NOTEBOOK, "dataset.scale=1/1000", f"dataset.path={tmp_path}/logs"]
    scaled = recipe("train", given)
    check_data(scaled)
    assert capfd.readouterr().err.splitlines() == [
        "dataset.scale=1/1000: batches of 64 rows instead of 65,536"
    ]
    # what is kept with a run are the numbers as written, and the scale
    assert (scaled.dataset.batch_size, scaled.dataset.scale) == (65_536, "1/1000")


# ---- runs


@pytest.mark.full
def test_a_scaled_run_learns_the_same_under_both_plans_and_goes_on_at_its_scale(jobs, tmp_path):
    """On small tables, at a scale of which the checkpoint knows."""
    made = small(tmp_path / "logs", rows=60_000, batch_size=2_560, val_batch_size=2_560)
    said = (NOTEBOOK, *made, "dataset.scale=1/10", *SMALL)
    said += ("trainer.log_every_n_steps=1", "trainer.max_steps=4")
    found = [jobs.train(tmp_path / plan, *said, f"+plan={plan}") for plan in PLANS]
    assert [run["batch_size"] for run in found] == [256, 256]
    assert found[0]["rows_train"] + found[0]["rows_val"] == 6_000
    assert (tmp_path / "logs_1_10").is_dir() and not (tmp_path / "logs").exists()
    assert validation(found[0]) == validation(found[1])
    losses = [curve(tmp_path / plan, "train_loss") for plan in PLANS]
    assert len(losses[0]) == 4 and losses[0] == losses[1]
    last = f"ckpt_path={tmp_path}/{PLANS[0]}/checkpoints/last.ckpt"
    assert jobs.train(tmp_path / "on", last, "trainer.max_steps=6")["batch_size"] == 256
    assert validation(jobs.evaluate(tmp_path / "eval", last)) == validation(found[0])


@pytest.mark.full
def test_the_notebook_under_both_plans_ends_in_a_comparison_of_equal_losses(tmp_path):
    done = command(
        "train",
        "-m",
        f"+plan={','.join(PLANS)}",
        NOTEBOOK,
        "dataset.scale=1/1000",
        "trainer.devices=2",
        "trainer.max_steps=200",
        *SMALL,
        "hydra.sweep.dir=sweep",
        cwd=tmp_path,
    )
    assert done.code == 0, done.err
    runs = [tmp_path / f"sweep/{job}" for job in (0, 1)]
    first, second = map(metrics_of, runs)
    assert (first["plan"], second["plan"]) == PLANS
    assert validation(first) == validation(second)
    assert curve(runs[0], "train_loss") == curve(runs[1], "train_loss") != []
    # it learns: the loss is below the entropy of the clicks' share
    assert first["val_normalized_entropy"] < 1
    for step, rate in ((100, "0.168333"), (200, "0.335")):
        lines = re.findall(rf"^step {step}/200, .* s for 100 steps, .*$", done.err, re.MULTILINE)
        assert len(lines) == 2 and all(f", lr {rate}," in line for line in lines)
    assert done.err.count("dataset.scale=1/1000: ") == 2  # once in each job
    ending = " ".join(done.out.rpartition("sweep/comparison.csv")[2].split())
    assert "All runs reach the same validation log loss: " in ending
    assert "The plan does not change what is learned: " in ending
    verdict = ending.partition("what is learned: ")[2]
    assert all(plan in verdict for plan in PLANS) and "samples/s" in verdict
