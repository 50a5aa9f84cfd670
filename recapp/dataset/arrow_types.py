"""Test the uses of an Arrow type: list, text, number, id."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt


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

    Lists are rebuilt from their lengths, not cast: Arrow's cast of list views gives other lists
    (pyarrow 26).
    """
    kind = column.type
    if not has_views(kind):
        return column
    if pt.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(column.indices, without_views(column.dictionary))
    if is_list(kind):
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        bounds = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        mask = column.is_null() if column.null_count else None
        return pa.LargeListArray.from_arrays(bounds, without_views(column.flatten()), mask=mask)
    return column.cast(pa.string() if pt.is_string_view(kind) else pa.binary())


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


def is_id(arrow_type: pa.DataType) -> bool:
    """Return whether values of this type can be ids: integers, whole floats, text, nulls."""
    whole = pt.is_integer(arrow_type) or pt.is_floating(arrow_type)
    return bool(whole or is_text(arrow_type) or pt.is_null(arrow_type))
