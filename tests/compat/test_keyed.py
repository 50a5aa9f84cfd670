"""Optimisers keyed by parameter names: state dicts with names, several optimisers as one."""

import io

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from recapp.compat.torchrec.keyed import KeyedOptimizer
from recapp.compat.torchrec.optimizers import (
    CombinedOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
    in_backward_optimizer_filter,
)
from recapp.errors import ConfigError


def parameters(*names):
    return {name: nn.Parameter(torch.full((2,), float(n + 1))) for n, name in enumerate(names)}


def wrapped(params, kind=torch.optim.Adagrad, **settings):
    return KeyedOptimizerWrapper(params, lambda given: kind(given, **{"lr": 0.5} | settings))


def saving(params):
    optimizer = wrapped(params)
    optimizer.save_param_groups(True)
    return optimizer


STATE = {"step": torch.tensor(1.0), "sum": torch.ones(2)}


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
    optimizer.save_param_groups(True)
    step(optimizer, params)
    stored = optimizer.state_dict()
    assert stored["param_groups"][0]["params"] == ["a", "b"]
    assert torch.equal(stored["state"]["b"]["sum"], torch.full((2,), 16.0))
    turned = dict(reversed(parameters("a", "b").items()))
    other = wrapped(turned, lr=0.1)
    other.save_param_groups(True)
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
    combined.save_param_groups(True)
    everything = {**tables, "dense.w": dense["w"], "dense.t": dense["t"]}
    step(combined, everything)
    stored = combined.state_dict()
    assert sorted(stored["state"]) == ["dense.t", "dense.w", "t"]
    assert [group["params"] for group in stored["param_groups"]] == [["t"], ["dense.t", "dense.w"]]
    fresh_tables = parameters("t")
    fresh = parameters("w", "t")
    other = CombinedOptimizer([wrapped(fresh_tables), ("dense", wrapped(fresh))])
    other.save_param_groups(True)
    other.load_state_dict(stored)
    assert [group["lr"] for group in other.param_groups] == [0.5, 0.25]
    assert torch.equal(other.state_dict()["state"]["dense.w"]["sum"], torch.full((2,), 4.0))
    assert combined.step(lambda: 3.0) == 3.0
    assert repr(combined) == (
        "CombinedOptimizer(KeyedOptimizerWrapper(1 parameters), "
        "dense: KeyedOptimizerWrapper(2 parameters))"
    )


def test_rates_are_in_a_state_dict_only_where_they_are_wanted():
    params = parameters("a")
    optimizer = wrapped(params)
    assert set(optimizer.state_dict()) == {"state"}
    optimizer.save_param_groups(True)
    stored = optimizer.state_dict()
    other = wrapped(parameters("a"), lr=0.1)
    other.load_state_dict(stored)
    assert other.param_groups[0]["lr"] == 0.1


def test_a_first_step_of_zeros_makes_state_into_which_values_are_copied():
    params = parameters("a", "b")
    optimizer = wrapped(params, torch.optim.SGD, momentum=0.5)
    before = {name: p.detach().clone() for name, p in params.items()}
    optimizer.init_state({"b"})
    assert all(torch.equal(params[name], before[name]) for name in params)
    assert params["b"].grad.is_sparse and not params["a"].grad.is_sparse
    held = optimizer.state[params["a"]]["momentum_buffer"]
    stored = optimizer.state_dict()["state"] | {"a": {"momentum_buffer": torch.full((2,), 3.0)}}
    optimizer.load_state_dict({"state": stored})
    assert optimizer.state[params["a"]]["momentum_buffer"] is held
    assert torch.equal(held, torch.full((2,), 3.0))


class Counter:
    """State that has a state dict of its own."""

    def __init__(self, count):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, stored):
        self.count = stored["count"]


def test_state_may_be_nested_and_may_have_state_of_its_own():
    (name, p), *_ = parameters("a").items()
    counter = Counter(1)
    inner = torch.ones(2)
    optimizer = KeyedOptimizer(
        {name: p}, {p: {"one": 1.0, "in": {"t": inner}, "counter": counter}}, [{"params": [p]}]
    )
    stored = optimizer.state_dict()["state"]["a"]
    assert stored["counter"] == {"count": 1}
    new = {"one": 5.0, "in": {"t": torch.zeros(2)}, "counter": {"count": 7}}
    optimizer.load_state_dict({"state": {"a": new}})
    assert optimizer.state[p]["one"] == 5.0
    assert counter.count == 7
    assert torch.equal(inner, torch.zeros(2))


def test_a_wrapper_is_the_optimiser_inside_and_both_can_be_pickled():
    params = parameters("a")
    inner = wrapped(params)
    outer = OptimizerWrapper(inner)
    step(outer, params)
    assert outer.param_groups[0] is inner.param_groups[0]
    for optimizer in (outer, CombinedOptimizer([("x", inner)])):
        held = io.BytesIO()
        torch.save(optimizer, held)
        held.seek(0)
        again = torch.load(held, weights_only=False)
        assert str(again.state_dict()) == str(optimizer.state_dict())
    values = {"step": torch.tensor(4.0), "sum": torch.zeros(2)}
    outer.load_state_dict({"state": {"a": values}})
    assert torch.equal(inner.state[params["a"]]["sum"], torch.zeros(2))
    assert repr(outer) == "OptimizerWrapper(KeyedOptimizerWrapper(1 parameters))"


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: wrapped({}), "got no parameters"),
        (
            lambda: CombinedOptimizer([wrapped(parameters("a")), wrapped(parameters("a"))]),
            "two optimisers have a parameter a",
        ),
        (
            lambda: wrapped(parameters("a")).load_state_dict({"state": {"z": {}}}),
            "the state has the parameter z, which is not optimised",
        ),
        (
            lambda: CombinedOptimizer([saving(parameters("a"))]).load_state_dict(
                {"state": {"a": STATE}, "param_groups": []}
            ),
            "the state has 0 param groups, this optimiser 1",
        ),
        (
            lambda: saving(parameters("a")).load_state_dict({"state": {"a": STATE}}),
            r"the state has no param_groups: call save_param_groups\(True\)",
        ),
        (
            lambda: saving(parameters("a")).load_state_dict(
                {"state": {"a": STATE}, "param_groups": [{"params": ["b"]}]}
            ),
            "the state has no param group of a",
        ),
        (
            lambda: saving(parameters("a")).load_state_dict(
                {"state": {"a": STATE}, "param_groups": [{"params": ["a"]}]}
            ),
            "the state's param group of a has no lr",
        ),
        (
            lambda: wrapped(parameters("a")).load_state_dict({"state": {}}),
            "the state has nothing of parameter a, which has state here",
        ),
        (
            lambda: wrapped(parameters("a")).load_state_dict({"state": {"a": {"sum": 1}}}),
            "state of a has sum, this optimiser step, sum: the two optimisers differ",
        ),
        (
            lambda: wrapped(parameters("a")).load_state_dict(
                {"state": {"a": STATE | {"sum": torch.zeros(3)}}}
            ),
            r"state of a, sum has shape \(3,\), this optimiser \(2,\)",
        ),
        (
            lambda: wrapped(parameters("a")).load_state_dict({"state": {"a": STATE | {"sum": 2}}}),
            "state of a, sum is a int: give a tensor",
        ),
        (
            lambda: wrapped(parameters("a")).load_state_dict(
                {"state": {"a": STATE | {"sum": torch.zeros(2).to_sparse()}}}
            ),
            "state of a, sum is torch.sparse_coo, this optimiser's torch.strided",
        ),
        (
            lambda: wrapped(parameters("a")).load_state_dict({"state": {"a": 3}}),
            "state of a is a int: give a dict",
        ),
        (
            lambda: KeyedOptimizer({}, {"other": 1}, []),
            "All state keys must be params, which 'other' is not",
        ),
        (
            lambda: KeyedOptimizer(parameters("a"), {}, []).step(),
            "KeyedOptimizer has no step of its own: use KeyedOptimizerWrapper",
        ),
        (
            lambda: wrapped(parameters("a")).add_param_group({"params": []}),
            "add_param_group: a KeyedOptimizerWrapper has the parameters that it was made with",
        ),
        (
            lambda: wrapped(parameters("a")).init_state({"b"}),
            "sparse_grad_parameter_names has b, which is not optimised",
        ),
        (
            lambda: CombinedOptimizer([wrapped(parameters("a")), saving(parameters("b"))]),
            "some optimisers save param groups and some do not",
        ),
        (
            lambda: OptimizerWrapper(torch.optim.SGD([nn.Parameter(torch.zeros(1))])),
            "OptimizerWrapper got a SGD: wrap it first",
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
