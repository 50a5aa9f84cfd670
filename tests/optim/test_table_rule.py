"""Optimisers that run in torch's backward become the row rule that computes the same, or are
refused.
"""

import pytest
import torch
from torch.distributed.optim import _apply_optimizer_in_backward

from recapp.errors import ConfigError
from recapp.optim.rules import adagrad, adam, rowwise_adagrad, sgd
from recapp.optim.table_rule import rule_in_backward, table_rule
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import EmbeddingBagConfig


class RowWiseAdagrad(torch.optim.Optimizer):
    """An optimiser with the arguments and the name of TorchRec's, which is not installed here."""

    def __init__(
        self,
        params,
        lr=1e-2,
        lr_decay=0.0,
        weight_decay=0.0,
        initial_accumulator_value=0.0,
        eps=1e-10,
        *,
        maximize=False,
    ):
        given = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "eps": eps,
            "maximize": maximize,
        }
        super().__init__(params, given | {"initial_accumulator_value": initial_accumulator_value})


OF_TORCHREC = type(
    "RowWiseAdagrad", (RowWiseAdagrad,), {"__module__": "torchrec.optim.rowwise_adagrad"}
)


def collection():
    names = ("users", "items")
    tables = [
        EmbeddingBagConfig(name=n, num_embeddings=5, embedding_dim=4, feature_names=[n])
        for n in names
    ]
    return EmbeddingBagCollection(tables, device=torch.device("meta"))


def applied(kind, **arguments):
    found = collection()
    _apply_optimizer_in_backward(kind, found.parameters(), arguments)
    return found


@pytest.mark.parametrize(
    ("kind", "arguments", "rule"),
    [
        (torch.optim.SGD, {"lr": 0.3}, sgd(0.3)),
        (
            torch.optim.SGD,
            {"lr": torch.tensor(0.25), "momentum": 0, "weight_decay": 0, "foreach": False},
            sgd(0.25),
        ),
        (torch.optim.Adagrad, {}, adagrad(0.01, 1e-10)),
        (torch.optim.Adagrad, {"lr": 0.3, "eps": 1e-6}, adagrad(0.3, 1e-6)),
        (
            torch.optim.SparseAdam,
            {"lr": 0.3, "betas": (0.8, 0.95), "eps": 1e-6},
            adam(0.3, 0.8, 0.95, 1e-6),
        ),
        (OF_TORCHREC, {"lr": 0.3}, rowwise_adagrad(0.3, 1e-10)),
    ],
)
def test_an_optimiser_applied_in_backward_is_the_row_rule_that_computes_the_same(
    kind, arguments, rule
):
    assert (
        rule_in_backward(applied(kind, **arguments))
        == rule
        == table_rule(applied(kind, **arguments))
    )


def test_nothing_is_said_where_nothing_was_applied():
    assert table_rule(collection()) is None


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (torch.optim.SGD, {"lr": 0.3, "momentum": 0.9}, "table users has SGD with momentum=0.9 by"),
        (
            torch.optim.SGD,
            {"lr": 0.3, "weight_decay": 0.01},
            "table users has SGD with weight_decay=0.01 by",
        ),
        (
            torch.optim.SGD,
            {"lr": 0.3, "maximize": True},
            "table users has SGD with maximize=True by",
        ),
        (torch.optim.Adagrad, {"lr_decay": 0.1}, "table users has Adagrad with lr_decay=0.1 by"),
        (
            torch.optim.Adagrad,
            {"initial_accumulator_value": 0.1},
            "Adagrad with initial_accumulator_value=0.1 by",
        ),
        (
            torch.optim.SparseAdam,
            {"maximize": True},
            "table users has SparseAdam with maximize=True by",
        ),
        (OF_TORCHREC, {"weight_decay": 0.1}, "RowWiseAdagrad with weight_decay=0.1 by"),
        (
            torch.optim.Adam,
            {},
            "table users has Adam by apply_optimizer_in_backward, which is no row rule: use "
            "SGD(lr), Adagrad",
        ),
        (torch.optim.AdamW, {}, "table users has AdamW by"),
        (RowWiseAdagrad, {}, "table users has RowWiseAdagrad by"),
    ],
)
def test_what_no_row_rule_computes_is_refused_in_one_line(kind, arguments, message):
    with pytest.raises(ConfigError) as refused:
        rule_in_backward(applied(kind, **arguments))
    (line,) = str(refused.value).splitlines()
    assert message in line and "SparseAdam(lr, betas, eps)" in line


def test_every_argument_of_these_optimisers_is_read_or_known_to_do_nothing():
    """With the defaults nothing is refused; an argument added later is refused once it is set."""
    for kind in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam, OF_TORCHREC):
        assert rule_in_backward(applied(kind)) is not None


def test_each_table_follows_a_rule_of_its_own_or_all_follow_one():
    found = collection()
    _apply_optimizer_in_backward(torch.optim.SGD, [found.weight("users")], {"lr": 0.1})
    with pytest.raises(
        ConfigError, match=r"table users has sgd\(0.1\) by .* and table items no rule: all tables"
    ):
        rule_in_backward(found)
    _apply_optimizer_in_backward(torch.optim.SGD, [found.weight("items")], {"lr": 0.2})
    assert rule_in_backward(found) == {"users": sgd(0.1), "items": sgd(0.2)}
    _apply_optimizer_in_backward(torch.optim.Adagrad, [found.weight("items")], {"lr": 0.2})
    with pytest.raises(
        ConfigError,
        match="table items has SGD and Adagrad by apply_optimizer_in_backward: apply one",
    ):
        rule_in_backward(found)


def test_rules_with_equal_numbers_are_equal():
    assert (
        adam(0.1) == adam(0.1) != adam(0.1, eps=1e-6)
        and sgd(0.1) != sgd(0.2)
        and rowwise_adagrad() != adagrad(0.05, 1e-8)
    )
