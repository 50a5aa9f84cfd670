"""Rows and fields of text, found in its bytes by one compiled pass.

    1,"a, b",7      three fields, the second with a comma

A row ends at a line feed, a carriage return, both, or the end of the text; empty lines are no rows.
A field that begins with a quote ends at the next single quote, may hold delimiters and line ends,
and two quotes in it are one; what follows up to the delimiter belongs to it. Elsewhere a quote is a
character like others. Python's `csv` module reads text alike, and `tests/dataset/test_text_rows.py`
compares both.

The bytes are looked at 64 at once: one instruction compares them with a sign, and only those that
may end a field or a line, or quote, are looked at singly. So bytes behind a text are read, too
(`readable`).

Letters: C bytes of text, N rows, F fields of a row, K rows with another number of fields.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from recapp.dataset.text_signs import LINE_FEED, RETURN, UNCLOSED
from recapp.kernels.numba_cache import compiled

jit = compiled()
inline = compiled(forceinline=True)
AT_ONCE = 64
WORD = 8
ONE = np.uint64(1)
LINE = np.uint8(LINE_FEED)


def readable(text: bytes) -> Any:
    """Return bytes as an array, behind which as many can be read as the loops look at."""
    return np.frombuffer(bytearray(text + bytes(AT_ONCE)), np.uint8)[: len(text)]


def _address(context: Any, builder: Any, kind: Any, place: Any, width: int) -> Any:
    array, at = place
    place = builder.gep(context.make_array(kind)(context, builder, array).data, [at])
    return builder.bitcast(place, ir.VectorType(ir.IntType(8), width).as_pointer())


@intrinsic  # type: ignore[untyped-decorator]
def equal(typing: Any, data_C: Any, at: Any, byte: Any) -> Any:
    """Return a number of 64 bits: which of the 64 bytes from a place on are equal to a byte."""

    def lower(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        bytes = builder.load(_address(context, builder, data_C, values[:2], AT_ONCE), align=1)
        same = builder.insert_element(ir.Constant(bytes.type, None), values[2], ir.IntType(32)(0))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), AT_ONCE), None)
        same = builder.shuffle_vector(same, same, lanes)
        return builder.bitcast(builder.icmp_unsigned("==", bytes, same), ir.IntType(64))

    return types.uint64(data_C, types.int64, types.uint8), lower


@intrinsic  # type: ignore[untyped-decorator]
def lowest(typing: Any, bits: Any) -> Any:
    """Return the place of the lowest bit that is set."""

    def lower(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.cttz(values[0], ir.IntType(1)(1))

    return types.int64(types.uint64), lower


@intrinsic  # type: ignore[untyped-decorator]
def copy_word(typing: Any, data_C: Any, at: Any, out_C: Any, to: Any) -> Any:
    """Copy eight bytes."""

    def lower(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        word = builder.load(_address(context, builder, data_C, values[:2], WORD), align=1)
        builder.store(word, _address(context, builder, out_C, values[2:], WORD), align=1)
        return context.get_dummy_value()

    return types.void(data_C, types.int64, out_C, types.int64), lower


@inline
def ends_line(byte: Any) -> Any:
    """Return whether a byte ends a line."""
    return (byte == LINE_FEED) | (byte == RETURN)


@inline
def stands_at(data_C: Any, at: Any, text: Any) -> Any:
    """Return whether a text, whose first byte does, stands at a place."""
    same = 1
    while same < len(text) and at + same < len(data_C) and data_C[at + same] == text[same]:
        same += 1
    return same == len(text)


@inline
def next_quote(data_C: Any, at: Any, quote: Any) -> Any:
    """Return the place of the next quote; the number of bytes if there is none."""
    size = len(data_C)
    while at < size:
        found = equal(data_C, at, np.uint8(quote))
        if found:
            return min(at + lowest(found), size)
        at += AT_ONCE
    return size


@inline
def signs(data_C: Any, at: Any, whole: Any, first: Any, quote: Any) -> Any:
    """Return a number of 64 bits: which of the next bytes may end a field or quote it.

    Args:
        data_C: The text.
        at: The place of the first byte.
        whole: Whether the text ends where its bytes end, which then ends a field, too.
        first: The first byte of the delimiter.
        quote: The byte that quotes fields.
    """
    ends = equal(data_C, at, LINE) | equal(data_C, at, np.uint8(RETURN))
    found = ends | equal(data_C, at, first) | equal(data_C, at, quote)
    left = len(data_C) - at
    if left >= AT_ONCE:
        return found
    end = ONE << np.uint64(left)
    return found & (end - ONE) | (end if whole else np.uint64(0))


@inline
def next_line(data_C: Any, place: Any) -> Any:
    """Return the place behind a line end."""
    next = min(place + 1, len(data_C))
    two = next < len(data_C) and data_C[place] == RETURN and data_C[next] == LINE_FEED
    return next + two


@inline
def add_row(
    begin: Any, place: Any, fields: Any, rows: Any, odd: Any, begin_N: Any, odd_K2: Any
) -> Any:
    """Write where a row begins, unless it is empty, and the number of fields of an odd one, which
    is 0 for others; return the numbers of rows and of odd rows.
    """
    if begin == place:
        return rows, odd
    if fields == 0:
        begin_N[rows] = begin
        return rows + 1, odd
    odd_K2[odd, 0] = begin
    odd_K2[odd, 1] = fields
    return rows, odd + 1


@jit
def split_rows(
    data_C: Any,
    at: Any,
    whole: Any,
    delimiter: Any,
    quote: Any,
    begin_N: Any,
    end_NF: Any,
    odd_K2: Any,
) -> Any:
    """Find rows of a text, up to the end of the text or of an array.

    Args:
        data_C: The text.
        at: Where the first row begins.
        whole: Whether the text ends here; else its last row may go on.
        delimiter: The bytes between two fields; none if a row is one field.
        quote: The byte that quotes fields, or `NO_QUOTE`.
        begin_N: The beginnings of rows, which are written.
        end_NF: The ends of their fields, which are written.
        odd_K2: The beginnings of rows with another number of fields, and that number, which are
            written.

    Returns:
        The number of rows, the number of odd rows, and where the next row begins.
    """
    size = len(data_C)
    first = delimiter[0] if len(delimiter) else LINE
    sign = np.uint8(quote) if quote >= 0 else LINE
    begin = field = at  # the next field, or what follows a quote
    rows = odd = fields = quoted = 0
    while at <= size:
        found = signs(data_C, at, whole, first, sign)
        at += AT_ONCE
        while found:
            place = at - AT_ONCE + lowest(found)
            found &= found - ONE
            if place < field:
                continue
            byte = data_C[place] if place < size else LINE
            delimits = not quoted and byte == first and stands_at(data_C, place, delimiter)
            if not delimits:  # most are delimiters, which are asked for first
                if byte == sign and quote >= 0 and (quoted or place == field):
                    quoted = 1 - quoted  # two quotes end and begin
                    field = place + 1
                    continue
                if quoted or not ends_line(byte):
                    continue
            if fields < end_NF.shape[1]:
                end_NF[rows, fields] = place
            fields += 1
            field = place + len(delimiter)
            if delimits:
                continue
            if byte == RETURN and not whole and place + 1 == size:
                return rows, odd, begin  # its line end may go on
            fields *= fields != end_NF.shape[1]
            rows, odd = add_row(begin, place, fields, rows, odd, begin_N, odd_K2)
            begin = field = next_line(data_C, place)
            fields = 0
            if rows == len(begin_N) or odd == len(odd_K2):
                return rows, odd, begin
    if whole and begin < size:
        rows, odd = add_row(begin, size, UNCLOSED, rows, odd, begin_N, odd_K2)
        begin = size
    return rows, odd, begin


@inline
def copied(data_C: Any, at: Any, end: Any, out_C: Any, to: Any) -> Any:
    """Copy bytes at .. end, and up to `WORD` bytes behind, over which the next ones are written;
    return the place behind the last one.
    """
    behind = to + end - at
    while True:  # of no text, too: most have one word, and no branch finds that out
        copy_word(data_C, at, out_C, to)
        at += WORD
        to += WORD
        if at >= end:
            return behind


@jit
def write_column(
    data_C: Any, begin_N: Any, end_N: Any, quote: Any, bound_N1: Any, out_C: Any
) -> None:
    """Write the text of a column: the bytes of all values, and the bounds between values.

    Args:
        data_C: The text.
        begin_N: Where the fields of the column begin.
        end_N: Where they end.
        quote: The byte that quotes fields, or `NO_QUOTE`.
        bound_N1: The bounds, which are written.
        out_C: The bytes, which are written; at least `WORD` more than those of all fields.
    """
    to = 0
    bound_N1[0] = 0
    for n in range(len(begin_N)):
        at = begin_N[n]
        end = end_N[n]
        quoted = (at < end) & (data_C[at] == quote)
        at += quoted
        while True:
            next = min(next_quote(data_C, at, quote), end) if quoted else end
            to = copied(data_C, at, next, out_C, to)
            at = next + 1
            if at >= end:
                break
            quoted = data_C[at] == quote  # of two, the second is written; one ends the quoted part
            out_C[to] = np.uint8(quote)
            to += quoted
            at += quoted
        bound_N1[n + 1] = to
