"""A rule is one expression: on rows of a block it equals its reference in torch, and on plain
numbers it equals itself on a block.
"""

import math

import pytest
import torch

from recapp.errors import ConfigError
from recapp.kernels.links import Links
from recapp.kernels.reference import TorchBackend
from recapp.optim.named_rules import rules_of
from recapp.optim.rules import adagrad, adam, rowwise_adagrad, sgd

RULES = [sgd(0.3), adagrad(0.3), rowwise_adagrad(0.3), adam(0.1, 0.8, 0.95)]
REFERENCES = {
    "sgd": lambda p: torch.optim.SGD(p, 0.3),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.3, eps=1e-10),
    "adam": lambda p: torch.optim.SparseAdam(p, 0.1, (0.8, 0.95)),
}
R = 9
D = 4


def gradients():
    generator = torch.Generator().manual_seed(4)
    for _ in range(5):
        row_U = torch.randperm(R, generator=generator)[:3].sort().values
        yield row_U, torch.randn(3, D, generator=generator, dtype=torch.float64)


def fresh(rule):
    weights = torch.randn(R, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return weights, [
        torch.zeros(R, D if kind == "element" else 1, dtype=torch.float64) for _, kind in rule.state
    ]


def rate(rule, t):
    return rule.rate(rule.lr, t) if rule.rate else rule.lr


def trained(rule):
    weights, state = fresh(rule)
    for t, (row_U, grad_UD) in enumerate(gradients(), 1):
        learn = Links(
            D * torch.arange(len(row_U)), torch.arange(len(row_U) + 1), None, None, len(row_U)
        )
        TorchBackend().update(
            grad_UD.view(-1), learn, row_U, None, weights, state, torch.float64, rate(rule, t), rule
        )
    return weights, state


@pytest.mark.parametrize("rule", [r for r in RULES if r.name in REFERENCES], ids=lambda r: r.name)
def test_a_rule_equals_torchs_own_optimiser_on_sparse_gradients(rule):
    reference = fresh(rule)[0].requires_grad_()
    optimizer = REFERENCES[rule.name]([reference])
    for row_U, grad_UD in gradients():
        reference.grad = torch.sparse_coo_tensor(
            row_U[None], grad_UD, (R, D), check_invariants=True
        )
        optimizer.step()
    torch.testing.assert_close(trained(rule)[0], reference.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_the_expression_holds_for_plain_numbers_as_for_blocks(rule):
    """Compiled loops run the expression element by element."""
    weights, state = fresh(rule)
    expected, expected_state = trained(rule)
    for t, (row_U, grad_UD) in enumerate(gradients(), 1):
        for row, grad in zip(row_U.tolist(), grad_UD.tolist(), strict=True):
            mean = sum(g * g for g in grad) / D
            before = [s[row].tolist() for s in state]
            for d in range(D):
                held = [s[d % len(s)] for s in before]
                weights[row, d], *new = rule.step(
                    weights[row, d].item(),
                    grad[d],
                    mean,
                    rate(rule, t),
                    math.sqrt,
                    *rule.constants,
                    *held,
                )
                for s, value in zip(state, new, strict=True):
                    s[row, d % s.shape[1]] = value
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)
    for s, e in zip(state, expected_state, strict=True):
        torch.testing.assert_close(s, e, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lr", [-0.1, math.nan, math.inf, "a"])
@pytest.mark.parametrize("make", [sgd, adagrad, rowwise_adagrad, adam])
def test_a_rate_that_is_no_rate_is_refused(make, lr):
    with pytest.raises(
        ConfigError, match=f"optimizer.sparse.lr={lr}: must be a number of at least 0"
    ):
        make(lr)


@pytest.mark.parametrize("given", [5, {"*": 5}, {3: sgd()}])
def test_what_is_no_rule_is_refused(given):
    with pytest.raises(ConfigError, match="must be a row rule"):
        rules_of(given, ["t"])
