"""The rate of every step, written out by hand."""

import pytest
import torch

from recapp.errors import ConfigError
from recapp.optim.optimizer import HybridOptimizer
from recapp.optim.schedule import Plateau, warmup_cosine, warmup_poly


def optimizer_of(*rates):
    return torch.optim.SGD(
        [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in rates], lr=1.0
    )


def rates_of(optimizer, scheduler, steps):
    """Return the rates used in steps 1, 2, ..., one list per param group."""
    used = []
    for _ in range(steps):
        used.append(list(scheduler.get_last_lr()))
        optimizer.step()
        scheduler.step()
    return [list(group) for group in zip(*used, strict=True)]


def test_warm_up_then_constant_then_squared_decay_to_zero():
    optimizer = optimizer_of(1.0)
    scheduler = warmup_poly(optimizer, warmup_steps=4, decay_start=6, decay_steps=4, decay_power=2)
    expected = [1 / 4, 2 / 4, 3 / 4, 1, 1, 1, (3 / 4) ** 2, (2 / 4) ** 2, (1 / 4) ** 2, 0, 0, 0]
    assert rates_of(optimizer, scheduler, 12) == [expected]


def test_the_decay_ends_at_the_rate_that_is_left_for_every_group():
    optimizer = optimizer_of(1.0, 0.5)
    scheduler = warmup_poly(optimizer, decay_start=1, decay_steps=4, decay_power=1, end_lr=0.2)
    assert rates_of(optimizer, scheduler, 7) == [
        pytest.approx([1, 0.75, 0.5, 0.25, 0.2, 0.2, 0.2]),
        pytest.approx([0.5, 0.375, 0.25, 0.2, 0.2, 0.2, 0.2]),
    ]


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_the_default_and_no_warm_up_are_a_constant_rate(warmup_steps):
    optimizer = optimizer_of(0.3)
    assert rates_of(optimizer, warmup_poly(optimizer, warmup_steps), 50) == [[0.3] * 50]


def test_a_power_of_zero_holds_the_rate_until_the_decay_is_over():
    optimizer = optimizer_of(1.0)
    assert rates_of(
        optimizer, warmup_poly(optimizer, decay_start=1, decay_steps=2, decay_power=0), 4
    ) == [[1, 1, 0, 0]]


def test_the_shown_rate_is_the_one_the_next_step_uses():
    optimizer = optimizer_of(1.0)
    scheduler = warmup_poly(optimizer, warmup_steps=2)
    weight = optimizer.param_groups[0]["params"][0]
    for shown in (0.5, 1.0, 1.0):
        assert scheduler.get_last_lr() == [shown]
        before = weight.item()
        weight.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
        assert before - weight.item() == shown


def test_tables_follow_the_schedule_of_the_dense_part():
    tables = {"params": [], "lr": 0.05, "name": "sparse/sgd"}
    hybrid = HybridOptimizer(optimizer_of(1.0), [tables])
    scheduler = warmup_poly(hybrid, warmup_steps=2)
    assert tables["lr"] == 0.025
    hybrid.step()
    scheduler.step()
    assert tables["lr"] == 0.05


def test_a_schedule_goes_on_where_its_state_was_taken():
    def schedule(optimizer):
        return warmup_poly(optimizer, warmup_steps=3, decay_start=4, decay_steps=6)

    whole = optimizer_of(1.0)
    first = optimizer_of(1.0)
    second = optimizer_of(1.0)
    expected = rates_of(whole, schedule(whole), 10)[0]
    begun = schedule(first)
    assert rates_of(first, begun, 5)[0] == expected[:5]
    resumed = schedule(second)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(begun.state_dict())
    assert rates_of(second, resumed, 5)[0] == expected[5:]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"warmup_steps": -1}, "optimizer.schedule.warmup_steps=-1: must be at least 0"),
        ({"decay_steps": 0}, "optimizer.schedule.decay_steps=0: must be at least 1"),
        ({"decay_power": float("nan")}, "optimizer.schedule.decay_power=nan: must be at least 0"),
        ({"end_lr": -0.1}, "optimizer.schedule.end_lr=-0.1: must be at least 0"),
        (
            {"warmup_steps": 10, "decay_start": 5},
            "optimizer.schedule.decay_start=5: may not lie before the end of warm-up",
        ),
        ({"decay_start": 5, "end_lr": 2.0}, "optimizer.schedule.end_lr=2.0: above the rate 1.0"),
        ({"decay_start": None, "decay_steps": None}, "decay_steps=null: decays until the run ends"),
    ],
)
def test_a_setting_that_cannot_be_is_named(setting, message):
    with pytest.raises(ConfigError) as error:
        warmup_poly(optimizer_of(1.0), **setting)
    assert message in str(error.value)


def test_a_length_of_none_reaches_to_the_end_of_the_run():
    optimizer = optimizer_of(1.0)
    open_ends = {"decay_start": None, "decay_steps": None, "total_steps": 6}
    scheduler = warmup_poly(optimizer, warmup_steps=2, decay_power=1, **open_ends)
    assert rates_of(optimizer, scheduler, 7) == [[1 / 2, 1, 3 / 4, 2 / 4, 1 / 4, 0, 0]]


def test_a_cosine_falls_from_the_end_of_warm_up():
    optimizer = optimizer_of(2.0)
    scheduler = warmup_cosine(optimizer, warmup_steps=2, end_lr=0.1, total_steps=6)
    root = 2**-0.5
    expected = [1, 2, 1 + root, 1, 1 - root, 0.1, 0.1]
    assert rates_of(optimizer, scheduler, 7) == [pytest.approx(expected)]
    with pytest.raises(ConfigError, match=r"decay_steps=null: decays until the run ends, and"):
        warmup_cosine(optimizer_of(1.0))
    with pytest.raises(ConfigError, match=r"decay_start=1: may not lie before the end of warm-up"):
        warmup_cosine(optimizer_of(1.0), warmup_steps=2, decay_start=1, total_steps=9)


def judged(schedule, metrics):
    """The rate and whether the run ends after each validation."""
    found = []
    for metric in metrics:
        schedule.step(metric)
        found.append((schedule.optimizer.param_groups[0]["lr"], bool(schedule.ends)))
    return found


def test_a_run_ends_after_two_cuts_without_a_gain_between_them():
    schedule = Plateau(optimizer_of(1.0), "max", 0.5, stop_after=2)
    found = judged(schedule, [0.5, 0.6, 0.6, 0.7, 0.7, 0.69])
    assert found == [(1, False)] * 2 + [(0.5, False)] * 2 + [(0.25, False), (0.125, True)]
    assert "2 cuts of the learning rates without gain" in schedule.ends
    assert "Best score: 0.700" in schedule.ends


def test_the_count_of_cuts_goes_on_where_its_state_was_taken():
    first = Plateau(optimizer_of(1.0), "max", stop_after=2)
    judged(first, [0.5, 0.5])
    second = Plateau(optimizer_of(1.0), "max", stop_after=2)
    second.load_state_dict(first.state_dict())
    assert judged(second, [0.5])[0][1]


def test_cuts_wait_for_patience_and_cooldown_and_may_never_end_a_run():
    metrics = [1.0] * 9
    patient = judged(Plateau(optimizer_of(1.0), patience=1, cooldown=1, stop_after=2), metrics)
    assert [ends for _, ends in patient].index(True) == 5  # cuts after validations 3 and 6
    assert not judged(Plateau(optimizer_of(1.0), stop_after=None), metrics)[-1][1]
    with pytest.raises(ConfigError, match=r"optimizer.schedule.stop_after=0: must be at least 1"):
        Plateau(optimizer_of(1.0), stop_after=0)
