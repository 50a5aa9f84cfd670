"""Going on from a checkpoint under another optimiser, rate or schedule than it was saved with: what
the settings say holds.
"""

import pytest
import torch
from tiers import one_of
from trainer.runs import MORE, SCHEDULE, STOP, fit_twice

from recapp.errors import ConfigError
from recapp.run.training import changed_optimizer
from recapp.trainer import restore

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


class Renamed(torch.optim.SGD):
    """An optimiser of a user's own, whose argument has another name than the hyper-parameter."""

    def __init__(self, params, lr=0.1, wd=0.0):
        super().__init__(params, lr, weight_decay=wd)


@pytest.mark.parametrize(
    ("first", "change"),
    [
        (RATES, "+optimizer.dense.weight_decay=0.5"),
        (
            (*RATES, f"optimizer.dense._target_={__name__}.Renamed", "~optimizer.dense.fused"),
            "+optimizer.dense.wd=0.5",
        ),
    ],
)
def test_another_hyper_parameter_is_taken_too(rates, first, change):
    _, optimizer = rates(first, (*first, change))
    assert [group["weight_decay"] for group in optimizer.dense.param_groups] == [0.5]


@pytest.mark.parametrize("before", [None, {}])
def test_an_optimiser_that_is_not_stored_is_another_one(before):
    changed = changed_optimizer(
        before,
        {"dense": {"_target_": "torch.optim.Adam", "lr": 0.1}, "sparse": {}, "schedule": None},
    )
    assert changed.changed == {"dense": ["_target_", "lr"], "sparse": [], "schedule": []}


TORCHS = "torch.optim.lr_scheduler"


@pytest.mark.parametrize(
    ("schedule", "change", "found"),
    one_of(
        4,
        [
            ("CosineAnnealingWarmRestarts, T_0: 50", ("50", "5"), {"T_i": 5, "T_0": 5}),
            (
                "OneCycleLR, max_lr: 0.5, cycle_momentum: false",
                ("0.5", "0.1"),
                {"total_steps": STOP + MORE},
            ),
            (
                "CyclicLR, base_lr: 0.1, max_lr: 0.5, cycle_momentum: false",
                ("0.5", "0.9"),
                {"max_lrs": [0.9] * 2},
            ),
            ("MultiStepLR, milestones: [2, 50]", ("50", "6"), {"milestones": {2: 1, 6: 1}}),
        ],
    ),
)
def test_what_a_schedule_of_torch_keeps_under_another_name_follows_its_settings(
    logs, tmp_path, schedule, change, found
):
    first, then = (
        (*RATES, f"+optimizer.schedule={{_target_: {TORCHS}.{text}}}")
        for text in (schedule, schedule.replace(*change))
    )
    state = fit_twice(logs, tmp_path, first, then)[3].state_dict()
    assert {name: state[name] for name in found} == found and state["last_epoch"] == STOP + MORE


def test_a_setting_that_is_mixed_with_the_training_so_far_is_refused(logs, tmp_path):
    first, then = (
        (*RATES, f"+optimizer.schedule={{_target_: {TORCHS}.{name}, T_0: {n}, T_mult: 2}}")
        for name, n in (("CosineAnnealingWarmRestarts", 3), ("CosineAnnealingWarmRestarts", 9))
    )
    with pytest.raises(ConfigError, match=r"optimizer\.schedule: its state\.T_i=6 follows from a"):
        fit_twice(logs, tmp_path, first, then)


def test_an_optimiser_that_lacks_state_for_a_changed_setting_is_refused(logs, tmp_path):
    with pytest.raises(ConfigError, match=r"optimizer\.dense\.amsgrad: the state of the checkp"):
        fit_twice(logs, tmp_path, RATES, (*RATES, "+optimizer.dense.amsgrad=true"))


class Counting(torch.optim.SGD):
    """An optimiser that counts its steps in its param groups, as schedule-free ones do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_what_an_optimiser_writes_into_its_groups_is_no_changed_setting(monkeypatch):
    monkeypatch.setattr(restore, "find_constructor", lambda *_: Counting)
    before, now = ({"_target_": "Counting", "lr": lr} for lr in (0.1, 0.2))
    assert restore._changed_in_groups(before, now) == ["lr"]
