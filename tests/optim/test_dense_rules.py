"""Rules that torch has no optimiser for equal their definition on touched rows of a dense table."""

from dataclasses import replace

import pytest
import torch
from optim.dense_rules import CASES, DENSE, DenseRule, rule_of_case

from recapp.errors import ConfigError
from recapp.kernels.links import Links
from recapp.kernels.reference import TorchBackend
from recapp.optim.named_rules import RULES, make_rule
from recapp.optim.rules import (
    adagrad,
    adam,
    ftrl,
    lamb,
    lars_sgd,
    momentum_sgd,
    rowwise_adagrad,
)

R = 9
D = 4
F64 = torch.float64


def weights():
    return torch.randn(R, D, generator=torch.Generator().manual_seed(5), dtype=F64)


def gradients(steps=6):
    generator = torch.Generator().manual_seed(4)
    for _ in range(steps):
        row_U = torch.randperm(R, generator=generator)[:4].sort().values
        yield row_U, torch.randn(4, D, generator=generator, dtype=F64)


def state_of(rule, dtype=F64):
    return [
        torch.full((R, D if kind == "element" else 1), start, dtype=dtype)
        for _, kind, start in rule.starts()
    ]


def update(rule, held, state, row_U, grad_UD, lr, t):
    n = len(row_U)
    links = Links(D * torch.arange(n), torch.arange(n + 1), None, None, n)
    rate = rule.rate_of(lr, t)
    TorchBackend().update(grad_UD.reshape(-1), links, row_U, None, held, state, F64, rate, rule)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rule_equals_its_definition_on_a_dense_table(case):
    rule = rule_of_case(case)
    held = weights()
    state = state_of(rule)
    expected = weights().requires_grad_()
    optimizer = DenseRule([expected], rule)
    for t, (row_U, grad_UD) in enumerate(gradients(), 1):
        update(rule, held, state, row_U, grad_UD, rule.lr, t)
        expected.grad = torch.sparse_coo_tensor(row_U[None], grad_UD, (R, D), check_invariants=True)
        optimizer.step()
    torch.testing.assert_close(held, expected.detach(), rtol=1e-11, atol=1e-11)
    for (name, _), found in zip(rule.state, state, strict=True):
        torch.testing.assert_close(found, optimizer.state[expected][name], rtol=1e-11, atol=1e-11)


def test_every_rule_has_a_definition_and_a_name():
    assert DENSE.keys() == RULES.keys()
    assert {name for name, _ in CASES} == DENSE.keys()
    assert all(RULES[name]().name == name for name in RULES)


@pytest.mark.parametrize(
    ("rule", "reference"),
    [
        (momentum_sgd(0.3, 0.8), lambda p: torch.optim.SGD(p, 0.3, 0.8)),
        (
            adagrad(0.3, initial_accumulator=0.1),
            lambda p: torch.optim.Adagrad(p, 0.3, initial_accumulator_value=0.1),
        ),
    ],
    ids=["momentum_sgd", "adagrad"],
)
def test_where_every_row_is_touched_a_rule_equals_torchs_own(rule, reference):
    held = weights()
    state = state_of(rule)
    expected = weights().requires_grad_()
    optimizer = reference([expected])
    for t in range(1, 5):
        gradient = torch.randn(R, D, generator=torch.Generator().manual_seed(t), dtype=F64)
        update(rule, held, state, torch.arange(R), gradient, rule.lr, t)
        expected.grad = gradient
        optimizer.step()
    torch.testing.assert_close(held, expected.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", [lamb(0.1), lars_sgd(0.1)], ids=lambda r: r.name)
def test_norms_of_zero_leave_numbers(rule):
    held = weights()
    held[0] = 0
    state = state_of(rule)
    gradient = torch.ones(2, D, dtype=F64)
    gradient[1] = 0
    before = held.clone()
    update(rule, held, state, torch.tensor([0, 3]), gradient, 0.1, 1)
    assert torch.isfinite(held).all()
    assert (held[0] < 0).all() and torch.equal(held[1:], before[1:])


def test_ftrl_makes_exact_zeros_and_survives_a_rate_of_zero():
    rule = ftrl(0.3, l1=1000.0)
    held = weights()
    state = state_of(rule)
    for t, (row_U, grad_UD) in enumerate(gradients(), 1):
        update(rule, held, state, row_U, grad_UD, 0.3, t)
        assert torch.equal(held[row_U], torch.zeros(4, D, dtype=F64))
    rule = ftrl(0.3)
    held = weights()
    state = state_of(rule)
    rows = torch.arange(R)
    gradient = torch.ones(R, D, dtype=F64)
    update(rule, held, state, rows, gradient, 0.3, 1)
    before = held.clone()
    update(rule, held, state, rows, gradient, 0.0, 2)
    torch.testing.assert_close(held, before, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("momentum_sgd", {"momentum": 1.0}, "sparse.momentum=1.0: must be from 0 to less than 1"),
        ("sgd", {"weight_decay": -0.1}, "sparse.weight_decay=-0.1: must be a number of at least 0"),
        ("adagrad", {"initial_accumulator": -1}, "sparse.initial_accumulator=-1: must be a number"),
        ("ftrl", {"l1": -0.1}, "sparse.l1=-0.1: must be a number of at least 0"),
        ("adam", {"l2_all_rows": -1.0}, "sparse.l2_all_rows=-1.0: must be a number of at least 0"),
        (
            "sgd",
            {"l2_all_rows": 0.1, "weight_decay": 0.2},
            "sparse.weight_decay=0.2: shrinks touched rows, and l2_all_rows=0.1 shrinks all rows",
        ),
        ("lamb", {"beta1": 1.0}, "sparse.beta1=1.0: must be from 0 to less than 1"),
    ],
)
def test_numbers_that_no_update_can_have_are_refused(name, fields, message):
    with pytest.raises(ConfigError, match=message):
        RULES[name](**fields)


@pytest.mark.parametrize("rule", [rowwise_adagrad(), lamb(), adam(weight_decay=0.1)])
def test_only_rules_of_single_weights_take_the_steps_of_all_rows(rule):
    with pytest.raises(ConfigError, match=f"the rule {rule.name} takes the steps of all rows, and"):
        replace(rule, all_rows=True)


def test_a_table_may_take_l2_of_all_rows_back():
    settings = {"rule": "adam", "lr": 0.1, "l2_all_rows": None}
    assert make_rule(settings, "optimizer.sparse.tables.C1") == adam(0.1)
