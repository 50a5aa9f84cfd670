"""Updates of rows as Triton kernels: sums of gradients and a rule, in one pass over memory.

Kernels are those of `triton_vectors.py` in form: a program is one warp and takes tiles of rows. A
rule's expression is an argument of its own, because its source is part of the key under which
Triton keeps a kernel. Learning rates and decay are read from memory, so that a recorded step can
run again with other ones.
"""

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import triton
import triton.language as tl

from recapp.kernels.triton_launch import Launch
from recapp.kernels.triton_vectors import (
    DeviceMatrix,
    number_of,
    row_squares,
    sums_of,
)

DECAY = tl.constexpr(3)  # the place of the decay among the numbers of a step (`DeviceRate`)
STEP_ARGUMENTS = ("w", "g", "mean_square", "lr", "sqrt")  # of a rule, before its constants


class RuleForm(NamedTuple):
    """The constants of a rule that an update is compiled for.

    Args:
        RATES: The number of learning rates that the rule reads.
        DECAYS: Whether the rule has weight decay.
        ROW0: Whether the first state tensor has one number for each row, not for each weight.
        ROW1: The same of the second state tensor.
        NEEDS_ROW: Whether the rule reads the mean square of the row.
    """

    RATES: int
    DECAYS: bool
    ROW0: bool
    ROW1: bool
    NEEDS_ROW: bool


@lru_cache(None)
def device_function(step: Callable[..., Any], constants: tuple[float, ...]) -> Any:
    """Return a rule's expression with its constants as a Triton function for kernels, compiled from
    the Python source.

    Triton would read the annotations of the expression as its own. So the source is compiled again
    without annotations and put where `inspect` finds source; the constants become names of its
    module. Triton's interpreter takes the expression itself, because kernels are Python there.
    """
    first = len(STEP_ARGUMENTS)
    if triton.knobs.runtime.interpret:
        return lambda *arguments: step(*arguments[:first], *constants, *arguments[first:])
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(step))).body
    assert isinstance(tree, ast.FunctionDef), "a rule is a function with a name"
    for argument in tree.args.args:
        argument.annotation = None
    fixed = tree.args.args[first : first + len(constants)]
    del tree.args.args[first : first + len(constants)]
    tree.returns = None
    tree.decorator_list = []
    source = ast.unparse(tree) + "\n"
    file = f"<{step.__module__}.{step.__qualname__}{constants} on a GPU>"
    names = dict(step.__globals__)
    names |= {name.arg: tl.constexpr(c) for name, c in zip(fixed, constants, strict=True)}
    linecache.cache[file] = len(source), None, source.splitlines(True), file
    exec(compile(source, file, "exec"), names)
    return triton.jit(names[tree.name])


@triton.jit
def sqrt(x):
    """Return the correctly rounded square root: `tl.sqrt` approximates it in single precision."""
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def read_rows(pointer, row_B, there_B, column_C, F: tl.constexpr, BY_ROW: tl.constexpr):
    """Return the weights or the state of a tile of rows: [BAGS, COLUMNS], or [BAGS, 1] by row."""
    if BY_ROW:
        return tl.load(pointer + row_B, mask=there_B, other=0.0).to(F.DTYPE)[:, None]
    else:
        return tl.load(
            pointer + row_B[:, None] * F.WIDTH + column_C[None, :],
            mask=there_B[:, None] & (column_C < F.WIDTH)[None, :],
            other=0.0,
        ).to(F.DTYPE)


@triton.jit
def write_rows(pointer, value, row_B, there_B, column_C, F: tl.constexpr, BY_ROW: tl.constexpr):
    """Write the weights or the state of a tile of rows."""
    if BY_ROW:
        tl.store(pointer + row_B[:, None], value, mask=there_B[:, None])
    else:
        tl.store(
            pointer + row_B[:, None] * F.WIDTH + column_C[None, :],
            value,
            mask=there_B[:, None] & (column_C < F.WIDTH)[None, :],
        )


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


@Launch
@triton.jit(do_not_specialize=["bags"])
def update(
    memory,
    numbers,
    index,
    offsets,
    uses,
    sums,
    sums2,
    bags,
    count,
    weights,
    row,
    mean,
    state0,
    state1,
    rates,
    stopped,
    STEP: tl.constexpr,
    SQRT: tl.constexpr,
    R: tl.constexpr,
    F: tl.constexpr,
):
    """Sum the gradients of each touched row and apply a rule to its weights and state, in one pass
    over memory. A program updates tiles of rows, a block of columns after the other.

    Array arguments are those of `DeviceMatrix`, then the weights of the store, the touched rows,
    the mean square of each (None where rows are whole), and the state tensors of the rule (None
    where it has none).

    A row wider than a tile is summed a second time if the rule needs the mean square of the whole
    row first. The rule gets the first RATES of `rates`, as a tuple if there are several. If DECAYS,
    weights lose the part rates[DECAY] before the rule is applied. Where `stopped` is not zero,
    nothing is updated.
    """
    matrix = DeviceMatrix(memory, numbers, index, offsets, uses, sums, sums2)
    WIDTH: tl.constexpr = F.WIDTH
    COLUMNS: tl.constexpr = F.COLUMNS
    bags = number_of(bags, count)
    if stopped is not None:
        bags = tl.where(tl.load(stopped) == 0, bags, 0)
    for tile in range(tl.program_id(0), tl.cdiv(bags, F.BAGS), tl.num_programs(0)):
        bag_B = tile * F.BAGS + tl.arange(0, F.BAGS)
        there_B = bag_B < bags
        rate = _rate(rates, 0, R, F)
        row_B = tl.load(row + bag_B, mask=there_B, other=0).to(tl.int64)
        mean_B = tl.zeros_like(bag_B).to(F.DTYPE)
        if mean is not None:
            mean_B = tl.load(mean + bag_B, mask=there_B, other=0.0)
        elif R.NEEDS_ROW:
            total_B, grad_BC = row_squares(matrix, bag_B, there_B, F)
            mean_B = (total_B / F.WIDTH).to(F.DTYPE)
        for first in tl.static_range(0, WIDTH, COLUMNS):
            column_C = first + tl.arange(0, COLUMNS)
            if F.WIDTH > F.COLUMNS or mean is not None or not R.NEEDS_ROW:
                grad_BC = sums_of(matrix, bag_B, there_B, column_C, column_C < F.WIDTH, F)
            old_BC = read_rows(weights, row_B, there_B, column_C, F, False)
            if R.DECAYS:
                decay = tl.load(rates + DECAY).to(F.DTYPE)
                old_BC = old_BC - tl.full([1, 1], decay, F.DTYPE) * old_BC
            if state0 is None:
                new = STEP(old_BC, grad_BC, mean_B[:, None], rate, SQRT)
            elif state1 is None:
                held0 = read_rows(state0, row_B, there_B, column_C, F, R.ROW0)
                new = STEP(old_BC, grad_BC, mean_B[:, None], rate, SQRT, held0)
            else:
                held0 = read_rows(state0, row_B, there_B, column_C, F, R.ROW0)
                held1 = read_rows(state1, row_B, there_B, column_C, F, R.ROW1)
                new = STEP(old_BC, grad_BC, mean_B[:, None], rate, SQRT, held0, held1)
            tl.debug_barrier()  # all threads must have read what one of them overwrites now
            write_rows(weights, new[0], row_B, there_B, column_C, F, False)
            if state0 is not None and (not R.ROW0 or first + F.COLUMNS >= F.WIDTH):
                write_rows(state0, new[1], row_B, there_B, column_C, F, R.ROW0)
            if state1 is not None and (not R.ROW1 or first + F.COLUMNS >= F.WIDTH):
                write_rows(state1, new[2], row_B, there_B, column_C, F, R.ROW1)


@Launch
@triton.jit(do_not_specialize=["rows", "first", "now"])
def catch_up(
    weights,
    row,
    state0,
    state1,
    steps,
    rates,
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

    A tile of rows takes the steps from that of its row with the fewest on; a row that has taken a
    step keeps its values. Weights and state stay in registers until the last step. The rates of
    step first + i are rates[i * RATES : +RATES].
    """
    bag_B = tl.program_id(0) * F.BAGS + tl.arange(0, F.BAGS)
    if row is None:
        row_B = bag_B.to(tl.int64)
    else:
        row_B = tl.load(row + bag_B, mask=bag_B < rows, other=-1).to(tl.int64)
    there_B = (bag_B < rows) & (row_B >= 0)
    begin_B = tl.load(steps + row_B, mask=there_B, other=now).to(tl.int32)
    there_B = there_B & (begin_B < now)
    begin = tl.min(begin_B, 0)
    WIDTH: tl.constexpr = F.WIDTH
    COLUMNS: tl.constexpr = F.COLUMNS
    for column in tl.static_range(0, WIDTH, COLUMNS):
        column_C = column + tl.arange(0, COLUMNS)
        w_BC = read_rows(weights, row_B, there_B, column_C, F, False)
        zero_BC = tl.zeros_like(w_BC)
        zero_B1 = tl.zeros_like(begin_B).to(F.DTYPE)[:, None]
        first_BC = zero_BC
        second_BC = zero_BC
        if state0 is not None:
            first_BC = read_rows(state0, row_B, there_B, column_C, F, False)
        if state1 is not None:
            second_BC = read_rows(state1, row_B, there_B, column_C, F, False)
        for step in range(begin, now):
            rate = _rate(rates, (step - first) * R.RATES, R, F)
            takes_B1 = (begin_B <= step)[:, None]
            if state0 is None:
                new = STEP(w_BC, zero_BC, zero_B1, rate, SQRT)
            elif state1 is None:
                new = STEP(w_BC, zero_BC, zero_B1, rate, SQRT, first_BC)
                first_BC = tl.where(takes_B1, new[1], first_BC)
            else:
                new = STEP(w_BC, zero_BC, zero_B1, rate, SQRT, first_BC, second_BC)
                first_BC = tl.where(takes_B1, new[1], first_BC)
                second_BC = tl.where(takes_B1, new[2], second_BC)
            w_BC = tl.where(takes_B1, new[0], w_BC)
        write_rows(weights, w_BC, row_B, there_B, column_C, F, False)
        if state0 is not None:
            write_rows(state0, first_BC, row_B, there_B, column_C, F, False)
        if state1 is not None:
            write_rows(state1, second_BC, row_B, there_B, column_C, F, False)
    tl.debug_barrier()  # all threads must have read the steps that one of them overwrites now
    tl.store(steps + row_B, tl.zeros_like(begin_B) + now, mask=there_B)
