"""The missed steps of rows as a Triton kernel (`recapp/kernels/catch_up.py`).

A tile of rows takes the steps from that of its row with the fewest on; a row that has taken a step
keeps its values. Weights and state stay in registers until the last step.
"""

import triton
import triton.language as tl

from recapp.kernels.triton_vectors import read_rows, write_rows


@triton.jit
def _rate(rates, at, R: tl.constexpr, F: tl.constexpr):
    """Return the `lr` of a step: a number, or a tuple of numbers."""
    lr = tl.full([1, 1], tl.load(rates + at).to(F.DTYPE), F.DTYPE)
    if R.RATES == 1:
        return lr
    elif R.RATES == 2:
        return (lr, tl.full([1, 1], tl.load(rates + at + 1).to(F.DTYPE), F.DTYPE))
    else:
        return (
            lr,
            tl.full([1, 1], tl.load(rates + at + 1).to(F.DTYPE), F.DTYPE),
            tl.full([1, 1], tl.load(rates + at + 2).to(F.DTYPE), F.DTYPE),
        )


@triton.jit
def _rows(t, bag_B, rows):
    """Return the rows of a tile: those that are given, or all in order."""
    if t.row is None:
        return bag_B.to(tl.int64)
    else:
        return tl.load(t.row + bag_B, mask=bag_B < rows, other=-1).to(tl.int64)


@triton.jit(do_not_specialize=["rows", "first", "now"])
def catch_up(
    t,
    steps,
    rates,
    constants,
    rows,
    first,
    now,
    STEP: tl.constexpr,
    SQRT: tl.constexpr,
    R: tl.constexpr,
    F: tl.constexpr,
):
    """Take the missed steps of distinct rows, or of all rows of the store, up to step `now`: steps
    with a gradient of zero. A negative number is no row.

    The rates of step first + i are rates[i * RATES : +RATES].
    """
    bag_B = tl.program_id(0) * F.BAGS + tl.arange(0, F.BAGS)
    row_B = _rows(t, bag_B, rows)
    there_B = (bag_B < rows) & (row_B >= 0)
    begin_B = tl.load(steps + row_B, mask=there_B, other=now).to(tl.int32)
    there_B = there_B & (begin_B < now)
    begin = tl.min(begin_B, 0)
    WIDTH: tl.constexpr = F.WIDTH
    COLUMNS: tl.constexpr = F.COLUMNS
    for column in tl.static_range(0, WIDTH, COLUMNS):
        column_C = column + tl.arange(0, COLUMNS)
        w_BC = read_rows(t.held, row_B, there_B, column_C, F, False)
        zero_BC = tl.zeros_like(w_BC)
        zero_B1 = tl.zeros_like(begin_B).to(F.DTYPE)[:, None]
        first_BC = zero_BC
        second_BC = zero_BC
        if t.state0 is not None:
            first_BC = read_rows(t.state0, row_B, there_B, column_C, F, False)
        if t.state1 is not None:
            second_BC = read_rows(t.state1, row_B, there_B, column_C, F, False)
        for step in range(begin, now):
            rate = _rate(rates, (step - first) * R.RATES, R, F)
            takes_B1 = (begin_B <= step)[:, None]
            if t.state0 is None:
                new = STEP(w_BC, zero_BC, zero_B1, rate, SQRT, *constants)
            elif t.state1 is None:
                new = STEP(w_BC, zero_BC, zero_B1, rate, SQRT, *constants, first_BC)
                first_BC = tl.where(takes_B1, new[1], first_BC)
            else:
                new = STEP(w_BC, zero_BC, zero_B1, rate, SQRT, *constants, first_BC, second_BC)
                first_BC = tl.where(takes_B1, new[1], first_BC)
                second_BC = tl.where(takes_B1, new[2], second_BC)
            w_BC = tl.where(takes_B1, new[0], w_BC)
        write_rows(t.held, w_BC, row_B, there_B, column_C, F, False)
        if t.state0 is not None:
            write_rows(t.state0, first_BC, row_B, there_B, column_C, F, False)
        if t.state1 is not None:
            write_rows(t.state1, second_BC, row_B, there_B, column_C, F, False)
    tl.debug_barrier()  # all threads must have read the steps that one of them overwrites now
    tl.store(steps + row_B, tl.zeros_like(begin_B) + now, mask=there_B)
