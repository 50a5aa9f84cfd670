"""Read JSON lines: a JSON object in each line, plain or compressed.

Types are those of JSON: whole numbers, fractions, text, lists of these. Text stays text, also where
it looks like a time. A field may be absent from some lines, or null. A column may have whole
numbers in some lines and fractions in others; a line with text where others have numbers is a bad
row.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.json as pj
from typing_extensions import override

from recapp.dataset.text_rows import Head, Layout, Rows, Text, TextFile
from recapp.errors import first_line


@dataclass(frozen=True)
class JsonLines(Text):
    """Read JSON lines."""

    name: str = "JSON lines"
    suffixes: tuple[str, ...] = (".jsonl", ".ndjson")

    def knows(self, begin: bytes) -> bool:
        """Return whether a file begins with an object that its first line ends, or with a list of
        objects, which is refused with advice.
        """
        return re.match(rb"(\xef\xbb\xbf)?\s*(\{[^\n]*\}\s*(\n|\Z)|\[\s*\{)", begin) is not None

    @override
    def head(self, text: TextFile) -> Head:
        if text.begin[text.mark :].lstrip()[:1] not in (b"{", b""):
            raise pa.ArrowInvalid(
                "its first line is no JSON object, {...}; jq -c '.[]' makes lines of a list"
            )
        return Head(text.mark)

    @override
    def checked(
        self, rows: Rows, columns: pa.Schema | None, head: Head
    ) -> tuple[pa.Schema, dict[int, str]]:
        spans = zip(rows.begin_N.tolist(), rows.end_NF[:, 0].tolist(), strict=True)
        lines = {begin: rows.data_C[begin:end].tobytes() for begin, end in spans}
        # Arrow takes null for a row, and ends the process where it is the first
        objects = [begin for begin, line in lines.items() if line.lstrip()[:1] == b"{"]
        columns, bad = _columns([lines[begin] for begin in objects], columns)
        problems = dict.fromkeys(lines.keys() - set(objects), "is no JSON object, {...}")
        return columns, problems | {objects[line]: problem for line, problem in bad.items()}

    @override
    def batch(self, rows: Rows, columns: pa.Schema, layout: Layout, head: Head) -> pa.RecordBatch:
        data = rows.data_C[rows.first : rows.next].tobytes()
        bad = {row.at - rows.offset for row in layout.bad}
        if not bad.isdisjoint(rows.begin_N.tolist()):
            spans = zip(rows.begin_N.tolist(), rows.end_NF[:, 0].tolist(), strict=True)
            data = b"\n".join(rows.data_C[a:b].tobytes() for a, b in spans if a not in bad)
        if not data:
            return pa.record_batch([pa.nulls(0, each.type) for each in columns], schema=columns)
        return _parsed(data, columns, "ignore").combine_chunks().to_batches()[0]


def _columns(lines: Sequence[bytes], columns: pa.Schema | None) -> tuple[pa.Schema, dict[int, str]]:
    """Return the columns of lines and of those before, and the problem of each line that does not
    fit.

    Args:
        lines: The lines.
        columns: The columns of the lines before; None for the first lines.
    """
    known = pa.schema([]) if columns is None else columns
    if not lines:
        return known, {}
    try:
        table = _parsed(b"\n".join(lines))
        if table.num_rows == len(lines):
            return _joined(known, table.schema), {}
        problem = f"holds {table.num_rows} JSON values"
    except (pa.ArrowException, UnicodeDecodeError) as error:
        problem = f"does not fit ({first_line(error)})"
    if len(lines) == 1:
        return known, {0: problem}
    half = len(lines) // 2
    known, bad = _columns(lines[:half], known)
    known, more = _columns(lines[half:], known)
    return known, bad | {half + line: problem for line, problem in more.items()}


def _parsed(data: bytes, columns: pa.Schema | None = None, others: str = "infer") -> pa.Table:
    return pj.read_json(
        pa.BufferReader(data),
        pj.ReadOptions(use_threads=False, block_size=len(data) + 1),
        pj.ParseOptions(explicit_schema=columns, unexpected_field_behavior=others),
    )


def _joined(one: pa.Schema, other: pa.Schema) -> pa.Schema:
    """Return the columns of two schemas, each in a type that holds the values of both.

    Raises:
        pa.ArrowException: A column has values of both that no type holds.
    """
    plain = pa.schema([(each.name, _plain_type(each.type)) for each in other])
    return pa.unify_schemas([one, plain], promote_options="permissive")


def _plain_type(kind: Any) -> Any:
    """Return the type of text for what only looks like times."""
    if pa.types.is_list(kind):
        return pa.list_(_plain_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([one.with_type(_plain_type(one.type)) for one in kind])
    return pa.string() if pa.types.is_timestamp(kind) else kind
