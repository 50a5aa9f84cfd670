"""Remarks on columns that are read as the settings say, but look as if something else was meant.

times    all in January 1970, or in the year 57,000: the unit is another one
dates    have no time of day, so hours say nothing
texts    "7.0", which pandas writes where other ids are missing, is another id than 7; "nan" is
         an id like other text, and not a missing one; "[3, 17]" and "3|17" are one id and no list
lists    need no separator, which is for text alone
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from recapp.console import note
from recapp.dataset.arrow_types import id_type, is_list, is_text, value_type
from recapp.dataset.decode import TICKS, decode_times
from recapp.dataset.derived_columns import Kind
from recapp.dataset.footers import time_range
from recapp.dataset.schema import Schema, TextIds
from recapp.dataset.sequential_rows import arrow_chunks
from recapp.dataset.source import FIRST_ROWS, Source
from recapp.dataset.text import BadValue, as_text, shown
from recapp.errors import DataError
from recapp.sparse.batch import MISSING

_EARLIEST = 631_152_000  # the year 1990, in seconds since 1970
_LATEST = 4_102_444_800  # the year 2100
_WHOLE = r"\A-?(0|[1-9][0-9]*)\.0+\z"
_ABSENT = r"\A(nan|NaN|None|null|NULL|<NA>|\\N)\z"
_LIST = r"\A(\[.*\]|\(.*,.*\)|\{.*,.*\})\z"
_NUMBERS = r"\A[0-9]+([|;,][0-9]+)+\z"
_ADVICE = {
    _WHOLE: "which is another id than the number: write whole numbers "
    '(pandas: astype("Int64") before to_csv)',
    _ABSENT: "which is an id like other text: write null or empty text where an id is missing",
    _LIST: "which is no list, as its brackets are part of an id: write a column of lists, or texts "
    "such as 3|17 and dataset.separator",
    _NUMBERS: "which is one id: if it is a list, name the sign between its ids in "
    "dataset.separator",
}


def note_remarks(source: Source, schema: Schema, *, noted: bool) -> None:
    """Print what is odd about the values of some rows (`remarks`).

    Args:
        source: The rows.
        schema: The columns of the rows.
        noted: Whether this rank prints; else nothing is read.
    """
    for remark in remarks(source, schema) if noted else ():
        note(remark)


def remarks(source: Source, schema: Schema) -> Iterator[str]:
    """Yield what is odd about the values of some rows, one line for each oddity of a column.

    Texts are those of the first rows; times are those of all files where their statistics tell.

    Args:
        source: The rows.
        schema: The columns of the rows.
    """
    some = source.slice(0, FIRST_ROWS).only([*schema.times, *schema.sparse])
    try:
        file, _, rows = next(arrow_chunks(some))
    except (StopIteration, DataError):  # whoever reads the rows names what is damaged
        return
    for name, unit in schema.times.items():
        column = rows.column(file.columns[name])
        kind = value_type(column.type)
        if not pt.is_temporal(kind):
            yield from _of_times(name, unit, column, time_range(source.files, name, unit))
        if pt.is_date(kind):
            yield from _of_dates(name, schema)
    for name, sign in schema.separator.items():
        kind = value_type(rows.column(file.columns[name]).type)
        if not is_text(kind):
            yield (
                f"dataset.separator={{{name}: '{sign}'}} has no effect, because column {name} "
                f"holds {kind} and no text: leave it out"
            )
    for name in schema.sparse:
        if name not in schema.separator and schema.text_ids(name) is TextIds.HASHED:
            yield from _of_texts(file.columns[name], rows.column(file.columns[name]))


def _of_times(name: str, unit: str, column: pa.Array, ends: tuple[int, int] | None) -> list[str]:
    """Return a remark if the last time is credible in another unit alone.

    Args:
        name: The column of times.
        unit: The unit of its numbers.
        column: The first times.
        ends: The first and the last time of all rows; None takes the first rows.
    """
    if ends is None:
        try:
            seconds = decode_times(column, unit)
        except BadValue:  # training names its row
            return []
        there = seconds[seconds != MISSING]
        if not len(there):
            return []
        ends = int(there.min()), int(there.max())
    for other, ticks in TICKS.items():
        first, last = (end * TICKS[unit] // ticks for end in ends)
        if _EARLIEST <= last < _LATEST:
            said = (
                f"dataset.times={{{name}: {unit}}}: the times of {name} are from {_day(ends[0])} "
                f"to {_day(ends[1])}; with {{{name}: {other}}} they are from {_day(first)} to "
                f"{_day(last)}"
            )
            return [] if other == unit else [said]
    return []


def _day(seconds: int) -> str:
    return str(np.datetime64(seconds, "s").astype("datetime64[D]"))


def _of_dates(name: str, schema: Schema) -> list[str]:
    """Return a remark if an hour or a time of day is taken from dates."""
    made = [column for column in schema.derived if column.reads == (name,)]
    empty = [c.name for c in made if c.kind is Kind.HOUR or str(c.setting).startswith("day")]
    if not empty:
        return []
    return [
        f"column {name} holds dates, which have no time of day: {', '.join(empty)} say nothing; "
        "leave them out, dataset.time_features=[weekday,week]"
    ]


def _of_texts(name: str, column: pa.Array) -> list[str]:
    """Return a remark for each kind of text in the first rows that looks like another id."""
    if not is_text(id_type(column.type)):
        return []
    column = column.flatten() if is_list(column.type) else column
    column = column.dictionary_decode() if pt.is_dictionary(column.type) else column
    texts = as_text(column)
    found = []
    for pattern, advice in _ADVICE.items():
        at = pc.index(pc.match_substring_regex(texts, pattern), True).as_py()
        if at >= 0:
            found.append(f"column {name} holds the text {shown(texts[at])}, {advice}")
    return found
