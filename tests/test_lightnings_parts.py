"""What Lightning brings, as a run takes it: callbacks, bars, profilers, intervals; or one line that
says why not.
"""

import csv
import json

import pytest
import yaml
from jobs import refusal, small
from tiers import one_of

CHECKPOINT = "callbacks.checkpoint"


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Overrides for small logs; 20 batches an epoch."""
    return [*small(tmp_path_factory.mktemp("parts") / "logs"), "+plan=row_wise"]


REFUSED = [
    (
        ["metrics.names=[log_loss]"],
        f"{CHECKPOINT}.monitor=val_auc: not measured (metrics.names); known: val_log_loss; "
        f"set {CHECKPOINT}.monitor=val_log_loss {CHECKPOINT}.mode=min",
    ),
    (
        [f"{CHECKPOINT}.monitor=val_log_loss"],
        f"{CHECKPOINT}.mode=max: a smaller val_log_loss is better; set {CHECKPOINT}.mode=min",
    ),
    (
        [f"+{CHECKPOINT}.dirpath=elsewhere"],
        f"{CHECKPOINT}.dirpath: cannot be set: checkpoints=DIR says where they are written",
    ),
    (
        ["+callbacks.x._target_=os.getcwd"],
        "callbacks.x._target_=os.getcwd: makes a str, and must make a Callback of lightning",
    ),
    (
        [f"{CHECKPOINT}.monitor=auc"],
        f"{CHECKPOINT}.monitor=auc: not measured (metrics.names); did you mean val_auc",
    ),
    (
        [f"{CHECKPOINT}.monitor=val_loss"],
        f"did you mean val_log_loss?; set {CHECKPOINT}.monitor=val_log_loss {CHECKPOINT}.mode=min",
    ),
    ([f"{CHECKPOINT}.monitor=train_auc"], f"{CHECKPOINT}.monitor=train_auc: not measured"),
    (
        ["callbacks=early_stopping", "callbacks.early_stopping.monitor=auc"],
        "callbacks.early_stopping.monitor=auc: not measured",
    ),
    (
        [f"+{CHECKPOINT}.save_last=true"],
        f"{CHECKPOINT}.save_last: cannot be set: every run keeps last.ckpt",
    ),
    (
        [f"{CHECKPOINT}.filename=last"],
        f"{CHECKPOINT}.filename=last: must not begin with last.ckpt, which every run keeps",
    ),
    (
        [f"{CHECKPOINT}.filename='{{step:zz}}'"],
        f"{CHECKPOINT}.filename={{step:zz}}: is no pattern of a file name",
    ),
    (
        [f"{CHECKPOINT}.filename='{{stp}}'"],
        f"{CHECKPOINT}.filename={{stp}}: stp is not measured; did you mean step",
    ),
    (
        [
            "+callbacks.e={_target_: lightning.pytorch.callbacks.OnExceptionCheckpoint, "
            "dirpath: here}"
        ],
        "callbacks.e.dirpath: cannot be set",
    ),
    (
        [
            "+callbacks.swa._target_=lightning.pytorch.callbacks.StochasticWeightAveraging",
            "+callbacks.swa.swa_lrs=0.1",
        ],
        "callbacks.swa (StochasticWeightAveraging): cannot be used: it averages parameters, "
        "and tables are none",
    ),
    (
        ["+callbacks.find._target_=lightning.pytorch.callbacks.LearningRateFinder"],
        "-m optimizer.dense.lr=0.001,0.01",
    ),
    (
        ["+logger.w._target_=lightning.pytorch.loggers.WandbLogger"],
        "logger.w (lightning.pytorch.loggers.WandbLogger): ",
    ),
    (
        ["trainer.limit_train_batches=0.0001"],
        "trainer: You requested to check 0.0001 of the `train_dataloader`",
    ),
]


@pytest.mark.parametrize(("overrides", "says"), one_of(3, REFUSED))
def test_what_cannot_be_is_refused_in_one_line(jobs, logs, tmp_path, overrides, says):
    kind, line = refusal(jobs.train, tmp_path, *logs, *overrides, world=1)
    assert kind == "ConfigError" and says in line, line


def test_another_metric_is_watched_where_it_is_measured_and_its_direction_is_right(
    jobs, logs, tmp_path
):
    found = jobs.train(
        tmp_path,
        *logs,
        "metrics.names=[log_loss]",
        f"{CHECKPOINT}.monitor=val_log_loss",
        f"{CHECKPOINT}.mode=min",
        "trainer.max_steps=4",
        "trainer.val_check_interval=2",
        world=1,
    )
    with open(tmp_path / "csv/metrics.csv") as file:
        losses = [float(row["val_log_loss"]) for row in csv.DictReader(file) if row["val_log_loss"]]
    assert found["val_log_loss"] == min(losses) and len(losses) == 2 and "val_auc" not in found


def test_a_share_of_an_epoch_is_an_interval_between_validations(jobs, logs, tmp_path):
    jobs.train(tmp_path, *logs, "trainer.val_check_interval=0.25", "trainer.max_steps=25", world=1)
    with open(tmp_path / "csv/metrics.csv") as file:
        assert [row["step"] for row in csv.DictReader(file) if row["val_auc"]] == [
            "4",
            "9",
            "14",
            "19",
            "24",
        ]


def test_a_run_that_ends_before_its_first_validation_has_no_metrics(jobs, logs, tmp_path):
    found = jobs.train(
        tmp_path, *logs, "trainer.check_val_every_n_epoch=2", "trainer.max_steps=2", world=1
    )
    assert found["steps"] == 2 and not [name for name in found if name.startswith("val_")]


def test_a_profiler_reports_and_lightnings_progress_bar_takes_the_place_of_ours(
    jobs, logs, tmp_path
):
    jobs.train(
        tmp_path,
        *logs,
        "+trainer.profiler=simple",
        "+callbacks.bar._target_=lightning.pytorch.callbacks.RichProgressBar",
        "trainer.max_steps=2",
        world=1,
    )
    said = (tmp_path / "rank0.err").read_text()
    assert "run_training_batch" in said and "Total time" in said
    assert "step 2/2" not in said
    assert "Epoch 0/" in (tmp_path / "rank0.out").read_text() + said


def test_rank_0_alone_makes_the_loggers_and_they_get_all_settings(jobs, logs, tmp_path):
    jobs.train(
        tmp_path,
        *logs,
        "logger=tensorboard",
        "+logger.own._target_=own_logger.Database",
        "+logger.own.api_key=secret",
        "+plan.tables={C2*: data_parallel}",
        "trainer.max_steps=2",
    )
    (logged,) = json.loads((tmp_path / "database.json").read_text())
    assert logged["optimizer.dense.lr"] == 1e-3 and logged["dataset.batch_size"] == 256
    assert logged["plan"] == "row_wise" and logged["trainer.average.kind"] == "none"
    assert logged["plan.tables"] == {"C2*": "data_parallel"}
    assert "secret" not in str(logged) and not [name for name in logged if "logger." in name]
    in_tensorboard = yaml.safe_load((tmp_path / "tensorboard/hparams.yaml").read_text())
    assert in_tensorboard["optimizer.dense.lr"] == 1e-3
