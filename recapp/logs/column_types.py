"""The types of columns of raw logs, found in their values, and the conversion to them.

    text column    all values are canonical whole numbers ("7", not "7.0")    int64
                   all values are numbers, none like 007, and none a whole    float64
                   number of 16 digits, which a float would round
                   else                                                       text
    other column   its own type, without dictionaries and views

Missing values (nulls, empty texts) say nothing about a type, and become nulls. Text of ids with a
sign between them becomes lists. A type that was found in some values, or given, is checked by each
value; one that was found must also keep the spelling of whole numbers.

Letter: N values.
"""

from enum import Flag
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recapp.dataset.arrow_types import (
    id_type,
    is_text,
    is_uuid,
    texts_of_uuids,
    value_type,
    with_values,
    without_views,
)
from recapp.dataset.decode import BadValue, as_text, ids_of_text, shown
from recapp.dataset.schema import TextIds

# int64 | float64 | text; hex: at most 16 hexadecimal digits, which become int64
Kind = Literal["int64", "float64", "text", "hex"]
OWN = "own"  # the type that a column has in the files
_NUMBERS = {"int64": pa.int64(), "float64": pa.float64()}
EXACT = 10**15  # the first whole number of 16 digits
_NO_FLOATS = r"\A[+-]?(0[0-9]|[0-9]{16,}\z)"


class Spelling(Flag):
    """What the texts of a column spell; of several columns, the union holds."""

    NOTHING = 0
    VALUES = 1
    NO_WHOLE_NUMBERS = 2
    NO_NUMBERS = 4

    @property
    def kind(self) -> Kind | None:
        """The kind of a column of these values; None if there are none."""
        if not self:
            return None
        if Spelling.NO_WHOLE_NUMBERS not in self:
            return "int64"
        return "text" if Spelling.NO_NUMBERS in self else "float64"


def spelling_of(column: pa.Array, sign: str | None = None) -> Spelling:
    """Return what texts spell.

    Args:
        column: The texts.
        sign: What stands between the values of a text; None for one value.
    """
    texts = plain(column)
    texts = plain(parts_of(texts, sign).flatten()) if sign else texts
    found = Spelling.VALUES if texts.null_count < len(texts) else Spelling.NOTHING
    whole = _numbers(texts, "int64", True)
    if whole is None:
        found |= Spelling.NO_WHOLE_NUMBERS
    elif not pc.any(pc.greater_equal(pc.abs(whole), EXACT)).as_py():
        return found  # a float has each of them
    # Arrow reads all texts, also behind the first that is no number
    if any(_numbers(some, "float64", True) is None for some in (texts.slice(0, 64), texts)):
        found |= Spelling.NO_NUMBERS
    return found


def plain(column: pa.Array) -> pa.Array:
    """Return a column without dictionaries, views and UUIDs, which become text, and text without
    its empty values.
    """
    column = without_views(column)
    column = column.cast(value_type(column.type))
    if is_uuid(id_type(column.type)):
        column = with_values(column, texts_of_uuids)
    if not is_text(column.type):
        return column
    texts = as_text(column)
    if texts.null_count:
        texts = texts.fill_null("")
    there_N = pc.binary_length(texts).to_numpy() > 0
    if there_N.all():
        return texts
    there = np.packbits(np.append(np.zeros(texts.offset, np.bool_), there_N), bitorder="little")
    buffers = [pa.py_buffer(there), *texts.buffers()[1:]]
    return pa.Array.from_buffers(texts.type, len(texts), buffers, offset=texts.offset)


def parts_of(texts: pa.Array, sign: str) -> pa.Array:
    """Return lists of the parts of texts; a null is a null."""
    return pc.split_pattern(texts, sign)


def typed(
    column: pa.Array, kind: str, sign: str | None = None, *, spelled: bool = False
) -> pa.Array:
    """Return a column in a type.

    Args:
        column: The values.
        kind: A `Kind`, or `OWN`.
        sign: What stands between the values of a text, which become a list; None for one value.
        spelled: Whether numbers must also be spelled as `Spelling` asks.

    Raises:
        BadValue: A value is none of this kind.
    """
    values = plain(column)
    if kind == OWN:
        return values
    if not is_text(values.type):
        values = values.cast(pa.string())
    if sign is None:
        return _typed(values, kind, spelled)
    lists = parts_of(values, sign)
    offsets = _offsets(lists)
    try:
        items = _typed(plain(lists.flatten()), kind, spelled)
    except BadValue as error:  # the index of an item is not that of its row
        row = int(np.searchsorted(offsets.to_numpy(), error.index, side="right")) - 1
        raise BadValue(row, error.problem) from None
    mask = lists.is_null() if lists.null_count else None
    return pa.ListArray.from_arrays(offsets, items, mask=mask)


def _offsets(lists: pa.Array) -> pa.Array:
    lengths = pc.fill_null(pc.list_value_length(lists), 0)
    ends = pc.cumulative_sum(lengths)
    return pa.concat_arrays([pa.array([0], ends.type), ends])


def _typed(texts: pa.Array, kind: str, spelled: bool) -> pa.Array:
    if kind == "hex":
        return pa.array(
            ids_of_text(texts, TextIds.HEX), mask=texts.is_null().to_numpy(zero_copy_only=False)
        )
    if kind == "text":
        return texts
    numbers = _numbers(texts, kind, spelled)
    if numbers is None:
        bad = _first_bad(texts, kind, spelled)
        raise BadValue(bad, f"holds {shown(texts[bad])}, which is no {kind}")
    return numbers


def _numbers(texts: pa.Array, kind: str, spelled: bool) -> pa.Array | None:
    """Return texts as numbers; None if one is none.

    Args:
        texts: The texts.
        kind: `int64` or `float64`.
        spelled: Whether a whole number must have its only spelling, no +7, 007 or 7.0, and other
            numbers no 0 before their digits, as zip codes have, and not the digits of large ids.
    """
    if spelled and kind == "int64":
        return _whole_numbers(texts)
    try:
        numbers = texts.cast(_NUMBERS[kind])
    except pa.ArrowInvalid:
        return None
    odd = spelled and pc.any(pc.match_substring_regex(texts, _NO_FLOATS)).as_py()
    return None if odd else numbers


def _whole_numbers(texts: pa.Array) -> pa.Array | None:
    """Return texts as whole numbers; None if one is none in its only spelling."""
    try:
        numbers = ids_of_text(texts, TextIds.INTEGERS)
    except BadValue:
        return None
    values = pa.py_buffer(np.append(np.empty(texts.offset, np.int64), numbers))
    buffers = [texts.buffers()[0], values]
    return pa.Array.from_buffers(pa.int64(), len(texts), buffers, offset=texts.offset)


def _first_bad(texts: pa.Array, kind: str, spelled: bool) -> int:
    """Return the index of the first text that is no number; there is one."""
    low = 0
    high = len(texts)  # low <= index < high
    while high - low > 1:
        middle = (low + high) // 2
        if _numbers(texts.slice(low, middle - low), kind, spelled) is None:
            high = middle
        else:
            low = middle
    return low
