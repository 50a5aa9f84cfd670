"""Row rules: the update of a touched row, once per step, with its summed gradient.

A rule is ONE arithmetic expression, valid for a torch block [U, D], for a row in a compiled loop
and for a GPU tile alike. That is why `sqrt` is an argument and constants are plain numbers:

    step(w, g, mean_square, lr, sqrt, *constants, *state) -> (w, *state)

`mean_square` is the mean of g^2 over the WHOLE row of the logical table, summed in fp64, even where
columns are cut. State is one number per row ("row") or one per weight ("element"). Rows that no id
touched never change, except by rules of *all rows*.

A rule may read mean squares of other tensors than g, such as the weights and the update. A second
expression of the old row computes these tensors before `step`:

    squares(w, g, lr, sqrt, *constants, *state) -> (a, b, ...)
    step(w, g, (mean of a^2, mean of b^2, ...), lr, sqrt, *constants, *state) -> (w, *state)

Strips of one row exchange all their sums of squares in one message. Weight decay is decoupled: w -=
lr decay w on touched rows, before `step`. Rules whose formula has the decay in another place
(LAMB, LARS) have it among their constants.

A rule of all rows (`l2_all_rows`) computes what an optimiser of torch computes on a dense table
with `weight_decay`: the gradient of L2, l2 w, is added to the gradient of every row in every step.
A row that no id touched has a step with a gradient of zero. It takes such steps later, one after
the other, when it is next read (`recapp/engine/row_store.py`).

Sources: Duchi et al. 2011 (Adagrad); FBGEMM's EXACT_ROWWISE_ADAGRAD, PARTIAL_ROWWISE_ADAM, LAMB,
PARTIAL_ROWWISE_LAMB and LARS_SGD; Kingma & Ba 2015 with rows only as in `torch.optim.SparseAdam`;
McMahan et al. 2013 (FTRL-Proximal); You et al. 2017 and 2020 (LARS, LAMB) with norms of rows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from recapp.errors import ConfigError

Kind = Literal["row", "element"]
# The argument `lr` of an expression: the learning rate, or a tuple of it and numbers that depend on
# the step.
Rate = float | tuple[float, ...]
# An expression in the form that this module describes. Its arguments and results are torch blocks,
# numba rows or Triton tiles.
Expression = Callable[..., tuple[Any, ...]]


@dataclass(frozen=True)
class RowRule:
    """One optimiser for table rows.

    Args:
        name: The rule's name in reports, param groups and checkpoints.
        step: The expression that the module describes.
        lr: The start value of the learning rate. Every update reads the current rate from the
            optimiser's param group.
        constants: The arguments of `step` before the state.
        state: The name and kind of every state tensor.
        needs_row: Whether `step` reads mean squares, for which strips of one row exchange row
            statistics.
        rate: The function that computes the `lr` of `step` in update number t = 1, 2, ... (bias
            corrections). Comparisons of rules ignore it, because it follows from name and
            constants.
        start: The start value of every state tensor; empty if all are 0.
        squares: The expression of the squared tensors; None squares the gradient.
        decay: Decoupled weight decay.
        all_rows: Whether `step` changes the rows that no id touched, too: with a gradient of zero.

    Raises:
        ConfigError: The learning rate is negative or no number, or a rule of all rows has state or
            statistics of whole rows.
    """

    name: str
    step: Expression
    lr: float
    constants: tuple[float, ...] = ()
    state: tuple[tuple[str, Kind], ...] = ()
    needs_row: bool = False
    rate: Callable[[float, int], Rate] | None = field(default=None, compare=False)
    start: tuple[float, ...] = ()
    squares: Expression | None = None
    decay: float = 0.0
    all_rows: bool = False

    def __post_init__(self) -> None:
        is_number = isinstance(self.lr, int | float) and math.isfinite(self.lr)
        if not is_number or self.lr < 0:
            raise ConfigError(f"optimizer.sparse.lr={self.lr}: must be a number of at least 0")
        of_rows = self.needs_row or self.squares or any(kind == "row" for _, kind in self.state)
        if self.all_rows and (of_rows or self.decay):
            raise ConfigError(
                f"optimizer.sparse: the rule {self.name} takes the steps of all rows, and may have "
                "neither state nor statistics of whole rows, nor weight_decay: use adam, adagrad, "
                "momentum_sgd or sgd with l2_all_rows"
            )

    @property
    def means(self) -> int:
        """Return the number of mean squares that `step` reads."""
        if self.squares is None:
            return int(self.needs_row)
        rate = self.rate_of(self.lr, 1)
        return len(
            self.squares(1.0, 1.0, rate, math.sqrt, *self.constants, *[1.0] * len(self.state))
        )

    def starts(self) -> list[tuple[str, Kind, float]]:
        """Return name, kind and start value of every state tensor."""
        values = self.start or (0.0,) * len(self.state)
        return [(name, kind, at) for (name, kind), at in zip(self.state, values, strict=True)]

    def rate_of(self, lr: float, t: int) -> Rate:
        """Return what `step` gets as its `lr` in update number t = 1, 2, ...

        It is the learning rate itself, or what the rule makes of it: Adam's, corrected for the
        bias of its first updates.

        Args:
            lr: The learning rate.
            t: The number of the update.
        """
        return self.rate(lr, t) if self.rate else lr


def _check(**constants: float) -> None:
    """Check that betas and momentum are from 0 to less than 1 and other constants at least 0.

    Raises:
        ConfigError: A constant is out of its range.
    """
    for name, value in constants.items():
        most = 1.0 if name in ("beta1", "beta2", "momentum") else math.inf
        if not isinstance(value, int | float) or not 0 <= value < most:
            allowed = "from 0 to less than 1" if most == 1 else "a number of at least 0"
            raise ConfigError(f"optimizer.sparse.{name}={value}: must be {allowed}")


def _check_l2(l2_all_rows: float | None, weight_decay: float) -> bool:
    """Return whether the rule is one of all rows.

    Raises:
        ConfigError: L2 is negative or no number, or touched rows decay as well.
    """
    if l2_all_rows is None:
        return False
    _check(l2_all_rows=l2_all_rows)
    if weight_decay:
        raise ConfigError(
            f"optimizer.sparse.weight_decay={weight_decay}: shrinks touched rows, and "
            f"l2_all_rows={l2_all_rows} shrinks all rows: leave one of them out"
        )
    return True


def _sgd(w, g, mean_square, lr, sqrt):
    return (w - lr * g,)


def _sgd_of_all(w, g, mean_square, lr, sqrt, l2):
    return (w - lr * (g + l2 * w),)


def _momentum(w, g, mean_square, lr, sqrt, momentum, m):
    m = m * momentum + g
    return w - lr * m, m


def _momentum_of_all(w, g, mean_square, lr, sqrt, momentum, l2, m):
    m = m * momentum + (g + l2 * w)
    return w - lr * m, m


def _adagrad(w, g, mean_square, lr, sqrt, eps, s):
    s = s + g * g
    return w - lr * g / (sqrt(s) + eps), s


def _adagrad_of_all(w, g, mean_square, lr, sqrt, eps, l2, s):
    g = g + l2 * w
    s = s + g * g
    return w - lr * g / (sqrt(s) + eps), s


def _rowwise_adagrad(w, g, mean_square, lr, sqrt, eps, s):
    s = s + mean_square
    return w - lr * g / (sqrt(s) + eps), s


def _adam(w, g, mean_square, lr, sqrt, beta1, beta2, eps, m, v):
    m = m + (g - m) * (1 - beta1)
    v = v + (g * g - v) * (1 - beta2)
    return w - lr[1] * m / (sqrt(v) + eps), m, v


def _adam_of_all(w, g, mean_square, lr, sqrt, beta1, beta2, eps, l2, m, v):
    g = g + l2 * w
    m = m + (g - m) * (1 - beta1)
    v = v + (g * g - v) * (1 - beta2)
    return w - lr[1] * m / (sqrt(v) * lr[2] + eps), m, v


def _partial_adam(w, g, mean_square, lr, sqrt, beta1, beta2, eps, m, v):
    m = m + (g - m) * (1 - beta1)
    v = v + (mean_square - v) * (1 - beta2)
    return w - lr[0] * (m * lr[1] / (sqrt(v * lr[2]) + eps)), m, v


def _ftrl(w, g, mean_square, lr, sqrt, beta, l2, n, z):
    root = sqrt(n)
    n = n + g * g
    grown = sqrt(n)
    z = z + lr * g - (grown - root) * w
    return z * -1.0 / (grown + (lr * l2 + (beta + 1e-30))), n, z


def _ftrl_l1(w, g, mean_square, lr, sqrt, beta, l2, l1, n, z):
    root = sqrt(n)
    n = n + g * g
    grown = sqrt(n)
    z = z + lr * g - (grown - root) * w
    size = sqrt(z * z)
    over = size - lr * l1
    over = (over + sqrt(over * over)) * 0.5
    return z * -1.0 / (size + 1e-30) * over / (grown + (lr * l2 + (beta + 1e-30))), n, z


def _lamb_squares(w, g, lr, sqrt, beta1, beta2, eps, decay, m, v):
    m = m + (g - m) * (1 - beta1)
    v = v + (g * g - v) * (1 - beta2)
    return w, m * lr[1] / (sqrt(v * lr[2]) + eps) + decay * w


def _lamb(w, g, means, lr, sqrt, beta1, beta2, eps, decay, m, v):
    m = m + (g - m) * (1 - beta1)
    v = v + (g * g - v) * (1 - beta2)
    update = m * lr[1] / (sqrt(v * lr[2]) + eps) + decay * w
    none = (means[0] * means[1] == 0) * 1.0
    ratio = (sqrt(means[0]) * (1 - none) + none) / (sqrt(means[1]) * (1 - none) + none)
    return w - lr[0] * ratio * update, m, v


def _partial_lamb_squares(w, g, lr, sqrt, beta1, beta2, eps, decay, m, v):
    m = m + (g - m) * (1 - beta1)
    return g, w, m, m + w


def _partial_lamb(w, g, means, lr, sqrt, beta1, beta2, eps, decay, m, v):
    m = m + (g - m) * (1 - beta1)
    v = v + (means[0] - v) * (1 - beta2)
    scale = lr[1] / (sqrt(v * lr[2]) + eps)
    # the update is scale m + decay w: its square sum follows from those of m, w and m + w
    both = (means[3] - means[2] - means[1]) * (scale * decay)
    square = means[2] * (scale * scale) + both + means[1] * (decay * decay)
    square = sqrt(square * square)
    none = (means[1] * square == 0) * 1.0
    ratio = (sqrt(means[1]) * (1 - none) + none) / (sqrt(square) * (1 - none) + none)
    return w - lr[0] * ratio * (m * scale + decay * w), m, v


def _lars_squares(w, g, lr, sqrt, momentum, eta, decay, m):
    return w, g


def _lars(w, g, means, lr, sqrt, momentum, eta, decay, m):
    none = (means[0] * means[1] == 0) * 1.0
    size = sqrt(means[0])
    local = (eta * size * (1 - none) + none) / ((sqrt(means[1]) + decay * size) * (1 - none) + none)
    m = m * momentum + lr * local * (g + decay * w)
    return w - m, m


def _add_up(w, g, mean_square, lr, sqrt, total):
    return w, total + g


# The rule of tables that are parameters: it keeps rows and adds up gradients for another optimiser.
GRADIENT = RowRule("gradient", _add_up, 0.0, state=(("gradient", "element"),))


def _keep(w, g, mean_square, lr, sqrt):
    return (w,)


# The rule of frozen tables, which no step changes: it has no state and no learning rate.
FROZEN = RowRule("frozen", _keep, 0.0)

# The rules whose tables the fused update does not change, so they have no param group.
WITHOUT_RATE = (GRADIENT, FROZEN)


def sgd(lr: float = 0.1, weight_decay: float = 0.0, l2_all_rows: float | None = None) -> RowRule:
    """Return the rule w -= lr g, equal to `torch.optim.SGD` on sparse gradients.

    With a number as `l2_all_rows` it equals `torch.optim.SGD(weight_decay=l2_all_rows)` on a dense
    table: w -= lr (g + l2 w), for all rows in each step.
    """
    _check(weight_decay=weight_decay)
    if _check_l2(l2_all_rows, weight_decay):
        return RowRule("sgd", _sgd_of_all, lr, (float(l2_all_rows or 0),), all_rows=True)
    return RowRule("sgd", _sgd, lr, decay=weight_decay)


def momentum_sgd(
    lr: float = 0.1,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    l2_all_rows: float | None = None,
) -> RowRule:
    """Return the rule m = momentum m + g; w -= lr m, on touched rows.

    It equals `torch.optim.SGD` with momentum if every step touches every row. The momentum of an
    untouched row stays unchanged. With a number as `l2_all_rows` the rule equals
    `torch.optim.SGD(momentum=momentum, weight_decay=l2_all_rows)` on a dense table.
    """
    _check(momentum=momentum, weight_decay=weight_decay)
    state: tuple[tuple[str, Kind], ...] = (("momentum_buffer", "element"),)
    if _check_l2(l2_all_rows, weight_decay):
        constants = (momentum, float(l2_all_rows or 0))
        return RowRule("momentum_sgd", _momentum_of_all, lr, constants, state, all_rows=True)
    return RowRule("momentum_sgd", _momentum, lr, (momentum,), state, decay=weight_decay)


def adagrad(
    lr: float = 0.05,
    eps: float = 1e-10,
    initial_accumulator: float = 0.0,
    weight_decay: float = 0.0,
    l2_all_rows: float | None = None,
) -> RowRule:
    """Return the rule s += g^2; w -= lr g / (sqrt(s) + eps), per weight.

    It equals `torch.optim.Adagrad` on sparse gradients. s begins at `initial_accumulator`. With a
    number as `l2_all_rows` it equals `torch.optim.Adagrad(weight_decay=l2_all_rows)` on a dense
    table.
    """
    _check(eps=eps, initial_accumulator=initial_accumulator, weight_decay=weight_decay)
    if _check_l2(l2_all_rows, weight_decay):
        return RowRule(
            "adagrad",
            _adagrad_of_all,
            lr,
            (eps, float(l2_all_rows or 0)),
            (("sum", "element"),),
            start=(initial_accumulator,) if initial_accumulator else (),
            all_rows=True,
        )
    return RowRule(
        "adagrad",
        _adagrad,
        lr,
        (eps,),
        (("sum", "element"),),
        start=(initial_accumulator,) if initial_accumulator else (),
        decay=weight_decay,
    )


def rowwise_adagrad(
    lr: float = 0.05,
    eps: float = 1e-8,
    initial_accumulator: float = 0.0,
    weight_decay: float = 0.0,
) -> RowRule:
    """Return the rule s += mean(g^2) over the row; w -= lr g / (sqrt(s) + eps).

    State is one number per row, which begins at `initial_accumulator`. The rule is exact under
    column strips too.
    """
    _check(eps=eps, initial_accumulator=initial_accumulator, weight_decay=weight_decay)
    return RowRule(
        "rowwise_adagrad",
        _rowwise_adagrad,
        lr,
        (eps,),
        (("sum", "row"),),
        needs_row=True,
        start=(initial_accumulator,) if initial_accumulator else (),
        decay=weight_decay,
    )


def adam(
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    l2_all_rows: float | None = None,
) -> RowRule:
    """Return the rule of Adam on touched rows only.

    It equals `torch.optim.SparseAdam`: the step number is the table's, not the row's. With a number
    as `l2_all_rows` it equals `torch.optim.Adam(weight_decay=l2_all_rows)` on a dense table; with 0
    there is no L2, and all rows follow their moments.
    """
    _check(beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)
    moments = _moments("element")
    if _check_l2(l2_all_rows, weight_decay):

        def rate_of_all(lr: float, t: int) -> Rate:
            return lr, lr / (1 - beta1**t), 1 / math.sqrt(1 - beta2**t)

        numbers = (beta1, beta2, eps, float(l2_all_rows or 0))
        return RowRule("adam", _adam_of_all, lr, numbers, moments, rate=rate_of_all, all_rows=True)

    def rate(lr: float, t: int) -> Rate:
        return lr, lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)

    constants = (beta1, beta2, eps)
    return RowRule("adam", _adam, lr, constants, moments, rate=rate, decay=weight_decay)


def partial_row_wise_adam(
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> RowRule:
    """Return the rule of Adam with one second moment per row: v follows mean(g^2) over the row.

    Both m and v are corrected for their start at 0, then w -= lr m / (sqrt(v) + eps).
    """
    _check(beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)
    return RowRule(
        "partial_row_wise_adam",
        _partial_adam,
        lr,
        (beta1, beta2, eps),
        _moments("row"),
        needs_row=True,
        rate=_corrected(beta1, beta2),
        decay=weight_decay,
    )


def lamb(
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> RowRule:
    """Return the rule of LAMB by rows: w -= lr |w| / |u| u, where u = m / (sqrt(v) + eps) +
    weight_decay w with corrected moments. Norms are those of the row; if one is 0, the ratio is 1.
    """
    _check(beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)
    return RowRule(
        "lamb",
        _lamb,
        lr,
        (beta1, beta2, eps, weight_decay),
        _moments("element"),
        needs_row=True,
        rate=_corrected(beta1, beta2),
        squares=_lamb_squares,
    )


def partial_row_wise_lamb(
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> RowRule:
    """Return the rule of LAMB by rows with one second moment per row, as in
    `partial_row_wise_adam`.
    """
    _check(beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)
    return RowRule(
        "partial_row_wise_lamb",
        _partial_lamb,
        lr,
        (beta1, beta2, eps, weight_decay),
        _moments("row"),
        needs_row=True,
        rate=_corrected(beta1, beta2),
        squares=_partial_lamb_squares,
    )


def lars_sgd(
    lr: float = 0.1, momentum: float = 0.9, eta: float = 0.001, weight_decay: float = 0.0
) -> RowRule:
    """Return the rule of LARS by rows: m = momentum m + lr r (g + weight_decay w); w -= m, where
    r = eta |w| / (|g| + weight_decay |w|). Norms are those of the row; if one is 0, r is 1.

    Weight decay is part of the gradient here, as in FBGEMM.
    """
    _check(momentum=momentum, eta=eta, weight_decay=weight_decay)
    return RowRule(
        "lars_sgd",
        _lars,
        lr,
        (momentum, eta, weight_decay),
        (("momentum_buffer", "element"),),
        needs_row=True,
        squares=_lars_squares,
    )


def ftrl(
    lr: float = 0.05,
    beta: float = 0.0,
    l1: float = 0.0,
    l2: float = 0.0,
    initial_accumulator: float = 0.1,
) -> RowRule:
    """Return the rule of FTRL-Proximal, per weight: n' = n + g^2; z += lr g - (sqrt(n') - sqrt(n))
    w; w = -sign(z) max(|z| - lr l1, 0) / (beta + sqrt(n') + lr l2).

    `l1` makes weights exactly 0. z is lr times the paper's z: a schedule may change the rate, down
    to 0, and no weight jumps. n begins at `initial_accumulator`. z begins at 0, so little of a
    row's start values remains after its first update. Let tables begin at 0 if that matters
    (`init_range`).
    """
    _check(beta=beta, l1=l1, l2=l2, initial_accumulator=initial_accumulator)
    step, constants = (_ftrl_l1, (beta, l2, l1)) if l1 else (_ftrl, (beta, l2))
    return RowRule(
        "ftrl",
        step,
        lr,
        constants,
        (("accumulator", "element"), ("linear", "element")),
        start=(initial_accumulator, 0.0),
    )


def _moments(second: Kind) -> tuple[tuple[str, Kind], ...]:
    return ("exp_avg", "element"), ("exp_avg_sq", second)


def _corrected(beta1: float, beta2: float) -> Callable[[float, int], Rate]:
    """Return the function that computes the learning rate, and the factors that correct both
    moments for their start at 0.
    """
    return lambda lr, t: (lr, 1 / (1 - beta1**t), 1 / (1 - beta2**t))
