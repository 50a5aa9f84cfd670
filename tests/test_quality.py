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
def defaults(stored, logs):
    """One epoch under a plan."""
    return metrics_of(stored.run(*logs, "+plan=mixed", "seed=1"))


@pytest.fixture(scope="module")
def some_steps(stored, logs):
    return metrics_of(stored.run(*logs, "+plan=mixed", SOME_STEPS))


def test_the_defaults_train_well_on_real_logs(defaults):
    assert defaults["val_auc"] >= LEAST_AUC and defaults["val_log_loss"] <= MOST_LOG_LOSS
    assert 0.9 < defaults["val_calibration"] < 1.1 and defaults["val_normalized_entropy"] < 0.9


def test_another_seed_trains_another_model(train, some_steps):
    other = train("seed", "+plan=mixed", SOME_STEPS, "seed=2")
    assert other["val_auc"] != some_steps["val_auc"]


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_that_cuts_tables_trains_on_real_logs_to_the_same_bits(train, some_steps, plan):
    found = train(plan, f"+plan={plan}", *PLANS[plan], SOME_STEPS)
    assert validation(found) == validation(some_steps)


def test_pooled_tables_train_as_well(train, defaults):
    found = train("pooled", "+plan=mixed", "plan.mode=pooled")
    for name, apart in POOLED_APART.items():
        assert found[name] == pytest.approx(defaults[name], rel=apart), name


def test_a_member_of_the_best_recipe_beats_the_defaults_on_real_logs(train, defaults):
    found = train("best", "experiment=criteo_best", "ensemble=1")
    assert found["val_auc"] >= max(BEST_AUC, defaults["val_auc"])
    assert found["val_log_loss"] <= BEST_LOG_LOSS


def test_a_model_of_real_logs_is_evaluated_from_its_checkpoint_alone(jobs, base, defaults):
    found = jobs.evaluate(
        base / "eval", f"ckpt_path={defaults['checkpoint']}", "+plan=row_wise", world=4
    )
    assert validation(found) == pytest.approx(validation(defaults), rel=1e-5)


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
