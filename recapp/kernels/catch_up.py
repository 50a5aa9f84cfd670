"""The missed steps of rows, in plain torch.

A rule of all rows (`recapp/optim/rules.py`) changes every row in each step. A row that no id
touched takes such a step with a gradient of zero. Such steps need no messages, so a row takes them
later, one after the other:

    steps_R      the steps that each row has taken
    rates_TK     the `lr` of the rule in step first + 1, first + 2, ..., first + T

After the call, the rows have taken first + T steps. It does not matter when a row catches up: the
arithmetic of a step is the same, so the bits are.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from recapp.kernels.links import Rate, Rule
from recapp.sparse.transfer import true_indices


def rows_behind(row_N: Tensor | None, steps_R: Tensor, now: int) -> Tensor:
    """Return the distinct rows that have taken fewer steps than `now`.

    Args:
        row_N: Rows, which may repeat; None: all rows.
        steps_R: The steps that each row has taken.
        now: The number of steps.
    """
    if row_N is None:
        return true_indices(steps_R < now)
    row_N = row_N.long()
    row_M = row_N[steps_R.index_select(0, row_N) < now]
    return torch.unique(row_M)  # type: ignore[no-any-return]


def catch_up(
    row_N: Tensor | None,
    steps_R: Tensor,
    weights_RD: Tensor,
    state: Sequence[Tensor],
    dtype: torch.dtype,
    rates_TK: Tensor,
    first: int,
    rule: Rule,
) -> None:
    """Take the missed steps of rows, in place. Every other row stays.

    The steps of all rows are taken together, from the row with the fewest on.

    Args:
        row_N: Rows, which may repeat; None: all rows.
        steps_R: The steps that each row has taken, at least `first`.
        weights_RD: The rows of the store.
        state: The state tensors of the rule, [R, D].
        dtype: The type of the arithmetic.
        rates_TK: The `lr` of each step, fp64.
        first: The number of steps before those of `rates_TK`.
        rule: The rule.
    """
    now = first + len(rates_TK)
    row_U = rows_behind(row_N, steps_R, now)
    if not len(row_U):
        return
    begin_U, order_U = steps_R[row_U].sort(stable=True)
    row_U = row_U[order_U]
    held = [weights_RD, *state]
    values = [x.index_select(0, row_U).to(dtype) for x in held]
    begins = begin_U.tolist()
    zero = values[0].new_zeros(1, 1)
    n = 0
    for t, rates in enumerate(rates_TK[begins[0] - first :].tolist(), begins[0]):
        while n < len(begins) and begins[n] <= t:
            n += 1
        w_ND, *state_ND = [value[:n] for value in values]
        lr: Rate = tuple(rates) if len(rates) > 1 else rates[0]
        made = rule.step(
            w_ND, torch.zeros_like(w_ND), zero, lr, torch.sqrt, *rule.constants, *state_ND
        )
        for value, new_ND in zip(values, made, strict=True):
            value[:n] = new_ND
    for x, value in zip(held, values, strict=True):
        x.index_copy_(0, row_U, value.to(x.dtype))
    steps_R.index_fill_(0, row_U, now)
