"""Row rules: what happens to a touched row, once per step, given its summed gradient.

A rule is ONE arithmetic expression, valid for a torch block [U, D], for a scalar row in a compiled
loop and for a GPU tile alike; that is why `sqrt` comes in as an argument and constants travel as
plain numbers:

    step(w, g, mean_square, lr, sqrt, *constants, *state) -> (w, *state)

`mean_square` is the mean of g^2 over the WHOLE row of the logical table, summed in fp64, even where
columns are cut. State is one number per row ("row") or one per weight ("element"). Rows that no id
touched are never visited, so they never change.

Sources: Duchi et al. 2011 (Adagrad); FBGEMM's EXACT_ROWWISE_ADAGRAD; Kingma & Ba 2015 with rows
only as in `torch.optim.SparseAdam`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from recapp.errors import ConfigError

Kind = Literal["row", "element"]
Rate = float


@dataclass(frozen=True)
class RowRule:
    """One optimiser for table rows.

    Args:
        name: The name that people, param groups and checkpoints use.
        step: The expression that the module describes.
        lr: Start value of the learning rate; the live one is read from the optimiser's param group
            at every update.
        constants: Numbers that `step` gets before the state.
        state: Name and kind of every state tensor.
        needs_row: Whether `step` reads `mean_square`, for which strips of one row exchange row
            statistics.
        rate: The learning rate in update number t = 1, 2, ... (bias corrections); it follows from
            name and constants, so it does not count when rules are compared.

    Raises:
        ConfigError: A learning rate that is negative or no number.
    """

    name: str
    step: Callable[..., tuple[Any, ...]]
    lr: float
    constants: tuple[float, ...] = ()
    state: tuple[tuple[str, Kind], ...] = ()
    needs_row: bool = False
    rate: Callable[[float, int], Rate] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lr) and self.lr >= 0):
            raise ConfigError(f"optimizer.sparse.lr={self.lr}: must be a number of at least 0")

    @property
    def means(self) -> int:
        """Return how many row statistics `step` reads."""
        return int(self.needs_row)

    def rate_of(self, lr: float, t: int) -> Rate:
        """Return what `step` gets as `lr` in update number t = 1, 2, ... at a learning rate."""
        return self.rate(lr, t) if self.rate else lr


def _check(**constants: float) -> None:
    """Check that betas are from 0 to less than 1 and other constants at least 0.

    Raises:
        ConfigError: A constant that no update can have.
    """
    for name, value in constants.items():
        most = 1.0 if name.startswith("beta") else math.inf
        if not 0 <= value < most:
            said = "from 0 to less than 1" if most == 1 else "a number of at least 0"
            raise ConfigError(f"optimizer.sparse.{name}={value}: must be {said}")


def _sgd(w: Any, g: Any, mean_square: Any, lr: Any, sqrt: Any) -> tuple[Any, ...]:
    return (w - lr * g,)


def _adagrad(
    w: Any, g: Any, mean_square: Any, lr: Any, sqrt: Any, eps: Any, s: Any
) -> tuple[Any, ...]:
    s = s + g * g
    return w - lr * g / (sqrt(s) + eps), s


def _rowwise_adagrad(
    w: Any, g: Any, mean_square: Any, lr: Any, sqrt: Any, eps: Any, s: Any
) -> tuple[Any, ...]:
    s = s + mean_square
    return w - lr * g / (sqrt(s) + eps), s


def _adam(
    w: Any,
    g: Any,
    mean_square: Any,
    lr: Any,
    sqrt: Any,
    beta1: Any,
    beta2: Any,
    eps: Any,
    m: Any,
    v: Any,
) -> tuple[Any, ...]:
    m = m + (g - m) * (1 - beta1)
    v = v + (g * g - v) * (1 - beta2)
    return w - lr * m / (sqrt(v) + eps), m, v


def sgd(lr: float = 0.1) -> RowRule:
    """Return the rule w -= lr g. It equals `torch.optim.SGD` on sparse gradients."""
    return RowRule("sgd", _sgd, lr)


def adagrad(lr: float = 0.05, eps: float = 1e-10) -> RowRule:
    """Return the rule s += g^2; w -= lr g / (sqrt(s) + eps), per weight.

    It equals `torch.optim.Adagrad` on sparse gradients.
    """
    _check(eps=eps)
    return RowRule("adagrad", _adagrad, lr, (eps,), (("sum", "element"),))


def rowwise_adagrad(lr: float = 0.05, eps: float = 1e-8) -> RowRule:
    """Return the rule s += mean(g^2) over the row; w -= lr g / (sqrt(s) + eps).

    State is one number per row. The rule is exact under column strips too.
    """
    _check(eps=eps)
    return RowRule(
        "rowwise_adagrad", _rowwise_adagrad, lr, (eps,), (("sum", "row"),), needs_row=True
    )


def adam(lr: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> RowRule:
    """Return the rule of Adam on touched rows only.

    It equals `torch.optim.SparseAdam`: the step number is the table's, not the row's.
    """
    _check(beta1=beta1, beta2=beta2, eps=eps)

    def rate(lr: float, t: int) -> float:
        return float(lr * math.sqrt(1 - beta2**t) / (1 - beta1**t))

    return RowRule(
        "adam",
        _adam,
        lr,
        (beta1, beta2, eps),
        (("exp_avg", "element"), ("exp_avg_sq", "element")),
        rate=rate,
    )
