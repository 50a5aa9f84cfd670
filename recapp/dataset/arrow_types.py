"""What Arrow's types are good for here."""

import pyarrow as pa
import pyarrow.types as pt


def is_list(arrow_type: pa.DataType) -> bool:
    """Whether a column holds a list (a bag of ids) per row."""
    return bool(
        pt.is_list(arrow_type) or pt.is_large_list(arrow_type) or pt.is_fixed_size_list(arrow_type)
    )


def is_text(arrow_type: pa.DataType) -> bool:
    """Whether a column holds text, also where its writer did not mark it as such (Parquet's
    BYTE_ARRAY without UTF8).
    """
    return bool(
        pt.is_string(arrow_type)
        or pt.is_large_string(arrow_type)
        or pt.is_binary(arrow_type)
        or pt.is_large_binary(arrow_type)
    )


def value_type(arrow_type: pa.DataType) -> pa.DataType:
    """The type of the values themselves, whether dictionary-encoded or not."""
    return arrow_type.value_type if pt.is_dictionary(arrow_type) else arrow_type


def id_type(arrow_type: pa.DataType) -> pa.DataType:
    """The type of the ids of a column, whether it has one a row or lists of them."""
    inner = value_type(arrow_type)
    return value_type(inner.value_type) if is_list(inner) else inner


def is_number(arrow_type: pa.DataType) -> bool:
    """Whether a column holds numbers, or booleans."""
    return bool(
        pt.is_integer(arrow_type) or pt.is_floating(arrow_type) or pt.is_boolean(arrow_type)
    )


def is_id(arrow_type: pa.DataType) -> bool:
    """Whether values of this type can be ids: integers, floats that may be whole, text, nulls."""
    whole = pt.is_integer(arrow_type) or pt.is_floating(arrow_type)
    return bool(whole or is_text(arrow_type) or pt.is_null(arrow_type))
