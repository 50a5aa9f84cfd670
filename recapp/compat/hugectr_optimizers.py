"""What HugeCTR's tables say of their optimiser, as recapp's row rules."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from recapp.errors import ConfigError


class Optimizer_t(Enum):
    """HugeCTR's optimisers that have a row rule here."""

    SGD = "sgd"
    AdaGrad = "adagrad"
    Adam = "adam"


class Update_t(Enum):
    """Which rows HugeCTR updates; here it is those that a batch has touched, `Local`."""

    Local = "local"
    Global = "global"
    LazyGlobal = "lazy_global"


@dataclass(frozen=True)
class OptParams:
    """An optimiser of a table.

    Args:
        optimizer_type: Which.
        update_type: Which rows it updates.
        beta1: Of Adam.
        beta2: Of Adam.
        epsilon: Of Adam and AdaGrad.
        initial_accu_value: What AdaGrad's sums begin with: 0.
        momentum_factor: 0: a rule with momentum would move rows that nobody touched.
        atomic_update: Whether HugeCTR adds with atomic operations; it decides nothing here.

    Raises:
        ConfigError: A value that no row rule has.
    """

    optimizer_type: Optimizer_t = Optimizer_t.Adam
    update_type: Update_t = Update_t.Local
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-7
    initial_accu_value: float = 0.0
    momentum_factor: float = 0.0
    atomic_update: bool = True

    def __post_init__(self) -> None:
        if self.optimizer_type is Optimizer_t.Adam and self.update_type is Update_t.Global:
            raise ConfigError(
                "CreateOptimizer: update_type=Global moves rows that no batch has touched: set "
                "Update_t.Local or Update_t.LazyGlobal"
            )
        for key in ("initial_accu_value", "momentum_factor"):
            if getattr(self, key):
                raise ConfigError(f"CreateOptimizer: {key}={getattr(self, key)}: must be 0 here")


CreateOptimizer = OptParams


def row_rule(opt_params: OptParams) -> dict[str, Any]:
    """Return the name of the row rule of an optimiser and its numbers, as plain values.

    The learning rate is that of the model, as in HugeCTR, so there is none.
    """
    numbers: Mapping[Optimizer_t, dict[str, float]] = {
        Optimizer_t.SGD: {},
        Optimizer_t.AdaGrad: {"eps": opt_params.epsilon},
        Optimizer_t.Adam: {
            "beta1": opt_params.beta1,
            "beta2": opt_params.beta2,
            "eps": opt_params.epsilon,
        },
    }
    kind = opt_params.optimizer_type
    return {"rule": kind.value, **numbers[kind]}


def same_opt_params(by_table: Mapping[str, OptParams | None]) -> OptParams | None:
    """Return the one optimiser of all tables; None where they say nothing.

    Args:
        by_table: The optimiser of each table, by its name.

    Raises:
        ConfigError: Tables differ.
    """
    first, *others = by_table.items()
    for name, said in others:
        if said != first[1]:
            raise ConfigError(
                f"opt_params of tables {first[0]} and {name} differ: all tables of a collection "
                "have one optimiser"
            )
    return first[1]
