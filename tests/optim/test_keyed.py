"""Optimisers keyed by parameter names: state dicts with names, several optimisers as one."""

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from recapp.errors import ConfigError
from recapp.optim.keyed import (
    CombinedOptimizer,
    KeyedOptimizerWrapper,
    in_backward_optimizer_filter,
)


def parameters(*names):
    return {name: nn.Parameter(torch.full((2,), float(n + 1))) for n, name in enumerate(names)}


def wrapped(params, kind=torch.optim.Adagrad, **settings):
    return KeyedOptimizerWrapper(params, lambda given: kind(given, **{"lr": 0.5} | settings))


def step(optimizer, params):
    optimizer.zero_grad()
    sum((p**2).sum() for p in params.values()).backward()
    optimizer.step()


def test_a_step_is_the_wrapped_optimisers_and_schedules_reach_it():
    params = parameters("a", "b")
    twins = parameters("a", "b")
    optimizer = wrapped(params, torch.optim.SGD)
    plain = torch.optim.SGD(twins.values(), 0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for rate in (0.5, 0.25):
        plain.param_groups[0]["lr"] = rate
        step(optimizer, params)
        step(plain, twins)
        schedule.step()
    assert all(torch.equal(params[name], twins[name]) for name in params)


def test_state_is_loaded_by_name_whatever_the_order():
    params = parameters("a", "b")
    optimizer = wrapped(params)
    step(optimizer, params)
    stored = optimizer.state_dict()
    assert stored["param_groups"][0]["params"] == ["a", "b"]
    assert torch.equal(stored["state"]["b"]["sum"], torch.full((2,), 16.0))
    turned = dict(reversed(parameters("a", "b").items()))
    other = wrapped(turned, lr=0.1)
    other.load_state_dict(stored)
    assert other.param_groups[0]["lr"] == 0.5
    for name, p in params.items():
        turned[name].data.copy_(p.data)
    step(optimizer, params)
    step(other, turned)
    assert all(torch.equal(params[name], turned[name]) for name in params)


def test_loaded_state_is_a_copy():
    params = parameters("a")
    optimizer = wrapped(params)
    step(optimizer, params)
    stored = optimizer.state_dict()
    before = stored["state"]["a"]["sum"].clone()
    other_params = parameters("a")
    other = wrapped(other_params)
    other.load_state_dict(stored)
    step(other, other_params)
    assert torch.equal(stored["state"]["a"]["sum"], before)


def test_several_are_one_with_names_in_front():
    tables = parameters("t")
    dense = parameters("w", "t")
    combined = CombinedOptimizer([wrapped(tables), ("dense", wrapped(dense, lr=0.25))])
    assert sorted(combined.params) == ["dense.t", "dense.w", "t"]
    assert [group["lr"] for group in combined.param_groups] == [0.5, 0.25]
    everything = {**tables, "dense.w": dense["w"], "dense.t": dense["t"]}
    step(combined, everything)
    stored = combined.state_dict()
    assert sorted(stored["state"]) == ["dense.t", "dense.w", "t"]
    assert [group["params"] for group in stored["param_groups"]] == [["t"], ["dense.t", "dense.w"]]
    fresh_tables = parameters("t")
    fresh = parameters("w", "t")
    other = CombinedOptimizer([wrapped(fresh_tables), ("dense", wrapped(fresh))])
    other.load_state_dict(stored)
    assert [group["lr"] for group in other.param_groups] == [0.5, 0.25]
    assert torch.equal(other.state_dict()["state"]["dense.w"]["sum"], torch.full((2,), 4.0))
    assert combined.step(lambda: 3.0) == 3.0
    assert repr(combined) == (
        "CombinedOptimizer(KeyedOptimizerWrapper(1 parameters), "
        "dense: KeyedOptimizerWrapper(2 parameters))"
    )


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: wrapped({}), "got no parameters"),
        (
            lambda: CombinedOptimizer([wrapped(parameters("a")), wrapped(parameters("a"))]),
            "two optimisers have a parameter a",
        ),
        (
            lambda: wrapped(parameters("a")).load_state_dict(
                {"state": {"z": {}}, "param_groups": [{}]}
            ),
            "the state has the parameter z, which is not optimised",
        ),
        (
            lambda: CombinedOptimizer([wrapped(parameters("a"))]).load_state_dict(
                {"state": {}, "param_groups": []}
            ),
            "the state has 0 param groups, this optimiser 1",
        ),
    ],
)
def test_what_does_not_fit_is_refused(act, message):
    with pytest.raises(ConfigError, match=message):
        act()


def test_parameters_with_an_optimiser_in_backward_are_filtered():
    params = parameters("a", "b")
    _apply_optimizer_in_backward(torch.optim.SGD, [params["a"]], {"lr": 0.1})
    assert [name for name, _ in in_backward_optimizer_filter(params.items())] == ["b"]
    assert [name for name, _ in in_backward_optimizer_filter(params.items(), include=True)] == ["a"]
