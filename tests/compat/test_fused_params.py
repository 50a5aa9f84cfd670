"""TorchRec's fused_params and its row-wise Adagrad name the row rules they compute."""

from enum import Enum

import pytest
import torch
from torch.distributed.optim import _apply_optimizer_in_backward

from recapp.compat.torchrec.keyed import (
    EmbOptimType,
    rule_of_fused_params,
    rules_of_fused_params,
)
from recapp.compat.torchrec.optimizers import RowWiseAdagrad
from recapp.errors import ConfigError
from recapp.optim.rules import (
    adagrad,
    adam,
    ftrl,
    lamb,
    lars_sgd,
    partial_row_wise_adam,
    rowwise_adagrad,
    sgd,
)
from recapp.optim.table_rule import table_rule
from recapp.parallel import EmbeddingBagCollectionSharder
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import EmbeddingBagConfig


class Foreign(Enum):
    """As FBGEMM's own enumeration, which is another class."""

    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({}, sgd(0.01)),
        ({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.3}, sgd(0.3)),
        ({"optimizer": EmbOptimType.EXACT_ADAGRAD, "eps": 0.1}, adagrad(0.01, 0.1)),
        (
            {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 1, "eps": 0.002},
            rowwise_adagrad(1.0, 0.002),
        ),
        ({"optimizer": Foreign.EXACT_ROWWISE_ADAGRAD}, rowwise_adagrad(0.01, 1e-8)),
        ({"optimizer": "exact_row_wise_adagrad"}, rowwise_adagrad(0.01, 1e-8)),
        ({"optimizer": "adam", "beta1": 0.5}, adam(0.01, 0.5, 0.999, 1e-8)),
        ({"optimizer": "adam", "l2_all_rows": None}, adam(0.01, eps=1e-8)),
        ({"optimizer": "adam", "l2_all_rows": 0.1}, adam(0.01, eps=1e-8, l2_all_rows=0.1)),
        (
            {"optimizer": EmbOptimType.PARTIAL_ROWWISE_ADAM, "weight_decay": 0.1},
            partial_row_wise_adam(0.01, weight_decay=0.1),
        ),
        (
            {"optimizer": "LAMB", "weight_decay": 0.1, "weight_decay_mode": 2},
            lamb(0.01, weight_decay=0.1),
        ),
        ({"optimizer": "lars_sgd", "eta": 0.1, "momentum": 0.5}, lars_sgd(0.01, 0.5, 0.1)),
        (
            {"optimizer": "exact_adagrad", "initial_accumulator_value": 0.1},
            adagrad(0.01, 1e-8, 0.1),
        ),
        ({"optimizer": "ftrl", "learning_rate": 0.1, "l1": 0.5}, ftrl(0.1, l1=0.5)),
    ],
)
def test_fused_params_are_a_rule(given, rule):
    assert rule_of_fused_params(given) == rule


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": "exact_sdg"}, r"fused_params\['optimizer'\]=exact_sdg: known: ADAM"),
        ({"optimizer": "madgrad"}, r"fused_params\['optimizer'\]=madgrad"),
        (
            {"weight_decay": 0.1, "weight_decay_mode": "L2"},
            r"fused_params\['weight_decay_mode'\]=L2: weight decay is decoupled here",
        ),
        (
            {"eta": 0.1},
            r"fused_params\['eta'\]: EXACT_SGD reads optimizer, learning_rate, weight_d",
        ),
        ({"eps": 1e-3}, "EXACT_SGD reads optimizer, learning_rate, weight_decay, l2_all_rows;"),
        ({"stochastic_rounding": True}, r"fused_params\['stochastic_rounding'\]"),
        ({"learning_rate": True}, r"^fused_params\['learning_rate'\]=True: must be a number"),
        ({"learning_rate": -1}, r"^fused_params\['learning_rate'\]=-1.0: must be a number of at"),
        (
            {"optimizer": "exact_adagrad", "initial_accumulator_value": -1},
            r"^fused_params\['initial_accumulator_value'\]=-1.0: must be a number of at least 0",
        ),
        (
            {"optimizer": "adam", "beta1": 2},
            r"^fused_params\['beta1'\]=2.0: must be from 0 to less than 1",
        ),
    ],
)
def test_what_no_rule_has_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        rule_of_fused_params(given)


def test_fused_params_of_single_tables_count_over_the_others():
    given = {
        "optimizer": "adam",
        "learning_rate": 0.1,
        "tables": {"t0": {"learning_rate": 0.2}, "wide_*": {"optimizer": "ftrl"}},
    }
    assert rules_of_fused_params(given) == {"*": adam(0.1), "t0": adam(0.2), "wide_*": ftrl(0.01)}
    assert EmbeddingBagCollectionSharder(given).rule == rules_of_fused_params(given)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], r"fused_params\['tables'\] is a list: give a dict by table or glob"),
        ({"t0": 0.1}, r"fused_params\['tables'\]\['t0'\]=0.1: give a dict such as"),
        ({"t0": {"eps": 1}}, r"fused_params\['tables'\]\['t0'\]\['eps'\]: EXACT_SGD reads"),
        (
            {"t.0=": {"learning_rate": "a=b"}},
            r"^fused_params\['tables'\]\['t.0='\]\['learning_rate'\]=a=b: must be a number",
        ),
    ],
)
def test_fused_params_of_single_tables_that_make_no_rule_are_refused(tables, message):
    with pytest.raises(ConfigError, match=message):
        rules_of_fused_params({"tables": tables})


def test_rowwise_adagrad_computes_what_torchrecs_does():
    p = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    optimizer = RowWiseAdagrad([p], lr=0.1)
    for k in range(3):
        p.grad = torch.arange(6.0).view(2, 3) * (k + 1) - 2
        optimizer.step()
    expected = [  # printed by TorchRec 1.8
        [0.31040507555007935, 1.047755241394043, 1.7851054668426514],
        [2.835662364959717, 3.7344398498535156, 4.633216857910156],
    ]
    torch.testing.assert_close(p.detach(), torch.tensor(expected))


def test_rowwise_adagrad_takes_sparse_gradients_and_closures_and_skips_what_has_none():
    p = torch.nn.Parameter(torch.ones(3, 2))
    twin = torch.nn.Parameter(torch.ones(3, 2))
    idle = torch.nn.Parameter(torch.ones(1, 2))
    p.grad = torch.tensor([[1.0, 2.0], [0.0, 0.0], [0.5, 0.5]]).to_sparse(1)
    twin.grad = p.grad.to_dense()
    assert RowWiseAdagrad([p, idle], lr=0.1).step(lambda: 2.0) == 2.0
    RowWiseAdagrad([twin], lr=0.1).step()
    assert torch.equal(p, twin) and torch.equal(idle, torch.ones(1, 2))
    with pytest.raises(ConfigError, match="both must be at least 0"):
        RowWiseAdagrad([p], lr=-1)


def test_applied_in_backward_it_names_the_rule_of_the_tables():
    table = EmbeddingBagConfig(name="t", num_embeddings=3, embedding_dim=2, feature_names=["f"])
    collection = EmbeddingBagCollection([table], device="meta")
    _apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.2, "eps": 1e-3})
    assert table_rule(collection) == rowwise_adagrad(0.2, 1e-3)
