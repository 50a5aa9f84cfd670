"""Going on from a checkpoint under another optimiser, rate or schedule than it was saved with: what
the settings say holds.
"""

import pytest
from trainer.runs import MORE, SCHEDULE, STOP, fit_twice

from recapp.trainer.changed_optimizer import ChangedOptimizer

RATES = ("optimizer.dense.lr=0.01", "optimizer.sparse.lr=0.04")


@pytest.fixture
def rates(logs, tmp_path):
    """`rates(first, then)`: the rates of the steps after a stop, and the module's optimiser."""

    return lambda first, then: fit_twice(logs, tmp_path, first, then)[:2]


def test_a_rate_that_the_settings_change_is_the_one_that_is_used_and_is_said(rates, capsys):
    found, _ = rates(RATES, ("optimizer.dense.lr=0.002", RATES[1]))
    assert found == [[0.002, 0.04]] * MORE
    assert (
        capsys.readouterr().err.count(
            "optimizer.dense.lr=0.002 takes the place of the checkpoint's"
        )
        == 1
    )


def test_what_is_not_changed_is_the_checkpoints_and_nothing_is_said(rates, capsys):
    found, _ = rates(RATES, RATES)
    assert found == [[0.01, 0.04]] * MORE and "the checkpoint's" not in capsys.readouterr().err


def test_a_changed_rate_goes_on_where_the_schedule_was(rates):
    found, _ = rates((*RATES, *SCHEDULE), (RATES[0], "optimizer.sparse.lr=0.4", *SCHEDULE))
    steps = range(STOP + 1, STOP + MORE + 1)
    assert found == [[pytest.approx(0.001 * s), pytest.approx(0.04 * s)] for s in steps]


def test_a_schedule_that_was_not_there_begins_and_one_that_is_left_out_ends(rates):
    found, _ = rates(RATES, (*RATES, *SCHEDULE))
    assert found == [[pytest.approx(0.001 * s), pytest.approx(0.004 * s)] for s in (1, 2, 3)]
    found, _ = rates((*RATES, *SCHEDULE), RATES)
    assert found == [[0.01, 0.04]] * MORE


def test_settings_of_a_schedule_of_torch_are_those_of_the_command_line(rates):
    steps = (
        "+optimizer.schedule={_target_: torch.optim.lr_scheduler.StepLR, step_size: 1, gamma: 0.5}",
    )
    other = (steps[0].replace("0.5", "0.1"),)
    found, _ = rates((*RATES, *steps), (*RATES, *other))
    assert [dense for dense, _ in found] == [
        pytest.approx(0.01 * 0.5**4 * 0.1**n) for n in range(MORE)
    ]


def test_another_dense_optimiser_begins_anew(rates, capsys):
    _, optimizer = rates(
        RATES, (*RATES, "optimizer.dense._target_=torch.optim.Adagrad", "~optimizer.dense.fused")
    )
    assert all(
        "sum" in state and "exp_avg" not in state for state in optimizer.dense.state.values()
    )
    assert (
        "optimizer.dense is another one than the checkpoint's; it begins anew"
        in capsys.readouterr().err
    )


def test_another_hyper_parameter_is_taken_too(rates):
    _, optimizer = rates(RATES, (*RATES, "+optimizer.dense.weight_decay=0.5"))
    assert [group["weight_decay"] for group in optimizer.dense.param_groups] == [0.5]


@pytest.mark.parametrize("before", [None, 5, "x", [], {}, {"dense": "x", "schedule": [1]}])
def test_a_stored_optimiser_that_is_none_is_another_one(before):
    changed = ChangedOptimizer(
        before,
        {"dense": {"_target_": "torch.optim.Adam", "lr": 0.1}, "sparse": {}, "schedule": None},
    )
    assert changed.changed == {"dense": ["_target_", "lr"], "sparse": [], "schedule": []}
