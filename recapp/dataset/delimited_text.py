"""Read text with a delimiter between columns: CSV, TSV and the like, plain or compressed.

All columns of such text are text, from which recapp reads ids, numbers and labels. Types that
others infer would change ids: "007" becomes 7, and hexadecimal words that have only decimal digits
become other numbers.

The first line determines the delimiter and the header, unless `dataset.text` does. A header has no
repeated name (unless numbers stand below), no empty name (except the first, for an index from
pandas) and no numbers, except the 0, 1, 2, .. of columns without names in pandas. Where the
settings name the columns, a first line of just these names is a header. Columns without names are
f0, f1, ..
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from typing_extensions import override

from recapp.dataset.decode import BadValue
from recapp.dataset.file_bytes import is_prose
from recapp.dataset.text_rows import Head, Layout, Rows, Text, TextFile, text_loops
from recapp.dataset.text_signs import NO_QUOTE, UNCLOSED

_NEVER_ENDS = (
    "begins a quote that never ends; where quotes are only characters set dataset.text.quote=none"
)
_DELIMITERS = ("::", ",", ";", "|", "\x01")


@dataclass(frozen=True)
class DelimitedText(Text):
    """Read text with a delimiter.

    Args:
        delimiter: What stands between columns; None finds it out.
        header: Whether the first line has the names of the columns; None finds it out.
        columns: The names of the columns; none where a header or nothing names them.
        quote: The character that quotes values; empty if none does.
    """

    name: str = "CSV"
    suffixes: tuple[str, ...] = (".csv", ".tsv")
    delimiter: str | None = None
    header: bool | None = None
    columns: tuple[str, ...] = ()
    quote: str = '"'

    def knows(self, begin: bytes) -> bool:
        """Return whether a file begins with lines of text, the first two with equally many
        delimiters. Those of a page of prose have not.
        """
        first, second, *_ = [*begin.splitlines(), b"", b""]
        delimiters = [self.delimiter] if self.delimiter else ["\t", *_DELIMITERS]
        counts = ((first.count(d.encode()), second.count(d.encode())) for d in delimiters)
        same = any(0 < one == other for one, other in counts)
        return is_prose(begin) and begin.lstrip()[:1] != b"[" and same

    @override
    def head(self, text: TextFile) -> Head:
        begin = text.begin[text.mark :]
        if not begin:
            raise pa.ArrowInvalid("it is empty")
        line = begin.splitlines()[0].decode(errors="replace")
        if begin.lstrip()[:1] in (b"{", b"["):
            raise pa.ArrowInvalid("it is no text with a delimiter between columns")
        delimiter = self.delimiter
        if delimiter is None:
            delimiter = "\t" if "\t" in line else max(_DELIMITERS, key=line.count)
            delimiter = delimiter if delimiter in line else ","
        quote = ord(self.quote) if self.quote else NO_QUOTE
        names, next = _first_row(begin, delimiter.encode(), quote)
        below = begin[next:].partition(b"\n")[0].decode(errors="replace").split(delimiter)
        header = _is_header(names, below) if self.header is None else self.header
        if self.columns:
            header = self.header or names == list(self.columns)
            names = list(self.columns)
        elif not header:
            names = [f"f{index}" for index in range(len(names))]
        return Head(text.mark + (next if header else 0), names, delimiter.encode(), quote)

    @override
    def checked(
        self, rows: Rows, columns: pa.Schema | None, head: Head
    ) -> tuple[pa.Schema, dict[int, str]]:
        assert columns is not None
        problems = {
            int(at): _NEVER_ENDS
            if fields == UNCLOSED
            else f"has {fields} columns where {len(head.names)} are expected"
            for at, fields in rows.odd_K2
        }
        return columns, problems

    @override
    def batch(self, rows: Rows, columns: pa.Schema, layout: Layout, head: Head) -> pa.RecordBatch:
        fields = map(head.names.index, columns.names)
        arrays = [_column(rows, field, len(head.delimiter), head.quote) for field in fields]
        return pa.record_batch(arrays, schema=columns)


def _first_row(begin: bytes, delimiter: bytes, quote: int) -> tuple[list[str], int]:
    """Return the values of the first row, and where the next row begins.

    Raises:
        pa.ArrowInvalid: There is no row, or its quote never ends.
    """
    data_C = text_loops().readable(begin)
    sign = np.frombuffer(delimiter, np.uint8)
    odd_K2 = np.zeros((1, 2), np.int64)
    begin_N = np.empty(1, np.int64)
    found = fields = 0
    while not found:  # the first time counts the fields
        end_NF = np.empty((1, fields), np.int64)
        found, odd, next = text_loops().split_rows(
            data_C, 0, True, sign, quote, begin_N, end_NF, odd_K2
        )
        fields = int(odd_K2[0, 1])
        if fields == UNCLOSED:
            raise pa.ArrowInvalid(f"its first line {_NEVER_ENDS}")
        if not odd and not found:
            raise pa.ArrowInvalid("it has only empty lines")
    row = Rows(data_C, 0, 0, next, begin_N, end_NF, odd_K2[:0])
    return [_column(row, n, len(delimiter), quote)[0].as_py() for n in range(fields)], next


def _column(rows: Rows, field: int, between: int, quote: int) -> pa.Array:
    """Return the texts of a column.

    Args:
        rows: The rows.
        field: The number of the column.
        between: The number of bytes of the delimiter.
        quote: The byte that quotes fields, or `NO_QUOTE`.

    Raises:
        BadValue: Bytes are no UTF-8.
    """
    end_N = rows.end_NF[:, field]
    begin_N = rows.end_NF[:, field - 1] + between if field else rows.begin_N
    text_C = np.empty(int((end_N - begin_N).sum()) + text_loops().WORD, np.uint8)
    bound_N1 = np.empty(len(end_N) + 1, np.int32)
    text_loops().write_column(
        rows.data_C, begin_N, np.ascontiguousarray(end_N), quote, bound_N1, text_C
    )
    text_C = text_C[: bound_N1[-1]]
    buffers = [None, pa.py_buffer(bound_N1), pa.py_buffer(text_C)]
    column = pa.Array.from_buffers(pa.string(), len(end_N), buffers)
    if len(text_C) and text_C.max() >= 0x80:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            raise _no_text(column.cast(pa.binary()).to_pylist()) from None
    return column


def _no_text(values: list[bytes]) -> BadValue:
    """Return the error of the first value that is no UTF-8."""
    index = next(n for n, one in enumerate(values) if one.decode(errors="ignore").encode() != one)
    return BadValue(
        index,
        f"holds bytes that are no UTF-8, {values[index][:40]!r}: set "
        "dataset.text.encoding=latin-1, or whatever it is",
    )


def _is_header(names: Sequence[str], below: Sequence[str]) -> bool:
    # one that names a column twice, above numbers, is no row, but refused by who reads columns
    unique = len(set(names)) == len(names) or any(map(_is_number, below))
    without_gaps = all(names[1:]) and unique
    counted = names == [str(index) for index in range(len(names))]
    return without_gaps and (counted or not any(map(_is_number, names)))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
