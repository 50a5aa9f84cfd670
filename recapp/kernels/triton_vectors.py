"""Sums of vectors as Triton kernels: one source for every type, width and length of bags.

A program is one warp. It takes tiles of bags (or touched rows) x columns, one after the other, and
goes through the entries of a tile's bags together; every bag adds its own entries in their order.
No sum goes over threads and no addition is atomic, so the sum of a bag depends on its entries
alone. A tile waits for its longest bag, and rows of small tables have tens of thousands of entries.
So a bag longer than `BLOCK` is summed in blocks of `BLOCK` entries, counted from its own first
entry; if it has more than `BLOCK` blocks, these are summed in blocks again:

    entries   0         128        256        384      a block that begins in entries
    bags      |a|        b           |  c  |           128 w .. 128 w + 127 has position 2 w + 1
    blocks     [b0       )[b1       )                  if it begins its bag, else 2 w. At most one
                                                       of each kind begins there, so the host makes
                                                       room without knowing any length

`recapp/kernels/sums.py` adds in this order, too. Multiplications and additions are never fused:
with fused ones, two ways to compile one line could give different bits.

Kernels take flat arguments (`triton_launch.py`), group the arrays into records, and read one record
of constants, `Form`; where Triton itself needs a constant, the code gives it a name first. `bags`
is the room for bags; where `count` is an array, it has their number, and no entry, offset or row
beyond it is read or written.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from recapp.kernels.sums import BLOCK
from recapp.kernels.triton_launch import Launch
from recapp.kernels.widths import SQUARE_BLOCK

TILE_ELEMENTS = 512  # elements of a program's tile: 16 in each thread of a warp
TILE_BAGS = 32
TILE_COLUMNS = 128  # whole blocks of squares (`SQUARE_BLOCK`)
AT_ONCE = tl.constexpr(4)  # entries of each bag whose loads do not wait for each other
AT_ONCE_IN_BLOCK = tl.constexpr(8)  # the same of a block, which has a program of its own
LINE = 8  # elements: what divides offsets that fill cache lines; Triton then loads 16 bytes
# Programs that fill a large GPU. With more tiles, a program takes up to four: the start of a
# program costs time, and tiles with long bags spread over programs.
PROGRAMS = 4096
TILES = 4


class DeviceMatrix(NamedTuple):
    """A sparse matrix (`recapp/kernels/links.py`: `Links`) and the vectors that it sums.

    Args:
        memory: The flat buffer of vectors, or the bytes of records.
        numbers: The same memory in the type of the scales and biases; None for floats.
        index: The index of each entry's vector in the source.
        offsets: Where the entries of each bag begin and end; None: one entry per bag.
        weights: The weight of each entry; None: ones.
        sums: The sums of the blocks of long bags; None where no bag can be long.
        sums2: The sums of blocks of these; None where no bag can have so many.
    """

    memory: Any
    numbers: Any
    index: Any
    offsets: Any
    weights: Any
    sums: Any
    sums2: Any


class Form(NamedTuple):
    """The constants that a kernel is compiled for.

    Args:
        DTYPE: The type of the arithmetic.
        WIDTH: The columns of a vector.
        STRIDE: The distance between two indices: elements of the source, or bytes of records.
        BITS: The bits of a packed value; 0 for floats.
        LINE: A divisor of all indices.
        BLOCK: The entries of a block.
        BAGS: The bags of a tile.
        COLUMNS: The columns of a tile.
        FOLDS: The number of halvings that reduce a block of squares in a tile to one column.
    """

    DTYPE: Any
    WIDTH: int
    STRIDE: int
    BITS: int
    LINE: int
    BLOCK: int
    BAGS: int
    COLUMNS: int
    FOLDS: int


def form(width: int, dtype: Any, stride: int = 1, bits: int = 0, line: int = 1) -> Form:
    """Return the constants of the kernels for vectors of a width."""
    columns = min(triton.next_power_of_2(width), TILE_COLUMNS)
    bags = min(TILE_ELEMENTS // columns, TILE_BAGS)
    folds = min(columns, SQUARE_BLOCK).bit_length() - 1
    return Form(dtype, width, stride, bits, line, BLOCK, bags, columns, folds)


def programs(bags: int, F: Form) -> int:
    """Return the number of programs that share the tiles of so many bags."""
    tiles = int(triton.cdiv(bags, F.BAGS))
    return min(tiles, max(PROGRAMS, tiles // TILES))


@triton.jit
def number_of(bags, count):
    """Return the number of bags: the count, or all that there is room for."""
    if count is None:
        return bags
    else:
        return tl.minimum(tl.load(count), bags)


@triton.jit
def _vectors(matrix, at_B, here_B, column_C, inside_C, F: tl.constexpr):
    """Return the vectors at the indices `at` of the source, [BAGS, COLUMNS]: floats, or the values
    of records of `STRIDE` bytes whose last two numbers are scale and bias.
    """
    here_BC = here_B[:, None] & inside_C[None, :]
    first_B = at_B * F.STRIDE
    if matrix.numbers is None:
        return tl.load(
            matrix.memory + first_B[:, None] + column_C[None, :], mask=here_BC, other=0.0
        ).to(F.DTYPE)
    else:
        byte_BC = tl.load(
            matrix.memory + first_B[:, None] + (column_C * F.BITS // 8)[None, :],
            mask=here_BC,
            other=0,
        ).to(tl.int32)
        q_BC = (byte_BC >> (column_C * F.BITS % 8)[None, :]) & ((1 << F.BITS) - 1)
        # a scale or bias has half as many bytes as a value has bits
        next_B = (at_B + 1) * (F.STRIDE // (F.BITS // 2))
        scale_B = tl.load(matrix.numbers + (next_B - 2), mask=here_B, other=0.0).to(F.DTYPE)
        bias_B = tl.load(matrix.numbers + (next_B - 1), mask=here_B, other=0.0).to(F.DTYPE)
        return q_BC.to(F.DTYPE) * scale_B[:, None] + bias_B[:, None]


@triton.jit
def _entries(
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
    LINE: tl.constexpr = F.LINE
    total_BC = tl.zeros([BAGS, COLUMNS], F.DTYPE)
    for first in range(0, tl.max(length_B, 0), AT_ONCE):
        for ahead in tl.static_range(AT_ONCE):
            here_B = first + ahead < length_B
            k_B = begin_B + first + ahead
            at_B = tl.load(matrix.index + k_B, mask=here_B, other=0).to(tl.int64)
            at_B = tl.multiple_of(at_B, LINE)  # Triton forgets what it is told of arguments
            vector_BC = _vectors(matrix, at_B, here_B, column_C, inside_C, F)
            if matrix.weights is not None:
                use_B = tl.load(matrix.weights + k_B, mask=here_B, other=0.0).to(F.DTYPE)
                vector_BC = vector_BC * use_B[:, None]
            total_BC = total_BC + vector_BC
    return total_BC


@triton.jit
def _blocks(
    sums,
    begin_B,
    first_B,
    number_B,
    column_C,
    inside_C,
    F: tl.constexpr,
    SPAN: tl.constexpr,
    BAGS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Return the sum of blocks first .. first + number of each bag, added one after the other:
    [BAGS, COLUMNS]. A block has SPAN entries, and the bag begins at entry `begin`.
    """
    COLUMNS: tl.constexpr = F.COLUMNS
    total_BC = tl.zeros([BAGS, COLUMNS], F.DTYPE)
    for next_block in range(0, tl.max(number_B, 0), AT_ONCE):
        for ahead in tl.static_range(AT_ONCE):
            here_BC = (next_block + ahead < number_B)[:, None] & inside_C[None, :]
            block_B = first_B + next_block + ahead
            place_B = (begin_B // SPAN + block_B) * 2 + (block_B == 0)
            total_BC = total_BC + tl.load(
                sums + (place_B.to(tl.int64) * F.WIDTH)[:, None] + column_C[None, :],
                mask=here_BC,
                other=0.0,
            )
    return total_BC


@triton.jit
def sums_of(matrix, bag_B, there_B, column_C, inside_C, F: tl.constexpr):
    """Return a tile of sums: sums of entries for short bags, sums of blocks for long ones."""
    if matrix.offsets is None:
        return _entries(matrix, bag_B, there_B.to(tl.int32), column_C, inside_C, F, F.BAGS, 1)
    else:
        WIDE: tl.constexpr = F.BLOCK * F.BLOCK
        begin_B = tl.load(matrix.offsets + bag_B, mask=there_B, other=0)
        length_B = tl.load(matrix.offsets + bag_B + 1, mask=there_B, other=0) - begin_B
        short_B = tl.where(length_B > F.BLOCK, 0, length_B)
        total_BC = _entries(matrix, begin_B, short_B, column_C, inside_C, F, F.BAGS, AT_ONCE)
        none_B = tl.zeros_like(begin_B)
        if matrix.sums is not None:
            long_B = (length_B > F.BLOCK) & (length_B <= WIDE)
            number_B = tl.where(long_B, tl.cdiv(length_B, F.BLOCK), 0)
            total_BC = total_BC + _blocks(
                matrix.sums,
                begin_B,
                none_B,
                number_B,
                column_C,
                inside_C,
                F,
                F.BLOCK,
                F.BAGS,
                AT_ONCE,
            )
        if matrix.sums2 is not None:
            number_B = tl.where(length_B > WIDE, tl.cdiv(length_B, WIDE), 0)
            total_BC = total_BC + _blocks(
                matrix.sums2,
                begin_B,
                none_B,
                number_B,
                column_C,
                inside_C,
                F,
                WIDE,
                F.BAGS,
                AT_ONCE,
            )
        return total_BC


@triton.jit
def _bag_of(offsets, entry, bags):
    """Return the last bag that begins at or before an entry; the first if there is none. Each round
    reads 32 offsets at once.
    """
    low = 0
    high = bags
    while high - low > 1:
        step = tl.cdiv(high - low, 32)
        bag_S = low + step * tl.arange(0, 32)
        begin_S = tl.load(offsets + bag_S, mask=bag_S < high, other=0)
        before = tl.sum(((bag_S < high) & (begin_S <= entry)).to(tl.int32), 0)
        low = low + step * tl.maximum(before - 1, 0)
        high = tl.minimum(low + step, high)
    return low


@Launch
@triton.jit(do_not_specialize=["bags"])
def sum_blocks(
    memory,
    numbers,
    index,
    offsets,
    weights,
    sums,
    sums2,
    bags,
    count,
    F: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Write the sums of the blocks of SPAN entries of bags longer than that: of entries, or of the
    blocks of entries.

    Program 2 w + 1 sums the block in window w that begins a long bag, program 2 w the block that
    continues one.
    """
    matrix = DeviceMatrix(memory, numbers, index, offsets, weights, sums, sums2)
    bags = number_of(bags, count)
    position = tl.program_id(0)
    window = (position // 2) * SPAN
    begins = position % 2 == 1
    # an entry that can belong only to the bag whose block this program sums
    look = tl.where(begins, window + SPAN - 1, window - 1)
    bag = _bag_of(offsets, look, bags)
    begin = tl.load(offsets + bag, mask=bags > 0, other=0)
    end = tl.load(offsets + bag + 1, mask=bags > 0, other=0)
    first = begin + tl.cdiv(tl.maximum(window - begin, 0), SPAN) * SPAN
    if (end - begin > SPAN) & (first < end) & (begins == (begin >= window)):
        column_C = tl.program_id(1) * F.COLUMNS + tl.arange(0, F.COLUMNS)
        inside_C = column_C < F.WIDTH
        alone = tl.zeros([1], tl.int32)
        length = tl.minimum(end - first, SPAN)
        if SPAN == F.BLOCK:
            total_BC = _entries(
                matrix,
                first + alone,
                length + alone,
                column_C,
                inside_C,
                F,
                1,
                AT_ONCE_IN_BLOCK,
            )
            target = sums
        else:
            first_block = (first - begin) // F.BLOCK + alone
            number = tl.cdiv(length, F.BLOCK) + alone
            total_BC = _blocks(
                sums,
                begin + alone,
                first_block,
                number,
                column_C,
                inside_C,
                F,
                F.BLOCK,
                1,
                AT_ONCE_IN_BLOCK,
            )
            target = sums2
        tl.store(
            target + position.to(tl.int64) * F.WIDTH + column_C[None, :],
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
    sums,
    sums2,
    bags,
    count,
    target,
    at,
    scale: tl.float64,
    F: tl.constexpr,
    IN_LINES: tl.constexpr,
):
    """Write tiles of sums: target[at[m] : +width] = scale * sum of weights[k] *
    source[index[k] * stride : +width] over the entries k of bag m.

    Where `at` is None, bags stand side by side.
    """
    matrix = DeviceMatrix(memory, numbers, index, offsets, weights, sums, sums2)
    bags = number_of(bags, count)
    column_C = tl.program_id(1) * F.COLUMNS + tl.arange(0, F.COLUMNS)
    inside_C = column_C < F.WIDTH
    for tile in range(tl.program_id(0), tl.cdiv(bags, F.BAGS), tl.num_programs(0)):
        bag_B = tile * F.BAGS + tl.arange(0, F.BAGS)
        there_B = bag_B < bags
        total_BC = sums_of(matrix, bag_B, there_B, column_C, inside_C, F)
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
def row_squares(matrix, bag_B, there_B, F: tl.constexpr):
    """Return the fp64 sum of squares of the summed gradient of each touched row, and the last
    columns of the gradient.

    Blocks of 2^FOLDS columns are added one after the other. Within a block neighbours are added,
    then neighbouring pairs, and so on. A narrow block has the same tree as a wide one that ends in
    zeros, whatever threads hold the tile. (The order of additions in `tl.sum` over more than two
    depends on the layout of the loaded tile.)
    """
    BAGS: tl.constexpr = F.BAGS
    WIDTH: tl.constexpr = F.WIDTH
    COLUMNS: tl.constexpr = F.COLUMNS
    FOLDS: tl.constexpr = F.FOLDS
    total_B = tl.zeros([BAGS], tl.float64)
    for first in tl.static_range(0, WIDTH, COLUMNS):
        column_C = first + tl.arange(0, COLUMNS)
        grad_BC = sums_of(matrix, bag_B, there_B, column_C, column_C < F.WIDTH, F)
        square_BC = grad_BC.to(tl.float64)
        square_BC = square_BC * square_BC
        for fold in tl.static_range(FOLDS):
            square_BC = tl.sum(tl.reshape(square_BC, [BAGS, COLUMNS >> (fold + 1), 2]), 2)
        if COLUMNS >> FOLDS == 2:
            left_B, right_B = tl.split(square_BC)
            total_B = total_B + left_B + right_B
        else:
            total_B = total_B + tl.reshape(square_BC, [BAGS])
    return total_B, grad_BC


@Launch
@triton.jit(do_not_specialize=["bags"])
def square_sums(
    memory, numbers, index, offsets, weights, sums, sums2, bags, count, total, F: tl.constexpr
):
    """Write the fp64 sum of squares of each touched row's gradient.

    The strips of one row exchange these sums.
    """
    matrix = DeviceMatrix(memory, numbers, index, offsets, weights, sums, sums2)
    bags = number_of(bags, count)
    for tile in range(tl.program_id(0), tl.cdiv(bags, F.BAGS), tl.num_programs(0)):
        bag_B = tile * F.BAGS + tl.arange(0, F.BAGS)
        there_B = bag_B < bags
        total_B, _ = row_squares(matrix, bag_B, there_B, F)
        tl.store(total + bag_B, total_B, mask=there_B)
