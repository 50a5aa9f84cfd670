"""Learning rates in stages: values by hand, tables and dense part alike, state that goes on."""

import math

import pytest
import torch
from torch import nn

from recapp.compat.torchrec.optimizers import (
    CombinedOptimizer,
    KeyedOptimizerWrapper,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
)
from recapp.errors import ConfigError


def wrapped(name="w", lr=9.0):
    params = {name: nn.Parameter(torch.ones(2))}
    return KeyedOptimizerWrapper(params, lambda given: torch.optim.SGD(given, lr=lr))


def rates(stages, steps, lr=2.0):
    optimizer = WarmupOptimizer(wrapped(), stages, lr=lr)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
    return found


COSINE = WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS
ROOT = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ([], [2.0, 2.0]),
        ([WarmupStage(max_iters=4, value=0.5)], [1.0, 1.25, 1.5, 1.75, 2.0, 2.0, 2.0]),
        ([WarmupStage(WarmupPolicy.CONSTANT, 1, 0.25)], [0.5, 0.5, 2.0]),
        ([WarmupStage(WarmupPolicy.POLY, 2, 2.0)], [2.0, 0.5, 0.0, 2.0]),
        ([WarmupStage(WarmupPolicy.POLY, 2, 1.0, decay_iters=4)], [2.0, 1.5, 1.0, 2.0]),
        ([WarmupStage(WarmupPolicy.STEP, 3, 0.5)], [2.0, 1.0, 0.5, 0.25, 2.0]),
        ([WarmupStage(WarmupPolicy.STEP, 3, 0.5, decay_iters=2)], [2.0, 2.0, 1.0, 1.0, 2.0]),
        ([WarmupStage(COSINE, 5, 0.5, sgdr_period=2)], [2.0, 1.5, 2.0, 1.5, 2.0, 1.5, 2.0]),
        ([WarmupStage(WarmupPolicy.NONE, 1, 7.0, lr_scale=3.0)], [6.0, 6.0, 2.0]),
        (
            [
                WarmupStage(WarmupPolicy.LINEAR, 1, 0.0, lr_scale=0.5),
                WarmupStage(WarmupPolicy.INVSQRT, 4),
            ],
            [0.0, 1.0, 2.0 * ROOT, 2.0 / math.sqrt(3.0), 1.0, 2.0],
        ),
        ([WarmupStage(COSINE, 3, 0.0, sgdr_period=4)], [2.0, 1.0 + ROOT, 1.0, 1.0 - ROOT, 2.0]),
    ],
)
def test_rates_are_those_computed_by_hand(stages, expected):
    assert rates(stages, len(expected)) == pytest.approx(expected, rel=1e-15, abs=1e-15)


def test_all_groups_follow_and_a_state_goes_on():
    stages = [WarmupStage(max_iters=10, value=0.0)]
    parts = [("a", wrapped("w")), ("b", wrapped("w"))]
    optimizer = WarmupOptimizer(CombinedOptimizer(parts), stages, lr=1.0)
    for _ in range(3):
        optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.3]
    stored = optimizer.state_dict()
    assert stored["state"]["__warmup"]["warmup"].tolist() == [3, 0]
    assert sorted(optimizer.params) == ["__warmup", "a.w", "b.w"]
    other = WarmupOptimizer(CombinedOptimizer([("a", wrapped()), ("b", wrapped())]), stages, 1.0)
    other.load_state_dict(stored)
    assert [group["lr"] for group in other.param_groups] == [0.3, 0.3]
    other.step()
    assert other.param_groups[0]["lr"] == 0.4
    assert stored["state"]["__warmup"]["warmup"].tolist() == [3, 0]


def test_a_closure_runs_once_and_another_entry_can_be_set():
    optimizer = WarmupOptimizer(wrapped(), [], lr=0.5, lr_param="momentum", param_name="w2")
    assert optimizer.step(lambda: 4.0) == 4.0
    assert optimizer.param_groups[0]["momentum"] == 0.5
    assert optimizer.param_groups[0]["lr"] == 9.0
    assert "w2" in optimizer.state_dict()["state"]


def stepped():
    optimizer = WarmupOptimizer(wrapped(), [])
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: rates([WarmupStage(max_iters=0)], 1), r"stages\[0\].max_iters=0: must be above 0"),
        (
            lambda: rates([WarmupStage(max_iters=5), WarmupStage(max_iters=5)], 1),
            r"stages\[1\].max_iters=5: must be above 5, the end of the stage before it",
        ),
        (
            lambda: rates([WarmupStage(WarmupPolicy.INVSQRT, 4)], 1),
            r"stages\[0\]: INVSQRT divides by the root of the step's number",
        ),
        (
            lambda: rates([WarmupStage(WarmupPolicy.POLY, 4, decay_iters=3)], 1),
            r"stages\[0\].decay_iters=3: must be at least max_iters=4",
        ),
        (
            lambda: rates([WarmupStage(COSINE, 4, sgdr_period=0)], 1),
            r"stages\[0\].sgdr_period=0: must be at least 1",
        ),
        (lambda: rates(["linear"], 1), r"stages\[0\] is a str: give a WarmupStage"),
        (
            lambda: WarmupOptimizer(wrapped("__warmup"), []),
            "param_name=__warmup: a parameter has this name",
        ),
        (
            lambda: stepped().load_state_dict({"state": {}}),
            "the state has nothing of parameter __warmup, which has state here",
        ),
        (
            lambda: stepped().load_state_dict({"state": {"__warmup": {"warmup": [5, 3]}}}),
            "the state of __warmup is in stage 3, and there are 0 here",
        ),
    ],
)
def test_what_is_wrong_is_said(act, message):
    with pytest.raises(ConfigError, match=message):
        act()
