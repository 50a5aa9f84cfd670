"""Rows and fields of text, found in its bytes by one compiled pass.

    1,"a, b",7      three fields, the second with a comma

A row ends at a line feed, a carriage return, both, or the end of the text; empty lines are no rows.
A field that begins with a quote ends at the next single quote, may hold delimiters and line ends,
and two quotes in it are one; what follows up to the delimiter belongs to it. Elsewhere a quote is a
character like others. Python's `csv` module reads text alike, and `tests/dataset/test_text_rows.py`
compares both.

Letters: C bytes of text, N rows, F fields of a row, K rows with another number of fields.
"""

from typing import Any

import numpy as np

from recapp.dataset.text_signs import LINE_FEED, RETURN, UNCLOSED
from recapp.kernels.numba_cache import compiled

jit = compiled()


@jit
def ends_line(byte: Any) -> Any:
    """Return whether a byte ends a line."""
    return (byte == LINE_FEED) | (byte == RETURN)


@jit
def end_of_quotes(data_C: Any, at: Any, quote: Any) -> Any:
    """Return the place behind the quote that ends a quoted field, from the place behind the quote
    that begins it; the number of bytes + 1 if none ends it.
    """
    size = len(data_C)
    while at < size:
        if data_C[at] == quote:
            if at + 1 < size and data_C[at + 1] == quote:
                at += 1
            else:
                return at + 1
        at += 1
    return size + 1


@jit
def end_of_field(data_C: Any, at: Any, delimiter: Any) -> Any:
    """Return the place of the next delimiter or line end; the number of bytes if there is none.

    Args:
        data_C: The text.
        at: Where to begin.
        delimiter: The bytes of the delimiter; none for text without fields.
    """
    size = len(data_C)
    signs = len(delimiter)
    first = delimiter[0] if signs else np.uint8(LINE_FEED)
    while at < size:
        byte = data_C[at]
        if byte == first or ends_line(byte):
            same = 1
            while same < signs and at + same < size and data_C[at + same] == delimiter[same]:
                same += 1
            if same == signs or ends_line(byte):
                return at
        at += 1
    return size


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
    rows = 0
    odd = 0
    while at < size and rows < len(begin_N) and odd < len(odd_K2):
        begin = at
        fields = 0
        while True:
            closed = at
            if quote >= 0 and at < size and data_C[at] == quote:
                closed = end_of_quotes(data_C, at + 1, quote)
            at = end_of_field(data_C, closed, delimiter)
            if fields < end_NF.shape[1]:
                end_NF[rows, fields] = min(at, size)
            fields += 1
            if at >= size or ends_line(data_C[at]):
                break
            at += len(delimiter)
        returns = at < size and data_C[at] == RETURN
        if not whole and (at >= size or (returns and at + 1 == size)):
            return rows, odd, begin  # the row, or its line end, may go on
        if at > begin:
            if fields == end_NF.shape[1] and closed <= size:
                begin_N[rows] = begin
                rows += 1
            else:
                odd_K2[odd, 0] = begin
                odd_K2[odd, 1] = fields if closed <= size else UNCLOSED
                odd += 1
        at = min(at + 1, size)
        if returns and at < size and data_C[at] == LINE_FEED:
            at += 1
    return rows, odd, at


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
        out_C: The bytes, which are written; at least as many as those of all fields.
    """
    to = 0
    bound_N1[0] = 0
    for n in range(len(begin_N)):
        at = begin_N[n]
        end = end_N[n]
        if quote < 0 or at == end or data_C[at] != quote:
            for c in range(at, end):
                out_C[to + c - at] = data_C[c]
            to += end - at
            bound_N1[n + 1] = to
            continue
        quoted = True
        at += 1
        while at < end:
            if quoted and data_C[at] == quote:
                at += 1  # of two quotes the second is written; one quote ends the quoted part
                if at == end or data_C[at] != quote:
                    quoted = False
                    continue
            out_C[to] = data_C[at]
            to += 1
            at += 1
        bound_N1[n + 1] = to
