"""The types of columns of raw logs, found in their values, and the conversion to them.

    text column    all values are canonical whole numbers ("7", not "7.0")    int64
                   all values are numbers, none like 007                      float64
                   else                                                       text
    other column   its own type, without dictionaries and views

Missing values (nulls, empty texts) say nothing about a type, and become nulls. Text of ids with a
sign between them becomes lists. A type that is found is that of all rows; a type that is given is
checked by each value.

Letter: N values.
"""

from collections.abc import Callable
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from recapp.dataset.arrow_types import is_text, value_type, without_views
from recapp.dataset.decode import BadValue, as_text, ids_of_hex, shown, spelled_numbers

# int64 | float64 | text; hex: at most 16 hexadecimal digits, which become int64
Kind = Literal["int64", "float64", "text", "hex"]
OWN = "own"  # the type that a column has in the files
_ARROW = {"int64": pa.int64(), "float64": pa.float64(), "text": pa.string(), "hex": pa.int64()}


class KindOfText:
    """Find the kind of a column of text.

    Args:
        sign: What stands between the values of a text; None for one value.
    """

    def __init__(self, sign: str | None = None) -> None:
        self._sign = sign
        self._whole = True
        self._numbers = True
        self._values = 0

    def add(self, column: pa.Array) -> None:
        """Look at some values."""
        if not self._numbers:
            return
        texts = plain(column)
        texts = parts_of(texts, self._sign).flatten() if self._sign else texts
        texts = pc.unique(texts).drop_null()
        texts = texts.filter(pc.not_equal(texts, ""))
        self._values += len(texts)
        self._whole = self._whole and _are_whole(texts)
        self._numbers = self._whole or _are_numbers(texts)

    def merge(self, other: "KindOfText") -> None:
        """Add what was found in other values."""
        self._whole = self._whole and other._whole
        self._numbers = self._numbers and other._numbers
        self._values += other._values

    @property
    def kind(self) -> Kind:
        """The kind of the values so far."""
        if not self._values:
            return "text"
        return "int64" if self._whole else "float64" if self._numbers else "text"


def plain(column: pa.Array) -> pa.Array:
    """Return a column without dictionaries and views, and text without its empty values."""
    column = without_views(column)
    column = column.cast(value_type(column.type))
    if not is_text(column.type):
        return column
    texts = as_text(column)
    return pc.if_else(pc.equal(texts, ""), pa.scalar(None, texts.type), texts)


def parts_of(texts: pa.Array, sign: str) -> pa.Array:
    """Return lists of the parts of texts; a null is a null."""
    return pc.split_pattern(texts, sign)


def typed(column: pa.Array, kind: str, sign: str | None = None) -> pa.Array:
    """Return a column in a type.

    Args:
        column: The values.
        kind: A `Kind`, or `OWN`.
        sign: What stands between the values of a text, which become a list; None for one value.

    Raises:
        BadValue: A value is none of this kind.
    """
    values = plain(column)
    if kind == OWN:
        return values
    if not is_text(values.type):
        values = values.cast(pa.string())
    if sign is None:
        return _typed(values, kind)
    lists = parts_of(values, sign)
    mask = lists.is_null() if lists.null_count else None
    items = _typed(plain(lists.flatten()), kind)
    if mask is not None:
        return pa.ListArray.from_arrays(_offsets(lists), items, mask=mask)
    return pa.ListArray.from_arrays(lists.offsets, items)


def arrow_type(kind: str, sign: str | None, own: pa.DataType) -> pa.DataType:
    """Return the Arrow type of a column that `typed` returns.

    Args:
        kind: A `Kind`, or `OWN`.
        sign: As for `typed`.
        own: The type in the files.
    """
    if kind == OWN:
        return plain(pa.nulls(0, own)).type
    return pa.list_(_ARROW[kind]) if sign else _ARROW[kind]


def _offsets(lists: pa.Array) -> pa.Array:
    lengths = pc.fill_null(pc.list_value_length(lists), 0)
    ends = pc.cumulative_sum(lengths)
    return pa.concat_arrays([pa.array([0], ends.type), ends])


def _typed(texts: pa.Array, kind: str) -> pa.Array:
    if kind == "int64":
        refused = _first(texts, lambda part: _casts(part, pa.int64()))
        if refused is not None:
            raise BadValue(refused, f"holds {shown(texts[refused])}, which is no whole number")
        return texts.cast(pa.int64())
    if kind == "float64":
        return spelled_numbers(texts)
    if kind == "hex":
        return pa.array(ids_of_hex(texts), mask=texts.is_null().to_numpy(zero_copy_only=False))
    return texts.cast(pa.string())


def _first(texts: pa.Array, fits: Callable[[pa.Array], bool]) -> int | None:
    """Return the index of the first value that does not fit; None if all do."""
    if fits(texts):
        return None
    low = 0
    high = len(texts)  # of the first bad value: low <= index < high
    while high - low > 1:
        middle = (low + high) // 2
        if fits(texts.slice(low, middle - low)):
            low = middle
        else:
            high = middle
    return low


def _casts(texts: pa.Array, kind: pa.DataType) -> bool:
    try:
        texts.cast(kind)
    except pa.ArrowInvalid:
        return False
    return True


def _are_numbers(texts: pa.Array) -> bool:
    """Return whether all texts are numbers, none with a 0 before its other digits (a zip code)."""
    padded = pc.any(pc.match_substring_regex(texts, r"\A[+-]?0[0-9]")).as_py()
    return not padded and _casts(texts, pa.float64())


def _are_whole(texts: pa.Array) -> bool:
    """Return whether each text is the only spelling of a whole number: no +7, 007 or 7.0."""
    return _casts(texts, pa.int64()) and texts.cast(pa.int64()).cast(texts.type).equals(texts)
