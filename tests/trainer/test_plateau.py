"""A schedule that lowers rates where validation no longer improves."""

import csv
from pathlib import Path

import pytest
from jobs import recipe, refusal, small

from recapp.run.run_checks import check_training
from recapp.run.training import changed_optimizer, schedule_of
from recapp.settings.records import to_plain
from recapp.stored.stored_model import read_manifest, read_meta

PLATEAU = [
    "optimizer/schedule=reduce_on_plateau",
    "optimizer.schedule.factor=0.5",
    "optimizer.schedule.threshold=10",  # no validation is a gain, but the first
    "trainer.val_check_interval=6",  # does not divide the 20 batches of an epoch
    "trainer.log_every_n_steps=1",
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("plateau")


@pytest.fixture(scope="module")
def unbroken(jobs, base):
    """A run of 26 steps in one piece."""
    jobs.train(base / "unbroken", *small(base / "logs"), *PLATEAU, "trainer.max_steps=26")
    return "unbroken"


def last(base, name):
    return Path(base, name, "checkpoints/last.ckpt")


def rates(base, name):
    """The rates of every step, by param group, in shares of the first."""
    with open(base / name / "csv/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    groups = {key: [float(row[key]) for row in rows if row[key]] for key in rows[0] if "lr" in key}
    return {key: [rate / own[0] for rate in own] for key, own in groups.items()}


def test_rates_of_tables_and_dense_part_fall_after_validations_without_gain(base, unbroken):
    found = rates(base, unbroken)
    assert len(found) == 2  # the dense part's and the tables'
    for own in found.values():
        assert set(own) == {1, 0.5, 0.25, 0.125}  # after 12, 18 and 24 steps, not after 6
        assert [own.count(share) for share in (0.5, 0.25)] == [6, 6]


@pytest.mark.full
@pytest.mark.parametrize("stop", [13, pytest.param(18, marks=pytest.mark.full)])
def test_a_resumed_run_equals_the_unbroken_one(jobs, base, unbroken, stop):
    jobs.train(base / "stopped", *small(base / "logs"), *PLATEAU, f"trainer.max_steps={stop}")
    jobs.train(base / "on", f"ckpt_path={last(base, 'stopped')}", "trainer.max_steps=26")
    assert read_manifest(last(base, "on")).metrics == read_manifest(last(base, unbroken)).metrics
    states = [read_meta(last(base, name))["lr_schedulers"] for name in ("on", unbroken)]
    assert states[0] == states[1] and states[0][0]["num_bad_epochs"] == 0


def test_the_schedule_of_torch_takes_a_monitor_and_no_other_does(jobs, base):
    found = schedule_of(recipe("train", [*small(base / "logs"), *PLATEAU]))
    assert (found.arguments["monitor"], found.arguments["mode"]) == ("val_auc", "max")
    step = (
        "optimizer.schedule={_target_: torch.optim.lr_scheduler.StepLR, step_size: 5, monitor: x}"
    )
    steps = recipe("train", [*small(base / "logs"), step])
    assert "unknown setting optimizer.schedule.monitor" in refusal(check_training, steps)[1]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (
            "optimizer.schedule.monitor=val_loss",
            "optimizer.schedule.monitor=val_loss: not measured",
        ),
        (
            "optimizer.schedule.monitor=val_calibration",
            "val_calibration: neither larger nor smaller values of it are better",
        ),
        ("optimizer.schedule.monitor=null", "optimizer.schedule.monitor=None: not measured"),
        ("optimizer.schedule.mode=min", "optimizer.schedule.mode=min: a larger val_auc is better"),
        ("dataset.val_share=0", "dataset.val_share=0: optimizer.schedule ("),
        ("trainer.limit_val_batches=0", "trainer.limit_val_batches=0: optimizer.schedule ("),
    ],
)
def test_a_monitor_that_cannot_be_right_is_refused(base, setting, says):
    settings = recipe("train", [*small(base / "logs"), *PLATEAU, setting])
    assert says in refusal(schedule_of, settings)[1]


def test_a_schedule_that_follows_another_metric_than_the_checkpoints_begins_anew(base):
    other = ["optimizer.schedule.monitor=val_log_loss", "optimizer.schedule.mode=min"]
    before, now = (
        to_plain(recipe("train", [*small(base / "logs"), *PLATEAU, *more]).optimizer)
        for more in ([], other)
    )
    assert "monitor" in changed_optimizer(before, now).changed["schedule"]
    assert not any(changed_optimizer(before, before).changed.values())
