"""The arithmetic half of the GPU backend as Triton kernels: one source for every type, width and
rule.

A program has a tile of bags (or touched rows) x columns and goes through the entries of its bags
together; every bag adds its own entries, one after the other. No sum goes over threads and no
addition is atomic, so the sum of a bag depends on its entries alone. A tile waits for its longest
bag, and rows of small tables have tens of thousands of entries. So a bag longer than `RUN` is
summed in runs of `RUN` entries, counted from its own first entry, and then run by run:

    entries   0         256        512        768      a run that begins in entries
    bags      |a|        b           |  c  |           256 w .. 256 w + 255 has position 2 w + 1
    runs        [b0       )[b1       )                 if it begins its bag, else 2 w. At most one
                                                       run of each kind begins there, so the host
                                                       makes room without knowing any length

Multiplications and additions are never fused: with fused ones, two ways to compile one line could
give different bits.

Kernels take flat arguments (`triton_launch.py`), group the arrays into records, and read one record
of constants, `Form`; where Triton itself needs a constant, the code gives it a name first. A rule's
expression is a separate argument, because its source is part of the key under which Triton keeps a
kernel.
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

from recapp.kernels.links import SQUARE_BLOCK
from recapp.kernels.triton_launch import Launch

RUN = 256  # entries; shorter runs need more partial sums, longer ones more additions in sequence
TILE_ELEMENTS = 1024  # elements of a program's tile: 8 in each thread of 4 warps
TILE_BAGS = 64
TILE_COLUMNS = 128  # whole blocks of squares (`SQUARE_BLOCK`)
STEP_ARGUMENTS = ("w", "g", "mean_square", "lr", "sqrt")  # of a rule, before its constants
AT_ONCE = 4  # entries whose loads do not wait for each other


class VectorSource(NamedTuple):
    """Vectors as kernels read them.

    Args:
        memory: The flat buffer, or the bytes of records.
        numbers: The same memory in the type of the scales and biases; None for floats.
    """

    memory: Any
    numbers: Any


class DeviceMatrix(NamedTuple):
    """A sparse matrix (`recapp/kernels/links.py`: `Links`).

    Args:
        index: The index of each entry's vector in the source.
        offsets: Where the entries of each bag begin and end; None: one entry per bag.
        weights: The weight of each entry; None: ones.
        partial: The sums of the runs of long bags; None where no bag can be long.
    """

    index: Any
    offsets: Any
    weights: Any
    partial: Any


class DeviceRows(NamedTuple):
    """The rows of a store that a batch updates.

    Args:
        row: The rows.
        mean: The mean square of each row; None where rows are whole.
        weights: The weights of the store.
        state0: The first state tensor of the rule; None where it has none.
        state1: The second state tensor.
    """

    row: Any
    mean: Any
    weights: Any
    state0: Any
    state1: Any


class Form(NamedTuple):
    """The constants that a kernel is compiled for.

    Args:
        DTYPE: The type of the arithmetic.
        WIDTH: The columns of a vector.
        STRIDE: The distance between two indices: elements of the source, or bytes of records.
        BITS: The bits of a packed value; 0 for floats.
        RUN: The entries of a run.
        BAGS: The bags of a tile.
        COLUMNS: The columns of a tile.
        FOLDS: The number of halvings that reduce a block of squares in a tile to one column.
        AT_ONCE: The entries whose loads do not wait for each other.
    """

    DTYPE: Any
    WIDTH: int
    STRIDE: int
    BITS: int
    RUN: int
    BAGS: int
    COLUMNS: int
    FOLDS: int
    AT_ONCE: int


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


def form(width: int, dtype: Any, stride: int = 1, bits: int = 0) -> Form:
    """Return the constants of the kernels for vectors of a width."""
    bags, columns = tile(width)
    folds = min(columns, SQUARE_BLOCK).bit_length() - 1
    return Form(dtype, width, stride, bits, RUN, bags, columns, folds, AT_ONCE)


def tile(width: int) -> tuple[int, int]:
    """Return the bags and the columns of a program's tile for vectors of a width."""
    columns = min(triton.next_power_of_2(width), TILE_COLUMNS)
    return min(TILE_ELEMENTS // columns, TILE_BAGS), columns


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
def _vectors(source, at_B, here_B, column_C, inside_C, F: tl.constexpr):
    """Return the vectors at the indices `at` of the source, [BAGS, COLUMNS]: floats, or the values
    of records of `STRIDE` bytes whose last two numbers are scale and bias.
    """
    here_BC = here_B[:, None] & inside_C[None, :]
    first_B = at_B * F.STRIDE
    if source.numbers is None:
        return tl.load(
            source.memory + first_B[:, None] + column_C[None, :], mask=here_BC, other=0.0
        ).to(F.DTYPE)
    else:
        byte_BC = tl.load(
            source.memory + first_B[:, None] + (column_C * F.BITS // 8)[None, :],
            mask=here_BC,
            other=0,
        ).to(tl.int32)
        q_BC = (byte_BC >> (column_C * F.BITS % 8)[None, :]) & ((1 << F.BITS) - 1)
        # a scale or bias has half as many bytes as a value has bits
        next_B = (at_B + 1) * (F.STRIDE // (F.BITS // 2))
        scale_B = tl.load(source.numbers + (next_B - 2), mask=here_B, other=0.0).to(F.DTYPE)
        bias_B = tl.load(source.numbers + (next_B - 1), mask=here_B, other=0.0).to(F.DTYPE)
        return q_BC.to(F.DTYPE) * scale_B[:, None] + bias_B[:, None]


@triton.jit
def _entries(
    source,
    matrix,
    begin_B,
    length_B,
    column_C,
    inside_C,
    F: tl.constexpr,
    BAGS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Return the sum of entries begin .. begin + length of each bag, added one after the other:
    [BAGS, COLUMNS].
    """
    COLUMNS: tl.constexpr = F.COLUMNS
    total_BC = tl.zeros([BAGS, COLUMNS], F.DTYPE)
    for first in range(0, tl.max(length_B, 0), AT_ONCE):
        for ahead in tl.static_range(AT_ONCE):
            here_B = first + ahead < length_B
            k_B = begin_B + first + ahead
            at_B = tl.load(matrix.index + k_B, mask=here_B, other=0).to(tl.int64)
            vector_BC = _vectors(source, at_B, here_B, column_C, inside_C, F)
            if matrix.weights is not None:
                use_B = tl.load(matrix.weights + k_B, mask=here_B, other=0.0).to(F.DTYPE)
                vector_BC = vector_BC * use_B[:, None]
            total_BC = total_BC + vector_BC
    return total_BC


@triton.jit
def _sums(source, matrix, bag_B, there_B, column_C, inside_C, F: tl.constexpr):
    """Return a tile of sums: sums of entries for short bags, sums of runs for long ones."""
    if matrix.offsets is None:
        return _entries(
            source, matrix, bag_B, there_B.to(tl.int32), column_C, inside_C, F, F.BAGS, 1
        )
    else:
        begin_B = tl.load(matrix.offsets + bag_B, mask=there_B, other=0)
        length_B = tl.load(matrix.offsets + bag_B + 1, mask=there_B, other=0) - begin_B
        long_B = length_B > F.RUN
        short_B = tl.where(long_B, 0, length_B)
        total_BC = _entries(
            source, matrix, begin_B, short_B, column_C, inside_C, F, F.BAGS, F.AT_ONCE
        )
        if matrix.partial is not None:
            runs_B = tl.where(long_B, tl.cdiv(length_B, F.RUN), 0)
            for run in range(tl.max(runs_B, 0)):
                offset_B = ((begin_B // F.RUN + run) * 2 + (run == 0)).to(tl.int64) * F.WIDTH
                here_BC = (run < runs_B)[:, None] & inside_C[None, :]
                total_BC = total_BC + tl.load(
                    matrix.partial + offset_B[:, None] + column_C[None, :],
                    mask=here_BC,
                    other=0.0,
                )
        return total_BC


@Launch
@triton.jit(do_not_specialize=["bags"])
def sum_runs(memory, numbers, index, offsets, weights, partial, bags, F: tl.constexpr):
    """Write the partial sums of bags longer than `RUN`.

    Program 2 w + 1 sums the run in window w that begins a long bag, program 2 w the run that
    continues one.
    """
    source = VectorSource(memory, numbers)
    matrix = DeviceMatrix(index, offsets, weights, partial)
    position = tl.program_id(0)
    window = (position // 2) * F.RUN
    begins = position % 2 == 1
    # an entry that can belong only to the bag whose run this program sums
    look = tl.where(begins, window + F.RUN - 1, window - 1)
    low = 0
    high = bags
    while high - low > 1:
        middle = (low + high) // 2
        left = tl.load(matrix.offsets + middle) <= look
        low = tl.where(left, middle, low)
        high = tl.where(left, high, middle)
    begin = tl.load(matrix.offsets + low)
    end = tl.load(matrix.offsets + low + 1)
    first = begin + tl.cdiv(tl.maximum(window - begin, 0), F.RUN) * F.RUN
    if (end - begin > F.RUN) & (first < end) & (begins == (begin >= window)):
        column_C = tl.program_id(1) * F.COLUMNS + tl.arange(0, F.COLUMNS)
        inside_C = column_C < F.WIDTH
        alone = tl.zeros([1], tl.int32)
        length = tl.minimum(end - first, F.RUN) + alone
        total_BC = _entries(
            source, matrix, first + alone, length, column_C, inside_C, F, 1, F.AT_ONCE
        )
        tl.store(
            matrix.partial + position.to(tl.int64) * F.WIDTH + column_C[None, :],
            total_BC,
            mask=inside_C[None, :],
        )


@Launch
@triton.jit(do_not_specialize=["bags"])
def pool(
    memory,
    numbers,
    index,
    offsets,
    weights,
    partial,
    target,
    at,
    bags,
    scale: tl.float64,
    F: tl.constexpr,
    IN_LINES: tl.constexpr,
):
    """Write a tile of sums: target[at[m] : +width] = scale * sum of weights[k] *
    source[index[k] * stride : +width] over the entries k of bag m.

    Where `at` is None, bags stand side by side.
    """
    bag_B = tl.program_id(0) * F.BAGS + tl.arange(0, F.BAGS)
    column_C = tl.program_id(1) * F.COLUMNS + tl.arange(0, F.COLUMNS)
    there_B = bag_B < bags
    inside_C = column_C < F.WIDTH
    source = VectorSource(memory, numbers)
    matrix = DeviceMatrix(index, offsets, weights, partial)
    total_BC = _sums(source, matrix, bag_B, there_B, column_C, inside_C, F)
    if at is None:
        offset_B = bag_B.to(tl.int64) * F.WIDTH
    else:
        offset_B = tl.load(at + bag_B, mask=there_B, other=0).to(tl.int64)
        if IN_LINES:
            # tells Triton of at least 8 aligned elements: it then stores 16 bytes at a time
            offset_B = tl.multiple_of(offset_B, 8)
    total_BC = total_BC * tl.full([1, 1], scale, F.DTYPE)
    tl.store(
        target + offset_B[:, None] + column_C[None, :],
        total_BC,
        mask=there_B[:, None] & inside_C[None, :],
    )


@triton.jit
def _row_squares(source, matrix, bag_B, there_B, F: tl.constexpr):
    """Return the fp64 sum of squares of the summed gradient of each touched row, and the last
    columns of the gradient.

    Blocks of 2^FOLDS columns are added one after the other. Within a block neighbours are added,
    then neighbouring pairs, and so on. A narrow block has the same tree as a wide one that ends in
    zeros, whatever threads hold the tile. (The order of additions in `tl.sum` depends on the layout
    of the loaded tile.)
    """
    BAGS: tl.constexpr = F.BAGS
    WIDTH: tl.constexpr = F.WIDTH
    COLUMNS: tl.constexpr = F.COLUMNS
    FOLDS: tl.constexpr = F.FOLDS
    total_B = tl.zeros([BAGS], tl.float64)
    for first in tl.static_range(0, WIDTH, COLUMNS):
        column_C = first + tl.arange(0, COLUMNS)
        grad_BC = _sums(source, matrix, bag_B, there_B, column_C, column_C < F.WIDTH, F)
        square_BC = grad_BC.to(tl.float64)
        square_BC = square_BC * square_BC
        for fold in tl.static_range(FOLDS):
            left_BC, right_BC = tl.split(tl.reshape(square_BC, [BAGS, COLUMNS >> (fold + 1), 2]))
            square_BC = left_BC + right_BC
        if COLUMNS >> FOLDS == 2:
            left_B, right_B = tl.split(square_BC)
            total_B = total_B + left_B + right_B
        else:
            total_B = total_B + tl.reshape(square_BC, [BAGS])
    return total_B, grad_BC


@Launch
@triton.jit(do_not_specialize=["bags"])
def square_sums(memory, numbers, index, offsets, weights, partial, total, bags, F: tl.constexpr):
    """Write the fp64 sum of squares of each touched row's gradient.

    The strips of one row exchange these sums.
    """
    bag_B = tl.program_id(0) * F.BAGS + tl.arange(0, F.BAGS)
    there_B = bag_B < bags
    source = VectorSource(memory, numbers)
    matrix = DeviceMatrix(index, offsets, weights, partial)
    total_B, _ = _row_squares(source, matrix, bag_B, there_B, F)
    tl.store(total + bag_B, total_B, mask=there_B)


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


@Launch
@triton.jit(do_not_specialize=["bags"])
def update(
    memory,
    numbers,
    index,
    offsets,
    uses,
    partial,
    row,
    mean,
    weights,
    state0,
    state1,
    bags,
    lr: tl.float64,
    lr1: tl.float64,
    lr2: tl.float64,
    decay: tl.float64,
    STEP: tl.constexpr,
    SQRT: tl.constexpr,
    R: tl.constexpr,
    F: tl.constexpr,
):
    """Sum the gradients of each touched row and apply a rule to its weights and state, in one pass
    over memory.

    A row wider than a tile is summed a second time if the rule needs the mean square of the whole
    row first. The rule gets the first RATES of lr, lr1 and lr2, as a tuple if there are several. If
    DECAYS, weights lose the part `decay` before the rule is applied.
    """
    source = VectorSource(memory, numbers)
    matrix = DeviceMatrix(index, offsets, uses, partial)
    t = DeviceRows(row, mean, weights, state0, state1)
    bag_B = tl.program_id(0) * F.BAGS + tl.arange(0, F.BAGS)
    there_B = bag_B < bags
    if R.RATES == 1:
        rate = tl.full([1, 1], lr, F.DTYPE)
    elif R.RATES == 2:
        rate = (tl.full([1, 1], lr, F.DTYPE), tl.full([1, 1], lr1, F.DTYPE))
    else:
        rate = (
            tl.full([1, 1], lr, F.DTYPE),
            tl.full([1, 1], lr1, F.DTYPE),
            tl.full([1, 1], lr2, F.DTYPE),
        )
    row_B = tl.load(t.row + bag_B, mask=there_B, other=0).to(tl.int64)
    mean_B = tl.zeros_like(bag_B).to(F.DTYPE)
    if t.mean is not None:
        mean_B = tl.load(t.mean + bag_B, mask=there_B, other=0.0)
    elif R.NEEDS_ROW:
        total_B, grad_BC = _row_squares(source, matrix, bag_B, there_B, F)
        mean_B = (total_B / F.WIDTH).to(F.DTYPE)
    WIDTH: tl.constexpr = F.WIDTH
    COLUMNS: tl.constexpr = F.COLUMNS
    for first in tl.static_range(0, WIDTH, COLUMNS):
        column_C = first + tl.arange(0, COLUMNS)
        if F.WIDTH > F.COLUMNS or t.mean is not None or not R.NEEDS_ROW:
            grad_BC = _sums(source, matrix, bag_B, there_B, column_C, column_C < F.WIDTH, F)
        old_BC = read_rows(t.weights, row_B, there_B, column_C, F, False)
        if R.DECAYS:
            old_BC = old_BC - tl.full([1, 1], decay, F.DTYPE) * old_BC
        if t.state0 is None:
            new = STEP(old_BC, grad_BC, mean_B[:, None], rate, SQRT)
        elif t.state1 is None:
            first_state = read_rows(t.state0, row_B, there_B, column_C, F, R.ROW0)
            new = STEP(old_BC, grad_BC, mean_B[:, None], rate, SQRT, first_state)
        else:
            first_state = read_rows(t.state0, row_B, there_B, column_C, F, R.ROW0)
            second_state = read_rows(t.state1, row_B, there_B, column_C, F, R.ROW1)
            new = STEP(old_BC, grad_BC, mean_B[:, None], rate, SQRT, first_state, second_state)
        tl.debug_barrier()  # all threads must have read the values that one of them overwrites now
        write_rows(t.weights, new[0], row_B, there_B, column_C, F, False)
        if t.state0 is not None and (not R.ROW0 or first + F.COLUMNS >= F.WIDTH):
            write_rows(t.state0, new[1], row_B, there_B, column_C, F, R.ROW0)
        if t.state1 is not None and (not R.ROW1 or first + F.COLUMNS >= F.WIDTH):
            write_rows(t.state1, new[2], row_B, there_B, column_C, F, R.ROW1)


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
    t = DeviceRows(row, None, weights, state0, state1)
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
        w_BC = read_rows(t.weights, row_B, there_B, column_C, F, False)
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
                new = STEP(w_BC, zero_BC, zero_B1, rate, SQRT)
            elif t.state1 is None:
                new = STEP(w_BC, zero_BC, zero_B1, rate, SQRT, first_BC)
                first_BC = tl.where(takes_B1, new[1], first_BC)
            else:
                new = STEP(w_BC, zero_BC, zero_B1, rate, SQRT, first_BC, second_BC)
                first_BC = tl.where(takes_B1, new[1], first_BC)
                second_BC = tl.where(takes_B1, new[2], second_BC)
            w_BC = tl.where(takes_B1, new[0], w_BC)
        write_rows(t.weights, w_BC, row_B, there_B, column_C, F, False)
        if t.state0 is not None:
            write_rows(t.state0, first_BC, row_B, there_B, column_C, F, False)
        if t.state1 is not None:
            write_rows(t.state1, second_BC, row_B, there_B, column_C, F, False)
    tl.debug_barrier()  # all threads must have read the steps that one of them overwrites now
    tl.store(steps + row_B, tl.zeros_like(begin_B) + now, mask=there_B)
