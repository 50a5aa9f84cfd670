"""The optimisers of HugeCTR's tables as recapp's row rules."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recapp.compat.hugectr_arguments import NamedEnum, member, number
from recapp.errors import ConfigError
from recapp.optim.named_rules import make_rule
from recapp.optim.rules import RowRule


class Optimizer_t(NamedEnum):
    """HugeCTR's optimisers that recapp has as row rules."""

    SGD = "sgd"
    MomentumSGD = "momentum_sgd"
    AdaGrad = "adagrad"
    Adam = "adam"
    Ftrl = "ftrl"


class Update_t(NamedEnum):
    """The rows that HugeCTR updates; recapp always updates those that a batch touches, `Local`."""

    Local = "local"
    Global = "global"
    LazyGlobal = "lazy_global"


NUMBERS: Mapping[str, float] = {
    "beta1": 1.0,
    "beta2": 1.0,
    "epsilon": math.inf,
    "initial_accu_value": math.inf,
    "momentum_factor": math.inf,
    "beta": math.inf,
    "lambda1": math.inf,
    "lambda2": math.inf,
}
"""The numeric arguments of an optimiser; each must be smaller than its bound here."""


@dataclass(frozen=True)
class OptParams:
    """An optimiser of a table.

    Args:
        optimizer_type: The optimiser.
        update_type: The rows that the optimiser updates.
        beta1: Adam's decay of the mean of gradients.
        beta2: Adam's decay of the mean of squared gradients.
        epsilon: The number that Adam and AdaGrad add to the square root.
        initial_accu_value: The start value of AdaGrad's sum of squares.
        momentum_factor: MomentumSGD's factor; rows that a batch does not touch keep their momentum.
        atomic_update: Whether HugeCTR adds with atomic operations; recapp ignores it.
        beta: Ftrl's beta.
        lambda1: Ftrl's L1 factor: above 0 it makes some weights exactly 0.
        lambda2: Ftrl's L2 factor.

    Raises:
        ConfigError: A value is out of range, or no row rule has it.
    """

    optimizer_type: Optimizer_t = Optimizer_t.Adam
    update_type: Update_t = Update_t.Local
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-7
    initial_accu_value: float = 0.0
    momentum_factor: float = 0.0
    atomic_update: bool = True
    beta: float = 0.0
    lambda1: float = 0.0
    lambda2: float = 0.0

    def __post_init__(self) -> None:
        member("CreateOptimizer", "optimizer_type", self.optimizer_type, Optimizer_t)
        member("CreateOptimizer", "update_type", self.update_type, Update_t)
        for name, below in NUMBERS.items():
            value = number("CreateOptimizer", name, getattr(self, name), below=below)
            object.__setattr__(self, name, value)
        if self.optimizer_type is Optimizer_t.Adam and self.update_type is Update_t.Global:
            raise ConfigError(
                "CreateOptimizer: update_type=Global moves rows that no batch has touched: set "
                "Update_t.Local or Update_t.LazyGlobal"
            )


CreateOptimizer = OptParams


def row_rule(opt_params: OptParams) -> dict[str, Any]:
    """Return the row rule of an optimiser as plain values: its name and its numbers.

    The result has no learning rate: tables use that of the model, as in HugeCTR.
    """
    betas = {"beta1": opt_params.beta1, "beta2": opt_params.beta2}
    numbers: Mapping[Optimizer_t, dict[str, Any]] = {
        Optimizer_t.SGD: {"rule": "sgd"},
        Optimizer_t.MomentumSGD: {"rule": "momentum_sgd", "momentum": opt_params.momentum_factor},
        Optimizer_t.AdaGrad: {
            "rule": "adagrad",
            "eps": opt_params.epsilon,
            "initial_accumulator": opt_params.initial_accu_value,
        },
        Optimizer_t.Adam: {"rule": "adam", **betas, "eps": opt_params.epsilon},
        Optimizer_t.Ftrl: {
            "rule": "ftrl",
            "beta": opt_params.beta,
            "l1": opt_params.lambda1,
            "l2": opt_params.lambda2,
        },
    }
    return numbers[opt_params.optimizer_type]


def rules_of_opt_params(by_table: Mapping[str, OptParams], lr: float) -> dict[str, RowRule]:
    """Return the row rule of each table.

    Args:
        by_table: The optimiser of each table, by the table's name.
        lr: The learning rate of all tables.
    """
    return {
        name: make_rule(row_rule(said) | {"lr": lr}, f"opt_params of table {name}")
        for name, said in by_table.items()
    }
