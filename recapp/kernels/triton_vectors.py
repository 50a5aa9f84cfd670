"""The arithmetic half of the GPU backend as Triton kernels: one source for every type, width and
rule.

A program has a tile of bags (or touched rows) x columns and goes through the entries of its bags
together; every bag adds its own entries, one after the other. No sum goes over threads and no
addition is atomic, so what a bag sums to depends on its entries alone. With bags of very different
lengths a tile would wait for its longest one, and rows of small tables have tens of thousands of
entries; so a bag longer than `RUN` is summed in runs of that many, counted from its own first
entry, and then run by run:

    entries   0         256        512        768      a run that begins in entries
    bags      |a|        b           |  c  |           256 w .. 256 w + 255 has position 2 w + 1
    runs        [b0       )[b1       )                 it begins its bag and 2 w where it goes on
                                                       with one: at most one of each can, so the
                                                       host makes room without knowing any length

Multiplications and additions are never fused: with fusing, bits could differ between two ways to
compile one line.
"""

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import triton
import triton.language as tl

RUN = 256  # entries of a run; fewer need more partial sums, more take longer one after the other
TILE_ELEMENTS = 1024  # of a program's tile: 8 in each thread of 4 warps
TILE_BAGS = 64
TILE_COLUMNS = 128  # whole blocks of squares (`SQUARE_BLOCK`)
AT_ONCE = 4  # entries whose loads do not wait for each other


def tile(width: int) -> tuple[int, int]:
    """Return the bags and the columns of a program's tile for vectors of a width."""
    columns = min(triton.next_power_of_2(width), TILE_COLUMNS)
    return min(TILE_ELEMENTS // columns, TILE_BAGS), columns


@lru_cache(None)
def device_function(step: Callable[..., Any]) -> Any:
    """Return a rule's expression as a function that kernels call: Triton compiles the source that
    Python runs.

    Triton would take the annotations of the expression for its own. So the source is compiled anew
    without them, and put where `inspect` looks for source. The interpreter takes the expression as
    it is: kernels are Python there, and it needs `triton.language` in the module of all that it
    decorates.
    """
    if triton.knobs.runtime.interpret:
        return step
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(step))).body
    assert isinstance(tree, ast.FunctionDef), "a rule is a function with a name"
    for argument in tree.args.args:
        argument.annotation = None
    tree.returns = None
    tree.decorator_list = []
    source = ast.unparse(tree) + "\n"
    file = f"<{step.__module__}.{step.__qualname__} on a GPU>"
    names = dict(step.__globals__)
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
def _vectors(
    source,
    numbers,
    at_B,
    here_B,
    column_C,
    inside_C,
    DTYPE: tl.constexpr,
    STRIDE: tl.constexpr,
    BITS: tl.constexpr,
):
    """Return the vectors at index `at` of the source, [BAGS, COLUMNS].

    They are floats, or records of `STRIDE` bytes with values of `BITS` bits; `numbers` is the
    same memory in the type of their scales and biases, the last two numbers of a record.
    """
    here_BC = here_B[:, None] & inside_C[None, :]
    first_B = at_B * STRIDE
    if numbers is None:
        return tl.load(source + first_B[:, None] + column_C[None, :], mask=here_BC, other=0.0).to(
            DTYPE
        )
    else:
        byte_BC = tl.load(
            source + first_B[:, None] + (column_C * BITS // 8)[None, :], mask=here_BC, other=0
        ).to(tl.int32)
        q_BC = (byte_BC >> (column_C * BITS % 8)[None, :]) & ((1 << BITS) - 1)
        # a number has half as many bytes as a value has bits
        next_B = (at_B + 1) * (STRIDE // (BITS // 2))
        scale_B = tl.load(numbers + (next_B - 2), mask=here_B, other=0.0).to(DTYPE)
        bias_B = tl.load(numbers + (next_B - 1), mask=here_B, other=0.0).to(DTYPE)
        return q_BC.to(DTYPE) * scale_B[:, None] + bias_B[:, None]


@triton.jit
def _entries(
    source,
    numbers,
    index,
    weights,
    begin_B,
    length_B,
    column_C,
    inside_C,
    DTYPE: tl.constexpr,
    STRIDE: tl.constexpr,
    BITS: tl.constexpr,
    BAGS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Return the sum of entries begin .. begin + length of each bag, added one after the other:
    [BAGS, COLUMNS].
    """
    total_BC = tl.zeros([BAGS, COLUMNS], DTYPE)
    for first in range(0, tl.max(length_B, 0), AT_ONCE):
        for ahead in tl.static_range(AT_ONCE):
            here_B = first + ahead < length_B
            k_B = begin_B + first + ahead
            at_B = tl.load(index + k_B, mask=here_B, other=0).to(tl.int64)
            vector_BC = _vectors(
                source, numbers, at_B, here_B, column_C, inside_C, DTYPE, STRIDE, BITS
            )
            if weights is not None:
                vector_BC = (
                    vector_BC * tl.load(weights + k_B, mask=here_B, other=0.0).to(DTYPE)[:, None]
                )
            total_BC = total_BC + vector_BC
    return total_BC


@triton.jit
def _sums(
    source,
    numbers,
    index,
    offsets,
    weights,
    partial,
    bag_B,
    there_B,
    column_C,
    inside_C,
    DTYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    BITS: tl.constexpr,
    RUN: tl.constexpr,
    BAGS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Return a tile of sums: of short bags from their entries, of long ones from their runs."""
    if offsets is None:
        return _entries(
            source,
            numbers,
            index,
            weights,
            bag_B,
            there_B.to(tl.int32),
            column_C,
            inside_C,
            DTYPE,
            STRIDE,
            BITS,
            BAGS,
            COLUMNS,
            1,
        )
    else:
        begin_B = tl.load(offsets + bag_B, mask=there_B, other=0)
        length_B = tl.load(offsets + bag_B + 1, mask=there_B, other=0) - begin_B
        long_B = length_B > RUN
        total_BC = _entries(
            source,
            numbers,
            index,
            weights,
            begin_B,
            tl.where(long_B, 0, length_B),
            column_C,
            inside_C,
            DTYPE,
            STRIDE,
            BITS,
            BAGS,
            COLUMNS,
            AT_ONCE,
        )
        if partial is not None:
            runs_B = tl.where(long_B, tl.cdiv(length_B, RUN), 0)
            for run in range(tl.max(runs_B, 0)):
                offset_B = ((begin_B // RUN + run) * 2 + (run == 0)).to(tl.int64) * WIDTH
                here_BC = (run < runs_B)[:, None] & inside_C[None, :]
                total_BC = total_BC + tl.load(
                    partial + offset_B[:, None] + column_C[None, :], mask=here_BC, other=0.0
                )
        return total_BC


@triton.jit(do_not_specialize=["bags"])
def sum_runs(
    source,
    numbers,
    index,
    offsets,
    weights,
    partial,
    bags,
    DTYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    BITS: tl.constexpr,
    RUN: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Write the partial sums of bags longer than `RUN`.

    Program 2 w + 1 sums the run in window w that begins such a bag, program 2 w the run that
    continues one.
    """
    position = tl.program_id(0)
    window = (position // 2) * RUN
    begins = position % 2 == 1
    # the number of an entry that can belong only to the bag whose run this program sums
    look = tl.where(begins, window + RUN - 1, window - 1)
    low = 0
    high = bags
    while high - low > 1:
        middle = (low + high) // 2
        left = tl.load(offsets + middle) <= look
        low = tl.where(left, middle, low)
        high = tl.where(left, high, middle)
    begin = tl.load(offsets + low)
    end = tl.load(offsets + low + 1)
    first = begin + tl.cdiv(tl.maximum(window - begin, 0), RUN) * RUN
    if (end - begin > RUN) & (first < end) & (begins == (begin >= window)):
        column_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside_C = column_C < WIDTH
        alone = tl.zeros([1], tl.int32)
        total_BC = _entries(
            source,
            numbers,
            index,
            weights,
            first + alone,
            tl.minimum(end - first, RUN) + alone,
            column_C,
            inside_C,
            DTYPE,
            STRIDE,
            BITS,
            1,
            COLUMNS,
            AT_ONCE,
        )
        tl.store(
            partial + position.to(tl.int64) * WIDTH + column_C[None, :],
            total_BC,
            mask=inside_C[None, :],
        )


@triton.jit(do_not_specialize=["bags"])
def pool(
    source,
    numbers,
    index,
    offsets,
    weights,
    partial,
    target,
    at,
    bags,
    scale: tl.float64,
    DTYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    BITS: tl.constexpr,
    IN_LINES: tl.constexpr,
    RUN: tl.constexpr,
    BAGS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Write a tile of sums: target[at[m] : +width] = scale * sum of weights[k] *
    source[index[k] * stride : +width] over the entries k of bag m.

    Where `offsets` is None, each bag has one entry; where `weights` is None, they are ones; where
    `at` is None, bags stand side by side. `partial` is None where no bag can be long, `numbers` is
    None where the source holds floats (see `quantised.py`).
    """
    bag_B = tl.program_id(0) * BAGS + tl.arange(0, BAGS)
    column_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there_B = bag_B < bags
    inside_C = column_C < WIDTH
    total_BC = _sums(
        source,
        numbers,
        index,
        offsets,
        weights,
        partial,
        bag_B,
        there_B,
        column_C,
        inside_C,
        DTYPE,
        WIDTH,
        STRIDE,
        BITS,
        RUN,
        BAGS,
        COLUMNS,
        AT_ONCE,
    )
    if at is None:
        offset_B = bag_B.to(tl.int64) * WIDTH
    else:
        offset_B = tl.load(at + bag_B, mask=there_B, other=0).to(tl.int64)
        if IN_LINES:
            # at least 8 elements to 64 bytes: stores of 16 bytes instead of one element
            offset_B = tl.multiple_of(offset_B, 8)
    total_BC = total_BC * tl.full([1, 1], scale, DTYPE)
    tl.store(
        target + offset_B[:, None] + column_C[None, :],
        total_BC,
        mask=there_B[:, None] & inside_C[None, :],
    )


@triton.jit
def _add_squares(total_B, grad_BC, BAGS: tl.constexpr, COLUMNS: tl.constexpr, FOLDS: tl.constexpr):
    """Return the total plus the sums of squares of the tile's blocks of 2^FOLDS columns, added
    block by block.

    Within a block neighbours are added, then neighbouring pairs, and so on: the same tree for a
    narrow block as for a wide one that ends in zeros, whatever threads hold the tile. (`tl.sum`
    adds in an order that depends on how the tile was loaded.)
    """
    square_BC = grad_BC.to(tl.float64)
    square_BC = square_BC * square_BC
    for fold in tl.static_range(FOLDS):
        left_BC, right_BC = tl.split(tl.reshape(square_BC, [BAGS, COLUMNS >> (fold + 1), 2]))
        square_BC = left_BC + right_BC
    if COLUMNS >> FOLDS == 2:
        left_B, right_B = tl.split(square_BC)
        return total_B + left_B + right_B
    else:
        return total_B + tl.reshape(square_BC, [BAGS])


@triton.jit
def _gradients(
    source,
    index,
    offsets,
    weights,
    partial,
    bag_B,
    there_B,
    first,
    DTYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    RUN: tl.constexpr,
    BAGS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Return the summed gradients of a tile of touched rows, columns first .. first + COLUMNS."""
    column_C = first + tl.arange(0, COLUMNS)
    return _sums(
        source,
        None,
        index,
        offsets,
        weights,
        partial,
        bag_B,
        there_B,
        column_C,
        column_C < WIDTH,
        DTYPE,
        WIDTH,
        1,
        0,
        RUN,
        BAGS,
        COLUMNS,
        AT_ONCE,
    )


@triton.jit(do_not_specialize=["bags"])
def square_sums(
    source,
    index,
    offsets,
    weights,
    partial,
    total,
    bags,
    DTYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    RUN: tl.constexpr,
    BAGS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FOLDS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Write the fp64 sum of squares of each touched row's gradient.

    The strips of one row exchange these sums.
    """
    bag_B = tl.program_id(0) * BAGS + tl.arange(0, BAGS)
    there_B = bag_B < bags
    total_B = tl.zeros([BAGS], tl.float64)
    for first in tl.static_range(0, WIDTH, COLUMNS):
        grad_BC = _gradients(
            source,
            index,
            offsets,
            weights,
            partial,
            bag_B,
            there_B,
            first,
            DTYPE,
            WIDTH,
            RUN,
            BAGS,
            COLUMNS,
            AT_ONCE,
        )
        total_B = _add_squares(total_B, grad_BC, BAGS, COLUMNS, FOLDS)
    tl.store(total + bag_B, total_B, mask=there_B)


@triton.jit
def _read(
    held,
    row_B,
    there_B,
    column_C,
    inside_C,
    DTYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
):
    if KIND == "row":
        return tl.load(held + row_B, mask=there_B, other=0.0).to(DTYPE)[:, None]
    else:
        here_BC = there_B[:, None] & inside_C[None, :]
        return tl.load(
            held + row_B[:, None] * WIDTH + column_C[None, :], mask=here_BC, other=0.0
        ).to(DTYPE)


@triton.jit
def _write(
    held, value, row_B, there_B, column_C, inside_C, WIDTH: tl.constexpr, KIND: tl.constexpr
):
    if KIND == "row":
        tl.store(held + row_B[:, None], value, mask=there_B[:, None])
    else:
        tl.store(
            held + row_B[:, None] * WIDTH + column_C[None, :],
            value,
            mask=there_B[:, None] & inside_C[None, :],
        )


@triton.jit(do_not_specialize=["bags"])
def update(
    source,
    index,
    offsets,
    weights,
    partial,
    row,
    mean,
    held,
    state0,
    state1,
    constants,
    bags,
    lr: tl.float64,
    lr1: tl.float64,
    lr2: tl.float64,
    decay: tl.float64,
    RATES: tl.constexpr,
    DECAYS: tl.constexpr,
    STEP: tl.constexpr,
    SQRT: tl.constexpr,
    KIND0: tl.constexpr,
    KIND1: tl.constexpr,
    NEEDS_ROW: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    RUN: tl.constexpr,
    BAGS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FOLDS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Sum the gradients of each touched row and apply a rule to its weights and state, in one pass
    over memory.

    A row wider than a tile is summed a second time where the rule needs the mean square of the
    whole row first. `mean` is None where rows are whole; `state0` and `state1` are None where the
    rule has fewer state tensors; KIND0 and KIND1 are "row" or "element". The rule gets as many of
    lr, lr1 and lr2 as RATES says, as a tuple where it is more than one; if DECAYS, of weights that
    have lost the part `decay`.
    """
    bag_B = tl.program_id(0) * BAGS + tl.arange(0, BAGS)
    there_B = bag_B < bags
    if RATES == 1:
        rate = tl.full([1, 1], lr, DTYPE)
    elif RATES == 2:
        rate = (tl.full([1, 1], lr, DTYPE), tl.full([1, 1], lr1, DTYPE))
    else:
        rate = (
            tl.full([1, 1], lr, DTYPE),
            tl.full([1, 1], lr1, DTYPE),
            tl.full([1, 1], lr2, DTYPE),
        )
    row_B = tl.load(row + bag_B, mask=there_B, other=0).to(tl.int64)
    mean_B = tl.zeros([BAGS], DTYPE)
    if mean is not None:
        mean_B = tl.load(mean + bag_B, mask=there_B, other=0.0)
    elif NEEDS_ROW:
        total_B = tl.zeros([BAGS], tl.float64)
        for first in tl.static_range(0, WIDTH, COLUMNS):
            grad_BC = _gradients(
                source,
                index,
                offsets,
                weights,
                partial,
                bag_B,
                there_B,
                first,
                DTYPE,
                WIDTH,
                RUN,
                BAGS,
                COLUMNS,
                AT_ONCE,
            )
            total_B = _add_squares(total_B, grad_BC, BAGS, COLUMNS, FOLDS)
        mean_B = (total_B / WIDTH).to(DTYPE)
    for first in tl.static_range(0, WIDTH, COLUMNS):
        column_C = first + tl.arange(0, COLUMNS)
        inside_C = column_C < WIDTH
        if WIDTH > COLUMNS or mean is not None or not NEEDS_ROW:
            grad_BC = _gradients(
                source,
                index,
                offsets,
                weights,
                partial,
                bag_B,
                there_B,
                first,
                DTYPE,
                WIDTH,
                RUN,
                BAGS,
                COLUMNS,
                AT_ONCE,
            )
        old_BC = _read(held, row_B, there_B, column_C, inside_C, DTYPE, WIDTH, "element")
        if DECAYS:
            old_BC = old_BC - tl.full([1, 1], decay, DTYPE) * old_BC
        if state0 is None:
            new = STEP(old_BC, grad_BC, mean_B[:, None], rate, SQRT, *constants)
        elif state1 is None:
            first_state = _read(state0, row_B, there_B, column_C, inside_C, DTYPE, WIDTH, KIND0)
            new = STEP(old_BC, grad_BC, mean_B[:, None], rate, SQRT, *constants, first_state)
        else:
            first_state = _read(state0, row_B, there_B, column_C, inside_C, DTYPE, WIDTH, KIND0)
            second_state = _read(state1, row_B, there_B, column_C, inside_C, DTYPE, WIDTH, KIND1)
            new = STEP(
                old_BC, grad_BC, mean_B[:, None], rate, SQRT, *constants, first_state, second_state
            )
        tl.debug_barrier()  # all threads must have read what one of them writes now
        _write(held, new[0], row_B, there_B, column_C, inside_C, WIDTH, "element")
        if state0 is not None and (KIND0 == "element" or first + COLUMNS >= WIDTH):
            _write(state0, new[1], row_B, there_B, column_C, inside_C, WIDTH, KIND0)
        if state1 is not None and (KIND1 == "element" or first + COLUMNS >= WIDTH):
            _write(state1, new[2], row_B, there_B, column_C, inside_C, WIDTH, KIND1)
