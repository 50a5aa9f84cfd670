"""Test the uses of an Arrow type: list, text, number, id; check that the types of a file's columns
fit their uses in a schema; change values of types that few functions of Arrow take.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from recapp.errors import DataError

_HEX_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)
_UUID_SIGNS = 36
_UUID_DIGITS = np.array([n for n in range(_UUID_SIGNS) if n not in (8, 13, 18, 23)])


def is_list(arrow_type: pa.DataType) -> bool:
    """Return whether a column holds a list (a bag of ids) per row."""
    return bool(
        pt.is_list(arrow_type)
        or pt.is_large_list(arrow_type)
        or pt.is_fixed_size_list(arrow_type)
        or pt.is_list_view(arrow_type)
        or pt.is_large_list_view(arrow_type)
    )


def is_text(arrow_type: pa.DataType) -> bool:
    """Return whether a column holds text.

    Bytes count as text, too: some writers do not mark Parquet's BYTE_ARRAY as UTF8.
    """
    return bool(
        pt.is_string(arrow_type)
        or pt.is_large_string(arrow_type)
        or pt.is_binary(arrow_type)
        or pt.is_large_binary(arrow_type)
        or pt.is_string_view(arrow_type)
        or pt.is_binary_view(arrow_type)
    )


def has_views(arrow_type: pa.DataType) -> bool:
    """Return whether a type is or contains a view type of text or lists."""
    if pt.is_dictionary(arrow_type):
        return has_views(arrow_type.value_type)
    if is_list(arrow_type):
        is_view = pt.is_list_view(arrow_type) or pt.is_large_list_view(arrow_type)
        return is_view or has_views(arrow_type.value_type)
    return bool(pt.is_string_view(arrow_type) or pt.is_binary_view(arrow_type))


def without_views(column: pa.Array) -> pa.Array:
    """Convert views of text or lists in a column to ordinary types, because Arrow cannot take rows
    from views.
    """
    return with_values(column, _without_view) if has_views(column.type) else column


def _without_view(values: pa.Array) -> pa.Array:
    if not has_views(values.type):
        return values
    return values.cast(pa.string() if pt.is_string_view(values.type) else pa.binary())


def with_values(column: pa.Array, change: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """Change the values of a column, also those of its dictionary or in its lists.

    Lists are rebuilt from their lengths, not cast: Arrow's cast of list views gives other lists
    (pyarrow 26).

    Args:
        column: The column.
        change: Returns as many other values.
    """
    if pt.is_dictionary(column.type):
        values = with_values(column.dictionary, change)
        return pa.DictionaryArray.from_arrays(column.indices, values)
    if is_list(column.type):
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        bounds = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        mask = column.is_null() if column.null_count else None
        values = with_values(column.flatten(), change)
        return pa.LargeListArray.from_arrays(bounds, values, mask=mask)
    return change(column)


def value_type(arrow_type: pa.DataType) -> pa.DataType:
    """Return the type of the values, also for a dictionary-encoded column."""
    return arrow_type.value_type if pt.is_dictionary(arrow_type) else arrow_type


def id_type(arrow_type: pa.DataType) -> pa.DataType:
    """Return the type of the ids of a column with one id or a list of ids per row."""
    if is_list(arrow_type):
        return value_type(arrow_type.value_type)
    return value_type(arrow_type)  # a dictionary of lists has no ids


def is_number(arrow_type: pa.DataType) -> bool:
    """Return whether a column holds numbers or booleans."""
    return bool(
        pt.is_integer(arrow_type) or pt.is_floating(arrow_type) or pt.is_boolean(arrow_type)
    )


def is_uuid(arrow_type: pa.DataType) -> bool:
    """Return whether a column holds UUIDs, in Arrow's type for them."""
    return getattr(arrow_type, "extension_name", "") == "arrow.uuid"


def is_id(arrow_type: pa.DataType) -> bool:
    """Return whether values of this type can be ids: integers, whole floats and decimals, text,
    UUIDs, bytes of one length, nulls.
    """
    whole = pt.is_integer(arrow_type) or pt.is_floating(arrow_type)
    whole = whole or (pt.is_decimal(arrow_type) and arrow_type.scale == 0)
    bytes = pt.is_fixed_size_binary(arrow_type) or is_uuid(arrow_type)
    return bool(whole or bytes or is_text(arrow_type) or pt.is_null(arrow_type))


def spelled_ids(column: pa.Array) -> pa.Array:
    """Return ids that no integer of 64 bits holds as text: UUIDs in their canonical form, decimals
    by their digits if one of them is too large, bytes of one length as they are.
    """
    kind = column.type
    if is_uuid(kind):
        return texts_of_uuids(column)
    if pt.is_decimal(kind):
        with suppress(pa.ArrowInvalid):
            return column.cast(pa.int64())
        return column.cast(pa.string())
    return column.cast(pa.binary()) if pt.is_fixed_size_binary(kind) else column


def texts_of_uuids(column: pa.Array) -> pa.Array:
    """Return UUIDs as text such as 2c9e3d1a-0b5f-4e77-9a51-3f8f0c6b7d20, and other values as they
    are.
    """
    if not is_uuid(column.type):
        return column
    column = column.storage
    bytes_N16 = np.frombuffer(column.buffers()[1] or b"", np.uint8).reshape(-1, 16)
    bytes_N16 = bytes_N16[column.offset : column.offset + len(column)]
    text_NC = np.full((len(column), _UUID_SIGNS), ord("-"), np.uint8)
    for half, digits_N16 in enumerate((bytes_N16 >> 4, bytes_N16 & 15)):
        text_NC[:, _UUID_DIGITS[half::2]] = _HEX_DIGITS[digits_N16]
    bounds = np.arange(len(column) + 1, dtype=np.int64) * _UUID_SIGNS
    buffers = map(pa.py_buffer, (bounds, text_NC))
    texts = pa.LargeStringArray.from_buffers(len(column), *buffers)
    return pc.if_else(column.is_valid(), texts, None) if column.null_count else texts


# For unreadable types: the test of the type; the advice for ids, then another one for numbers.
_ADVICE: tuple[tuple[Callable[[pa.DataType], bool], tuple[str, ...]], ...] = (
    (
        pt.is_temporal,
        (
            "write the hour, the weekday or the day as an integer",
            "write the seconds, hours or days since a date as a number",
        ),
    ),
    (pt.is_decimal, ("cast it to int64 or string",)),
    (pt.is_struct, ("name its fields, each as COLUMN.FIELD",)),
    (pt.is_map, ("name the values of its keys, each as COLUMN.KEY",)),
    (pt.is_boolean, ("cast it to int64: 0 and 1",)),
    (
        is_list,
        (
            "write one list of ids a row",
            "write each number of its lists as a column, or name it in dataset.sparse if they hold "
            "ids",
        ),
    ),
)


def _instead(arrow_type: pa.DataType, use: str) -> str:
    """Return advice for a column of an unreadable type, after a semicolon; empty without advice.

    Args:
        arrow_type: The type of the column.
        use: The use of the column, as in `Schema.use`.
    """
    if use == "label":
        return "; write a column of 0 and 1"
    if use in ("time", "vector"):
        return ""
    holds_ids = use == "sparse feature"
    plain = id_type(arrow_type) if holds_ids else value_type(arrow_type)
    fitting = (advice[0 if holds_ids else -1] for fits, advice in _ADVICE if fits(plain))
    return "".join(f"; {advice}" for advice in islice(fitting, 1))


_Fits = tuple[Callable[[pa.DataType, pa.DataType], bool], str]
_NUMBERS: _Fits = (
    lambda value, _: any(fits(value) for fits in (is_number, pt.is_decimal, is_text, pt.is_null)),
    "numbers, or strings that spell numbers",
)
# By use, whether a column fits, by the type of its values and of the ids in them; and the same in
# words.
_USES: dict[str, _Fits] = {
    "sparse feature": (lambda _, inner: is_id(inner), "integers, text, or lists of those"),
    "time": (
        lambda value, _: is_id(value) or pt.is_timestamp(value) or pt.is_date(value),
        "timestamps, dates, or whole numbers",
    ),
    "vector": (
        lambda value, inner: (
            pt.is_null(value) or (is_list(value) and (is_number(inner) or pt.is_null(inner)))
        ),
        "lists of numbers",
    ),
    "id weight": (
        lambda _, inner: is_number(inner) or is_text(inner) or pt.is_null(inner),
        "numbers, strings that spell numbers, or lists of those",
    ),
}


def check_types(
    arrow_schema: pa.Schema, columns: Mapping[str, str], file: str, uses: Mapping[str, str]
) -> None:
    """Check the types of columns.

    Args:
        arrow_schema: The columns of the file.
        columns: Canonical name -> the file's own name.
        file: The file's name, for error messages.
        uses: The use of each canonical name, as in `Schema.use`.

    Raises:
        DataError: The type of a column does not fit its use.
    """
    for name, column in columns.items():
        own_type = arrow_schema.field(column).type
        arrow_type = value_type(own_type)
        use = uses[name]
        fits, allowed_types = _USES.get(use, _NUMBERS)
        if not fits(arrow_type, id_type(own_type)):
            raise DataError(
                f"{file}: column {column} ({use} {name}) has type {own_type}; allowed: "
                f"{allowed_types}{_instead(own_type, use)}"
            )
        if pt.is_fixed_size_list(arrow_type) and arrow_type.list_size == 0:
            raise DataError(
                f"{file}: column {column} ({use} {name}) has type {arrow_type}, lists "
                "of no values, which Arrow cannot read; write it as list or leave it out"
            )
