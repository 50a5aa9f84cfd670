"""A numba type for one row of a table: a vector of `width` numbers in registers, with arithmetic.

`Row(element, width)` lowers to LLVM's `<width x float>`. So the source of a kernel is plain
arithmetic, and a row rule written for torch blocks (`recapp/optim/rules.py`) compiles unchanged.
Any width works: LLVM splits it into machine registers. A number, or a row of one column, becomes a
row of equal numbers where it meets a row.

    zeros(like, width)                an empty accumulator in the type of the number `like`
    load(array, at, like, width)      width elements of a flat array from element `at` on, as a row
    load_packed(.., width, bits)      width unsigned integers of 8 or 4 bits, as a row
    store(array, at, row)             write a row into an array
    stream(array, at, row), fence()   write a row past the caches
    prefetch(array, at, width)        fetch elements into the cache ahead of use; `prefetch_far`
                                      into its second level
    square_total(row)                 fp64 sum of squares, in a fixed order
    get(array, i), put(array, i, x)   one number

No access is bounds-checked and negative indices do not wrap: `array[i]` with a computed signed
index tests the sign each time, which makes the integer kernels half as fast (measured). Arrays are
contiguous. Numpy has no bfloat16 and numba no float16: they are passed as int16 and uint16, and
computed in fp32.

No operation may be reordered or fused: a row cut into strips must get the bits of the whole row,
although each width compiles to other code.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

from recapp.kernels.widths import CACHE_LINE_BYTES, SQUARE_BLOCK

I8 = ir.IntType(8)
I32 = ir.IntType(32)
ALL_LEVELS = 3  # of caches: the locality 3 of LLVM's prefetch
SECOND_LEVEL = 2


class Row(types.Type):  # type: ignore[misc]
    """The numba type of a row: `width` numbers of an element type.

    Args:
        element: The type of a number, float32 or float64.
        width: The number of numbers.
    """

    def __init__(self, element: types.Float, width: int) -> None:
        self.element = element
        self.width = width
        super().__init__(f"Row({element}, {width})")


@register_model(Row)
class RowModel(models.PrimitiveModel):  # type: ignore[misc]
    """The data model of `Row`: an LLVM vector."""

    def __init__(self, dmm: Any, fe_type: Row) -> None:
        super().__init__(
            dmm, fe_type, ir.VectorType(dmm.lookup(fe_type.element).get_value_type(), fe_type.width)
        )


def _address(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [offset])


def _vector_address(
    context: Any, builder: Any, array_type: Any, array: Any, offset: Any, width: int
) -> tuple[Any, int]:
    """Return the address of array[offset] as a pointer to a vector, and its alignment."""
    element = context.get_data_type(array_type.dtype)
    at = _address(context, builder, array_type, array, offset)
    return builder.bitcast(at, ir.VectorType(element, width).as_pointer()), context.get_abi_sizeof(
        element
    )


def _loaded(
    context: Any, builder: Any, array_type: Any, array: Any, offset: Any, width: int
) -> Any:
    """Return `width` elements from array[offset] on, in the type of the array."""
    at, size = _vector_address(context, builder, array_type, array, offset, width)
    raw = builder.load(at)
    raw.align = size
    return raw


def _splat(value: Any, width: int) -> Any:
    return ir.Constant(ir.VectorType(value.type, width), [value.constant] * width)


def _widen(builder: Any, raw: Any, kind: Any, element: Any, width: int) -> Any:
    """Convert loaded elements to the element type of a row."""
    wide = ir.VectorType(element, width)
    if kind == types.int16:  # bfloat16: the upper half of an fp32
        bits = builder.shl(builder.zext(raw, ir.VectorType(I32, width)), _splat(I32(16), width))
        raw = builder.bitcast(bits, ir.VectorType(ir.FloatType(), width))
    elif kind == types.uint16:
        raw = builder.fpext(
            builder.bitcast(raw, ir.VectorType(ir.HalfType(), width)),
            ir.VectorType(ir.FloatType(), width),
        )
    if raw.type == wide:
        return raw
    return (
        builder.fpext(raw, wide)
        if isinstance(element, ir.DoubleType)
        else builder.fptrunc(raw, wide)
    )


def _narrow(builder: Any, value: Any, kind: Any, width: int) -> Any:
    """Convert a row to the type of the target array, rounded to nearest, ties to even."""
    single = ir.VectorType(ir.FloatType(), width)
    if kind in (types.int16, types.uint16) and value.type != single:
        value = builder.fptrunc(value, single)
    if kind == types.uint16:
        return builder.bitcast(
            builder.fptrunc(value, ir.VectorType(ir.HalfType(), width)),
            ir.VectorType(ir.IntType(16), width),
        )
    if kind == types.int16:
        bits = builder.bitcast(value, ir.VectorType(I32, width))
        odd = builder.and_(builder.lshr(bits, _splat(I32(16), width)), _splat(I32(1), width))
        rounded = builder.add(builder.add(bits, _splat(I32(0x7FFF), width)), odd)
        rounded = builder.select(
            builder.fcmp_unordered("uno", value, value), _splat(I32(0x7FC00000), width), rounded
        )
        return builder.trunc(
            builder.lshr(rounded, _splat(I32(16), width)), ir.VectorType(ir.IntType(16), width)
        )
    wide = ir.VectorType(ir.DoubleType() if kind == types.float64 else ir.FloatType(), width)
    if value.type == wide:
        return value
    return builder.fpext(value, wide) if kind == types.float64 else builder.fptrunc(value, wide)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def load(typingctx: Any, array: Any, offset: Any, like: Any, width: Any) -> Any:
    """Return `width` elements from `offset` on, as a row of the type of `like`."""
    row = Row(like, width.literal_value)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0]
        raw = _loaded(context, builder, kind, args[0], args[1], row.width)
        return _widen(builder, raw, kind.dtype, context.get_value_type(row.element), row.width)

    return row(array, types.int64, like, width), codegen


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def load_packed(typingctx: Any, array: Any, offset: Any, like: Any, width: Any, bits: Any) -> Any:
    """Return `width` unsigned integers of 8 or 4 bits from byte `offset` on, as a row of the type
    of `like`.

    Two integers of 4 bits share a byte, the even one in the low half.
    """
    row = Row(like, width.literal_value)
    halves = bits.literal_value == 4
    count = (row.width + 1) // 2 if halves else row.width

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        raw = _loaded(context, builder, signature.args[0], args[0], args[1], count)
        if halves:
            low = builder.and_(raw, _splat(I8(15), count))
            high = builder.lshr(raw, _splat(I8(4), count))
            lanes = [column // 2 + column % 2 * count for column in range(row.width)]
            raw = builder.shuffle_vector(low, high, _mask(lanes))
        element = context.get_value_type(row.element)
        return builder.uitofp(raw, ir.VectorType(element, row.width))

    return row(array, types.int64, like, width, bits), codegen


@intrinsic  # type: ignore[untyped-decorator]
def store(typingctx: Any, array: Any, offset: Any, row: Any) -> Any:
    """Write a row at `offset`, in the array's type."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = signature.args[2].width
        at, size = _vector_address(context, builder, signature.args[0], args[0], args[1], width)
        builder.store(_narrow(builder, args[2], signature.args[0].dtype, width), at).align = size
        return context.get_dummy_value()

    return types.void(array, types.int64, row), codegen


@intrinsic  # type: ignore[untyped-decorator]
def stream(typingctx: Any, array: Any, offset: Any, row: Any) -> Any:
    """Write a row at `offset` past the caches: no cache line is read before it is overwritten.

    The row must fill whole cache lines. Call `fence` after the last row.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = signature.args[2].width
        at, _ = _vector_address(context, builder, signature.args[0], args[0], args[1], width)
        written = builder.store(_narrow(builder, args[2], signature.args[0].dtype, width), at)
        written.align = CACHE_LINE_BYTES
        written.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))
        return context.get_dummy_value()

    return types.void(array, types.int64, row), codegen


@intrinsic  # type: ignore[untyped-decorator]
def fence(typingctx: Any) -> Any:
    """Make streamed rows visible to other threads before any later write."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic  # type: ignore[untyped-decorator]
def get(typingctx: Any, array: Any, i: Any) -> Any:
    """Return array[i], without a bounds check and without wrapping a negative index."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_address(context, builder, signature.args[0], args[0], args[1]))

    return array.dtype(array, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def put(typingctx: Any, array: Any, i: Any, value: Any) -> Any:
    """Set array[i] to a value, without a bounds check and without wrapping a negative index."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _address(context, builder, signature.args[0], args[0], args[1]))
        return context.get_dummy_value()

    return types.void(array, types.int64, array.dtype), codegen


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def prefetch(typingctx: Any, array: Any, offset: Any, width: Any) -> Any:
    """Fetch `width` elements from `offset` on into the caches; numba has no prefetch."""
    return types.void(array, types.int64, width), _prefetching(array, width, ALL_LEVELS)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def prefetch_far(typingctx: Any, array: Any, offset: Any, width: Any) -> Any:
    """Fetch `width` elements from `offset` on into the second level of the caches.

    The second level has more outstanding reads than the first: random reads of memory are twice as
    fast (measured on Zen 4). `prefetch` then fetches the lines into the first level, shortly before
    their use.
    """
    return types.void(array, types.int64, width), _prefetching(array, width, SECOND_LEVEL)


def _prefetching(array: Any, width: Any, level: int) -> Callable[..., Any]:
    """Return the code that prefetches a line at every `CACHE_LINE_BYTES` from the first element on,
    and the line of the last byte: elements that do not start at the start of a line reach into one
    line more.
    """
    size = width.literal_value * array.dtype.bitwidth // 8
    places = [*range(0, size, CACHE_LINE_BYTES)]
    aligned = math.gcd(size, CACHE_LINE_BYTES)
    if CACHE_LINE_BYTES - aligned + size > CACHE_LINE_BYTES * len(places):
        places.append(size - 1)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = builder.bitcast(
            _address(context, builder, signature.args[0], args[0], args[1]), cgutils.voidptr_t
        )
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, I32, I32, I32])
        ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        for place in places:
            at = builder.gep(first, [ir.Constant(ir.IntType(64), place)])
            builder.call(ask, [at, I32(0), I32(level), I32(1)])  # to read, data
        return context.get_dummy_value()

    return codegen


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def zeros(typingctx: Any, like: Any, width: Any) -> Any:
    """Return a row of zeros of the type of `like`."""
    row = Row(like, width.literal_value)
    return row(like, width), lambda context, builder, signature, args: ir.Constant(
        context.get_value_type(row), None
    )


@intrinsic  # type: ignore[untyped-decorator]
def square_total(typingctx: Any, row: Any) -> Any:
    """Return the fp64 sum of squares of a row, added in a fixed order.

    Squares are added in a tree within blocks of `SQUARE_BLOCK` columns, then block by block. So a
    table that is cut into strips of this width gets the bits of an uncut one, if the sums of the
    strips are added in column order.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = signature.args[0].width
        total = ir.Constant(ir.DoubleType(), 0.0)
        for first in range(0, width, SQUARE_BLOCK):
            total = builder.fadd(
                total,
                _block_square(builder, args[0], range(first, min(first + SQUARE_BLOCK, width))),
            )
        return total

    return types.float64(row), codegen


def _block_square(builder: Any, row: Any, columns: range) -> Any:
    part = _shuffle(builder, row, columns)
    if not isinstance(part.type.element, ir.DoubleType):
        part = builder.fpext(part, ir.VectorType(ir.DoubleType(), len(columns)))
    part = builder.fmul(part, part)
    count = len(columns)
    size = 1 << (count - 1).bit_length()
    if size > count:  # zeros change no sum
        zero = ir.Constant(part.type, None)
        part = builder.shuffle_vector(part, zero, _mask([*range(count), *[count] * (size - count)]))
    while size > 1:
        size //= 2
        part = builder.fadd(
            _shuffle(builder, part, range(size)), _shuffle(builder, part, range(size, 2 * size))
        )
    return builder.extract_element(part, I32(0))


def _mask(lanes: Any) -> Any:
    lanes = list(lanes)
    return ir.Constant(ir.VectorType(I32, len(lanes)), [ir.Constant(I32, i) for i in lanes])


def _shuffle(builder: Any, vector: Any, lanes: range) -> Any:
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), _mask(lanes))


def _spread(context: Any, builder: Any, value: Any, kind: Any, row: Row) -> Any:
    """Return a number, or a row of one column, as a row of equal numbers."""
    if kind == row:
        return value
    if not isinstance(kind, Row):
        value = context.cast(builder, value, kind, row.element)
        one = ir.Constant(ir.VectorType(value.type, 1), ir.Undefined)
        value = builder.insert_element(one, value, I32(0))
    lanes = ir.Constant(ir.VectorType(I32, row.width), None)
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), lanes)


def _define(op: Callable[..., Any], instruction: str) -> None:
    @intrinsic  # type: ignore[untyped-decorator]
    def binary(typingctx: Any, a: Any, b: Any) -> Any:
        row = max((x for x in (a, b) if isinstance(x, Row)), key=lambda x: x.width)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            left, right = (
                _spread(context, builder, x, t, row)
                for x, t in zip(args, signature.args, strict=True)
            )
            return getattr(builder, instruction)(left, right)

        return row(a, b), codegen

    @overload(op, inline="always")
    # numba compares its signature with the lambda's, annotations included
    def arithmetic(a, b):  # type: ignore[no-untyped-def]
        if isinstance(a, Row) or isinstance(b, Row):
            return lambda a, b: binary(a, b)
        return None


for _op, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _define(_op, _instruction)


@intrinsic  # type: ignore[untyped-decorator]
def _root(typingctx: Any, row: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name = f"llvm.sqrt.v{row.width}f{row.element.bitwidth}"
        return builder.call(
            cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(args[0].type, [args[0].type]), name
            ),
            args,
        )

    return row(row), codegen


def sqrt(x: Any) -> Any:
    """Return the square root of a number, or of each number of a row.

    In compiled kernels this function is the `sqrt` of row rules.
    """
    return np.sqrt(x)


@overload(sqrt, inline="always")
def _sqrt(x):  # type: ignore[no-untyped-def]
    return (lambda x: _root(x)) if isinstance(x, Row) else (lambda x: np.sqrt(x))
