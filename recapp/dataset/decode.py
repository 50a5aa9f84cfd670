"""Decode Arrow columns of ids, numbers and labels, in the forms of real logs, to numpy columns.

    98275684, "98275684"     an integer, or text that spells one as it is printed    -> itself
    "DE", "81ce-a2", "007"   any other text    -> XXH64, seed 0, of its bytes as an int64
    "" or null               missing           -> MISSING for an id, 0 for a number

So an id is the same whether a file stores it as text or as any integer type; a uint64 of 2^63 or
more is read like its text. -2^63 stands for missing ids, so as an id it is an error. Columns that
the data set declares as hexadecimal (Criteo's) are read differently:

    "05db9164"               up to 16 digits                     -> 98275684
    -1934120 (int32)         a 32-bit hash that lost its sign    -> + 2**32

Functions decode whole columns. For a dictionary-encoded column they decode the dictionary if it is
shorter than the column. An unreadable value raises `BadValue` with its index in the column;
`collate` adds the file and the row. `recapp/dataset/text.py` reads text.

The columns of a chunk are `Rows`: numpy arrays, which can be sliced, permuted and joined.

    dense_NI    [N, I]  numbers, transformed
    targets_NT  [N, T]  labels, then weights
    ids_NS      [N, S]  the single id of each row and single-valued feature
    bags                values_L, offsets_N1 of each multi-valued feature
    row_numbers_N  [N]  the place of each row in the data set, where it is wanted

Shapes: N rows of a chunk, I dense columns, T columns of labels and weights, S single-valued
features, L ids of a bag feature. Arrays are row-major, because lanes gather rows.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from recapp.dataset.arrow_types import is_list, is_text, value_type
from recapp.dataset.derived_columns import DAY_SECONDS
from recapp.dataset.schema import Schema, TextIds
from recapp.dataset.text import (
    RESERVED,
    BadValue,
    as_text,
    ids_of_hex,
    ids_of_text,
    refuse,
    shown,
    spelled_numbers,
)
from recapp.errors import ConfigError
from recapp.sparse.keyed_jagged_tensor import MISSING

TICKS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
"""The ticks of each unit of time in a second."""
BoolArray = npt.NDArray[np.bool_]

_FINITE = " in 32 bits; write a number up to 3.4e38, or null where it is missing, which counts as 0"
_LABEL = ": write 1 for what counts as a click (such as a rating of 4 or more), 0 for what does not"
_UNKNOWN = "; where it is unknown, write 0 and a weight of 0 (dataset.weight={label: column})"
_ID = ": write a whole number, or use the column as a dense feature"
_NO_ENTRY = (
    "is damaged: its page's dictionary has no such entry; write the file again or leave it out"
)


Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class FeatureBags:
    """The bags of one feature.

    Args:
        values_L: The ids of all rows, one bag after the other, [L].
        offsets_N1: The offset of each row's bag, and L at the end, [N + 1].
    """

    values_L: Int64Array
    offsets_N1: Int64Array

    @staticmethod
    def of(values_L: Int64Array, lengths_N: Int64Array) -> "FeatureBags":
        """Make bags from the number of ids of each row, [N]."""
        return FeatureBags(
            values_L, np.concatenate(([0], np.cumsum(lengths_N))).astype(np.int64, copy=False)
        )

    def slice(self, first: int, last: int) -> "FeatureBags":
        """Return rows [first, last), without a copy of the ids."""
        offsets = self.offsets_N1[first : last + 1]
        return FeatureBags(self.values_L[offsets[0] : offsets[-1]], offsets - offsets[0])

    def take(self, rows_M: Int64Array) -> "FeatureBags":
        """Return the given rows, in the given order."""
        starts = self.offsets_N1[rows_M]
        lengths = np.diff(self.offsets_N1)[rows_M]
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        position_L = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return FeatureBags(self.values_L[position_L], offsets)


@dataclass(frozen=True, slots=True)
class Rows:
    """Some decoded rows; the module docstring explains the arrays.

    Args:
        dense_NI: Transformed numbers, [N, I].
        targets_NT: Labels and weights, [N, T].
        ids_NS: Ids of single-valued features, [N, S].
        bags: The bags of each multi-valued feature, in schema order.
        row_numbers_N: The place of each row in the data set, [N]; None where nobody wants it.
    """

    dense_NI: Float32Array
    targets_NT: Float32Array
    ids_NS: Int64Array
    bags: tuple[FeatureBags, ...]
    row_numbers_N: Int64Array | None = None

    def __len__(self) -> int:
        return len(self.targets_NT)

    def slice(self, first: int, last: int) -> "Rows":
        """Return rows [first, last) without a copy; `last` may exceed the number of rows."""
        last = min(last, len(self))
        bags = tuple(bag.slice(first, last) for bag in self.bags)
        return Rows(
            self.dense_NI[first:last],
            self.targets_NT[first:last],
            self.ids_NS[first:last],
            bags,
            None if self.row_numbers_N is None else self.row_numbers_N[first:last],
        )

    def take(self, rows_M: Int64Array) -> "Rows":
        """Return the given rows, in the given order."""
        bags = tuple(bag.take(rows_M) for bag in self.bags)
        numbers = None if self.row_numbers_N is None else self.row_numbers_N[rows_M]
        return Rows(
            self.dense_NI[rows_M], self.targets_NT[rows_M], self.ids_NS[rows_M], bags, numbers
        )


def join(parts: Sequence[Rows]) -> Rows:
    """Concatenate the rows of several chunks (at least one)."""
    if len(parts) == 1:
        return parts[0]
    bags = tuple(
        FeatureBags.of(
            np.concatenate([bag.values_L for bag in same]),
            np.concatenate([np.diff(bag.offsets_N1) for bag in same]),
        )
        for same in zip(*(part.bags for part in parts), strict=True)
    )
    numbers = [part.row_numbers_N for part in parts if part.row_numbers_N is not None]
    return Rows(
        np.concatenate([part.dense_NI for part in parts]),
        np.concatenate([part.targets_NT for part in parts]),
        np.concatenate([part.ids_NS for part in parts]),
        bags,
        np.concatenate(numbers) if numbers else None,
    )


def decode_ids(column: pa.Array, text: TextIds = TextIds.HASHED) -> Int64Array:
    """Return the ids of a column of integers or text, [N].

    Args:
        column: One id per row.
        text: The rule for ids of text.

    Returns:
        The ids; MISSING for a null or empty value.

    Raises:
        BadValue: A value is not an id.
    """
    if pt.is_dictionary(column.type):
        ids: Int64Array
        (ids,) = _through_dictionary(column, lambda part: (decode_ids(part, text),), MISSING)
        return ids
    kind = column.type
    if pt.is_null(kind):
        return np.full(len(column), MISSING, dtype=np.int64)
    if is_text(kind):
        return ids_of_hex(as_text(column)) if text is TextIds.HEX else ids_of_text(column, text)
    if pt.is_floating(kind):
        return _from_whole_floats(column)
    missing = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    values = (column.fill_null(0) if column.null_count else column).to_numpy(zero_copy_only=False)
    if pt.is_int32(kind) and text is TextIds.HEX:
        values = values.view(np.uint32)
    if (
        pt.is_uint64(kind)
        and text is not TextIds.HEX
        and len(values)
        and int(values.max()) >= 2**63
    ):
        return ids_of_text(column.cast(pa.string()), text)
    ids = values.astype(np.int64)
    if (pt.is_int64(kind) or pt.is_uint64(kind)) and len(ids) and int(ids.min()) == MISSING:
        refuse(ids == MISSING, lambda index: f"holds {shown(column[index])}, {RESERVED}")
    if missing is not None:
        ids[missing] = MISSING
    return ids


def padding_id(schema: Schema, feature: str) -> int | None:
    """Return the id that fills lists of a feature up to a length; None if none does.

    Raises:
        ConfigError: The padding of the settings is no id of the feature.
    """
    padding = schema.padding
    value = padding.get(feature) if isinstance(padding, Mapping) else padding
    if value is None:
        return None
    try:
        # a negative number is no hexadecimal text, and as a number would be an id of 64 bits
        raw = str(value) if isinstance(value, str) or value < 0 else value
        number = int(decode_ids(pa.array([raw]), schema.text_ids(feature))[0])
    except (BadValue, pa.ArrowException, OverflowError) as error:
        raise ConfigError(f"dataset.padding={value} of {feature}: {error}") from None
    return None if number == MISSING else number


def decode_bags(
    column: pa.Array,
    text: TextIds = TextIds.HASHED,
    null_is_id: bool = False,
    padding: int | None = None,
    separator: str | None = None,
) -> tuple[Int64Array, Int64Array]:
    """Return the ids [L] and lengths [N] of a column of lists.

    A null list is an empty bag; null or empty elements and padding are skipped.

    Args:
        column: A list of ids for each row, or one id, which is a list of one.
        text: The rule for ids of text.
        null_is_id: Whether a null list is a bag with one missing id.
        padding: The id that fills lists up to a length; None for lists without.
        separator: What stands between the ids of a text; None if a text is one id.

    Raises:
        BadValue: A value is not an id; the index is that of its row (not of the element).
    """
    if separator and is_text(value_type(column.type)):
        column = _without_dictionary(column) if pt.is_dictionary(column.type) else column
        column = pc.split_pattern(column, separator)
    if pt.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    elements = column
    lengths = np.ones(len(column), dtype=np.int64)
    if is_list(column.type):
        elements = column.flatten()
        counts = pc.fill_null(pc.list_value_length(column), 0)
        lengths = counts.to_numpy(zero_copy_only=False).astype(np.int64)
    try:
        ids = decode_ids(elements, text)
    except BadValue as error:
        raise BadValue(
            int(np.searchsorted(np.cumsum(lengths), error.index, side="right")), error.problem
        ) from None
    absent = ids == MISSING
    if padding is not None:
        absent |= ids == padding
    if absent.any():
        sample_L = np.repeat(np.arange(len(lengths)), lengths)
        lengths = lengths - np.bincount(sample_L[absent], minlength=len(lengths))
        ids = ids[~absent]
    if null_is_id and column.null_count:
        null_N = column.is_null().to_numpy(zero_copy_only=False)
        ids = np.insert(ids, (np.cumsum(lengths) - lengths)[null_N], MISSING)
        lengths = np.where(null_N, 1, lengths)
    return ids, lengths


def decode_times(column: pa.Array, unit: str) -> Int64Array:
    """Return the whole seconds since 1970 (UTC) of a column of times, [N], rounded down.

    Args:
        column: Timestamps or dates of Arrow; or whole numbers, also as text or floats.
        unit: The unit of numbers: s, ms, us or ns.

    Returns:
        The seconds; MISSING for a null or empty value.

    Raises:
        BadValue: A value is no whole number.
    """
    if pt.is_dictionary(column.type):
        column = _without_dictionary(column)
    kind = column.type
    ticks = TICKS[unit]
    if pt.is_date32(kind):
        column = column.cast(pa.int32()).cast(pa.int64())
        ticks = -DAY_SECONDS  # seconds of a tick
    elif pt.is_date64(kind) or pt.is_timestamp(kind):
        ticks = TICKS[kind.unit] if pt.is_timestamp(kind) else TICKS["ms"]
        column = column.cast(pa.int64())
    try:
        times = decode_ids(column, TextIds.INTEGERS)
    except BadValue as error:
        text = shown(column[error.index])
        raise BadValue(
            error.index,
            f"holds {text}; a time must be a whole number of {unit} since 1970: write text of "
            "dates as timestamps of Arrow (pandas: pd.to_datetime)",
        ) from None
    missing = times == MISSING
    seconds = times * -ticks if ticks < 0 else times // ticks
    return np.where(missing, MISSING, seconds)


def decode_vectors(column: pa.Array, width: int) -> Float32Array:
    """Return the vectors of a column of lists of numbers, [N, width]; zeros for a null list, and 0
    for a null element.

    Args:
        column: A list of numbers for each row.
        width: The length of each list.

    Raises:
        BadValue: A list has another length, or a value is not a finite float32.
    """
    vectors_ND = np.zeros((len(column), width), dtype=np.float32)
    if pt.is_null(column.type):
        return vectors_ND
    lengths = pc.fill_null(pc.list_value_length(column), -1).to_numpy(zero_copy_only=False)
    there = lengths >= 0
    refuse(
        there & (lengths != width),
        lambda index: f"holds a list of {lengths[index]} values; dataset.vectors wants {width}",
    )
    rows = np.flatnonzero(there)
    try:
        vectors_ND[rows] = decode_numbers(column.flatten())[0].reshape(-1, width)
    except BadValue as error:
        raise BadValue(int(rows[error.index // width]), error.problem) from None
    return vectors_ND


def decode_numbers(column: pa.Array) -> tuple[Float32Array, BoolArray | None]:
    """Return the numbers of a column of numbers or of text that spells numbers, [N].

    Returns:
        The numbers, 0 for a missing one, and a mask of missing numbers (None if none is missing).

    Raises:
        BadValue: A value is not a finite float32.
    """
    values, missing = _numbers(column)
    with np.errstate(over="ignore"):  # 1e300 becomes infinity, which raises below
        numbers: Float32Array = values.astype(np.float32, copy=False)
    refuse(
        ~np.isfinite(numbers), lambda index: f"holds {values[index]}, which is not finite{_FINITE}"
    )
    return numbers, missing


def decode_labels(column: pa.Array) -> Float32Array:
    """Return labels, each exactly 0 or 1, [N].

    Text is compared before its conversion, which would round other text to 0 or 1 ("1e-400").

    Raises:
        BadValue: A value is neither 0 nor 1.
    """
    if is_text(value_type(column.type)):
        column = _without_dictionary(column) if pt.is_dictionary(column.type) else column
        zero, one = (
            pc.match_substring_regex(column, rf"\A{label}(\.0+)?\z")
            .fill_null(False)
            .to_numpy(zero_copy_only=False)
            for label in (0, 1)
        )
        values = one
        bad = ~(zero | one)
    else:
        values, missing = _numbers(column)
        bad = (values != 0) & (values != 1)
        if missing is not None:
            bad |= missing
    refuse(
        bad,
        lambda index: (
            f"holds {shown(column[index])}; a label must be 0 or 1{_LABEL}"
            f"{_if_unknown(column[index])}"
        ),
    )
    labels: Float32Array = values.astype(np.float32, copy=False)
    return labels


def decode_finite(
    column: pa.Array, use: str, least: float = -math.inf, most: float = math.inf
) -> Float32Array:
    """Return finite numbers without missing ones, [N].

    Args:
        column: Numbers, or text that spells numbers.
        use: The use of the column, for messages.
        least: The smallest allowed number.
        most: The largest allowed number.

    Raises:
        BadValue: A value is missing, not a finite float32, too small or too large.
    """
    values, missing = _numbers(column)
    with np.errstate(over="ignore"):
        numbers: Float32Array = values.astype(np.float32, copy=False)
    bad = ~np.isfinite(numbers) | (numbers < least) | (numbers > most)
    if missing is not None:
        bad |= missing
    allowed_range = "a finite number" + (f", {least:g} or more" if least > -math.inf else "")
    if most < math.inf:
        allowed_range = f"a number from {least:g} to {most:g}"
    refuse(
        bad,
        lambda index: (
            f"holds {shown(column[index])}; a {use} must be {allowed_range}"
            f"{_if_unknown(column[index]) if use == 'label' else ''}"
        ),
    )
    return numbers


def _if_unknown(label: pa.Scalar) -> str:
    """Return advice for the label of a row whose label is unknown; empty for other labels."""
    return _UNKNOWN if shown(label).strip("'") in ("None", "nan", "", "-1", "-1.0") else ""


def _numbers(column: pa.Array) -> tuple[npt.NDArray[Any], BoolArray | None]:
    """Return numbers [N] in the column's own type, 0 for a missing one, and a mask of missing
    numbers.
    """
    if pt.is_dictionary(column.type):
        numbers, gaps = _through_dictionary(column, _numbers_and_gaps, 0, True)
        return numbers, gaps if gaps.any() else None
    if pt.is_null(column.type):
        return np.zeros(len(column), dtype=np.float32), np.ones(len(column), dtype=np.bool_)
    if is_text(column.type):
        column = spelled_numbers(as_text(column))
    missing = None
    if column.null_count:
        missing = column.is_null().to_numpy(zero_copy_only=False)
        column = column.fill_null(False if pt.is_boolean(column.type) else 0)
    return column.to_numpy(zero_copy_only=False), missing


def _numbers_and_gaps(column: pa.Array) -> tuple[npt.NDArray[Any], BoolArray]:
    numbers, missing = _numbers(column)
    return numbers, np.zeros(len(numbers), dtype=np.bool_) if missing is None else missing


def _through_dictionary(
    column: pa.DictionaryArray,
    decode: Callable[[pa.Array], tuple[npt.NDArray[Any], ...]],
    *absent: int,
) -> tuple[npt.NDArray[Any], ...]:
    """Decode the dictionary, and look up the values of the rows by its indices, [N] each.

    A dictionary longer than the column (of a large row group that is read in parts) is not decoded;
    the column is decoded instead.

    Args:
        column: The column.
        decode: Decodes plain values to arrays.
        absent: The value of a null in each of these arrays.

    Raises:
        BadValue: An index lies beyond the dictionary, or a row has an unreadable value.
    """
    try:
        if len(column.dictionary) <= len(column):
            parts = decode(column.dictionary)
            codes = _codes(column)
            if column.indices.null_count:
                parts = tuple(
                    np.append(part, part.dtype.type(value))
                    for part, value in zip(parts, absent, strict=True)
                )
            return tuple(part[codes] for part in parts)
    except BadValue:
        pass  # the column itself, below, shows whether and where a row has the value
    return decode(_without_dictionary(column))


def _without_dictionary(column: pa.DictionaryArray) -> pa.Array:
    _codes(column)
    return column.dictionary_decode()


def _codes(column: pa.DictionaryArray) -> npt.NDArray[Any]:
    """Return unsigned indices into the dictionary, [N]; a null has the index after the last
    entry.

    A damaged page may hold any index, which Arrow does not compare with the size of the dictionary.
    A negative index is too large as an unsigned number.

    Raises:
        BadValue: An index lies beyond the dictionary.
    """
    indices = column.indices
    codes: npt.NDArray[Any] = indices.fill_null(0).to_numpy(zero_copy_only=False)
    codes = codes.view(f"u{codes.itemsize}")
    if indices.null_count:
        nulls_N = indices.is_null().to_numpy(zero_copy_only=False)
        if len(column.dictionary) > np.iinfo(codes.dtype).max:  # the type has no index left
            codes = codes.astype(np.uint64)
        codes = np.where(nulls_N, codes.dtype.type(len(column.dictionary)), codes)
    if len(codes) and int(codes.max()) >= len(column.dictionary) + bool(indices.null_count):
        raise BadValue(int(codes.argmax()), _NO_ENTRY)
    return codes


def _from_whole_floats(column: pa.Array) -> Int64Array:
    """Return integers that a tool stored as floats because some are missing (NaN or null)."""
    values = column.cast(pa.float64()).fill_null(np.nan).to_numpy(zero_copy_only=False)
    missing = np.isnan(values)
    whole = np.where(missing, 0.0, values)
    good = (whole == np.floor(whole)) & (np.abs(whole) < 2**53)
    refuse(~good, lambda index: f"holds {values[index]}; an id must be an integer or text{_ID}")
    ids: Int64Array = whole.astype(np.int64)
    ids[missing] = MISSING
    return ids
