"""How good a model comes out: on real click logs, and on generated ones whose best possible score
is known.

Real logs, one epoch: measured at seeds 1, 2, 3 are .7590, .7599, .7589 AUC and .4876, .4870, .4880
log loss; pooled tables, which sum in another order, come to .7589 and .4878 where unique ones have
.7590 and .4876. A logistic regression on the same rows reaches .7605, .4867. Generated ones: tables
of 6 rows, so that everything about them can be learnt from 51,000 rows in one epoch of 200 steps.
Measured at two ranks: .9202 of the hidden model's .9300 AUC and .305 for its .287 log loss.
"""

import json
from pathlib import Path
from statistics import mean

import pytest
from jobs import metrics_of, validation

pytestmark = pytest.mark.full

PLANS = {"column_wise": ["++plan.column_width=5"], "grid_shard": ["topology.hosts=2"]}
SOME_STEPS = "trainer.max_steps=40"
BEST_AUC = 0.76  # of one member; seeds differ by .003
BEST_LOG_LOSS = 0.488
LEAST_AUC = 0.757
MOST_LOG_LOSS = 0.490
SHORT_OF_THE_HIDDEN_MODEL = {"auc": 0.015, "log_loss": 0.03}
# measured: a tenth
POOLED_APART = {
    "val_auc": 0.002,
    "val_log_loss": 0.002,
    "val_normalized_entropy": 0.002,
    "val_calibration": 0.02,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("quality")


@pytest.fixture(scope="module")
def logs(real_data):
    """The settings of the real logs, with the defaults: one epoch."""
    return ["dataset=criteo_kaggle", f"dataset.path={real_data / 'criteo_kaggle_137k/train'}"]


@pytest.fixture(scope="module")
def train(jobs, logs, base):
    """`train(name, *overrides)` one epoch on the real logs."""
    return lambda name, *overrides: jobs.train(base / name, *logs, *overrides)


@pytest.fixture(scope="module")
def seeds(stored, logs):
    """The runs of two seeds under one plan."""
    runs = [stored.run(*logs, "+plan=mixed", f"seed={seed}") for seed in (1, 2)]
    return [metrics_of(run) for run in runs]


def test_the_defaults_train_well_on_real_logs(seeds):
    assert mean(run["val_auc"] for run in seeds) >= LEAST_AUC
    assert mean(run["val_log_loss"] for run in seeds) <= MOST_LOG_LOSS
    assert all(
        0.9 < run["val_calibration"] < 1.1 and run["val_normalized_entropy"] < 0.9 for run in seeds
    )
    assert len({run["val_auc"] for run in seeds}) == 2


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_that_cuts_tables_trains_on_real_logs_to_the_same_bits(train, stored, logs, plan):
    expected = metrics_of(stored.run(*logs, "+plan=mixed", SOME_STEPS))
    found = train(plan, f"+plan={plan}", *PLANS[plan], SOME_STEPS)
    assert validation(found) == validation(expected)


def test_pooled_tables_train_as_well(train, seeds):
    found = train("pooled", "+plan=mixed", "plan.mode=pooled")
    for name, apart in POOLED_APART.items():
        assert found[name] == pytest.approx(seeds[0][name], rel=apart), name


def test_a_member_of_the_best_recipe_beats_the_defaults_on_real_logs(train, seeds):
    found = train("best", "experiment=criteo_best", "ensemble=1")
    assert found["val_auc"] >= max(BEST_AUC, *(run["val_auc"] for run in seeds))
    assert found["val_log_loss"] <= BEST_LOG_LOSS


def test_a_model_of_real_logs_is_evaluated_from_its_checkpoint_alone(jobs, base, seeds):
    found = jobs.evaluate(
        base / "eval", f"ckpt_path={seeds[0]['checkpoint']}", "+plan=row_wise", world=4
    )
    assert validation(found) == pytest.approx(validation(seeds[0]), rel=1e-5)


def test_what_can_be_known_is_learnt(jobs, base):
    easy = [
        f"dataset.path={base / 'easy'}",
        "dataset.generate.rows=60000",
        "dataset.generate.separability=2",
        f"dataset.table_rows={str([6] * 26).replace(' ', '')}",
        "dataset.batch_size=256",
    ]
    found = jobs.train(base / "easy_mixed", *easy, "+plan=mixed")
    best = json.loads(Path(base, "easy/_truth.json").read_text())["validation"]
    assert best["auc"] - SHORT_OF_THE_HIDDEN_MODEL["auc"] < found["val_auc"] < best["auc"]
    assert (
        best["log_loss"]
        < found["val_log_loss"]
        < best["log_loss"] + SHORT_OF_THE_HIDDEN_MODEL["log_loss"]
    )
