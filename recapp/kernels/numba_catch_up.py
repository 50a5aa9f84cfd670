"""The missed steps of rows, compiled: a row takes them in registers, and is read and written once
(`recapp/kernels/reference.py`).

One step waits for the results of the step before it, about 60 cycles for Adam. So neighbouring rows
that have taken equally many steps, such as the rows that no id ever touched, take theirs together,
as one wide row: several rows cost the time of one.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from recapp.kernels.numba_cache import inlined
from recapp.kernels.numba_vectors import ThreadedKernel, Touched, bound_rule, held_row
from recapp.kernels.simd import get, load, prefetch, put, store, zeros

COLUMNS_TOGETHER = 32  # of rows that take their steps together
ROWS_AHEAD = 6  # rows are prefetched this many rows before their steps


@lru_cache(None)
def advancing(
    step: Callable[..., tuple[Any, ...]],
    constants: tuple[float, ...],
    state: int,
    rates: int,
    width: int,
    rows: int,
) -> Callable[..., None]:
    """Return the function that takes the steps begin .. end of `rows` neighbours, from a row on.

    Args:
        step: The rule's expression.
        constants: The constants of the rule.
        state: The number of state tensors, at most two.
        rates: The numbers of the `lr` of a step, at most three.
        width: The columns of a row.
        rows: The rows that take the steps together.
    """
    rule = bound_rule(step, constants, state)
    columns = rows * width
    last = rates - 1
    first_kind, second_kind = (*["element"] * state, "none", "none")[:2]
    _, read0, write0 = held_row(first_kind, width, columns)
    _, read1, write1 = held_row(second_kind, width, columns)

    @inlined(step, constants, state, rates, width, rows)
    def advancing(b: Touched, rates_N: Any, row: Any, begin: Any, end: Any) -> None:
        zero = zeros(b.like, columns)
        w = load(b.weights, row * width, b.like, columns)
        e = read0(b.state0, row, b.like)
        f = read1(b.state1, row, b.like)
        for t in range(begin, end):
            at = rates * t
            if rates == 1:
                w, e, f = rule(w, zero, b.like, get(rates_N, at), e, f)
            else:
                three = get(rates_N, at), get(rates_N, at + 1), get(rates_N, at + last)
                w, e, f = rule(w, zero, b.like, three[:rates], e, f)
        write0(b.state0, row, e)
        write1(b.state1, row, f)
        store(b.weights, row * width, w)

    return advancing


@lru_cache(None)
def catching_up(
    step: Callable[..., tuple[Any, ...]],
    constants: tuple[float, ...],
    state: int,
    rates: int,
    width: int,
    of_all: bool,
) -> Callable[..., None]:
    """Return the function that takes the missed steps of the rows first .. last of `Touched`, and
    counts them in the steps of the store.

    Args:
        step: As for `advancing`, like `constants`, `state` and `rates`.
        constants: The constants of the rule.
        state: The number of state tensors.
        rates: The numbers of the `lr` of a step.
        width: The columns of the store.
        of_all: Whether the rows are first .. last themselves: then no row numbers are read, and
            neighbours take their steps together.
    """
    rows = max(COLUMNS_TOGETHER // width, 1) if of_all else 1
    advance = advancing(step, constants, state, rates, width, 1)
    advance_all = advancing(step, constants, state, rates, width, rows)

    @inlined(step, constants, state, rates, width, of_all)
    def catching_up(
        steps_R: Any, touched: Any, rates_N: Any, span: Any, first: Any, last: Any
    ) -> None:
        b = Touched(*touched)
        begin, now = span
        n = first
        while n < last:
            row = n if of_all else int(get(b.row_U, n))
            step_of_rows = int(get(steps_R, row))
            end = row + 1
            if of_all:
                while end < min(row + rows, last) and int(get(steps_R, end)) == step_of_rows:
                    end += 1
            elif n + ROWS_AHEAD < last:
                prefetch(steps_R, int(get(b.row_U, n + ROWS_AHEAD)), 1)
            if step_of_rows < now:
                if end == row + rows:
                    advance_all(b, rates_N, row, step_of_rows - begin, now - begin)
                else:
                    for each in range(row, end):
                        advance(b, rates_N, each, step_of_rows - begin, now - begin)
                for each in range(row, end):
                    put(steps_R, each, now)
            n += end - row

    return catching_up


catch_up = ThreadedKernel(catching_up)
