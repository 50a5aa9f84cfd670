"""Check that the types of a file's columns fit their uses in a schema."""

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.types as pt

from recapp.dataset.arrow_types import id_type, is_id, is_list, is_number, is_text, value_type
from recapp.errors import DataError


def _instead(arrow_type: pa.DataType, use: str) -> str:
    """Return advice for a column of an unreadable type, after a semicolon; empty without advice.

    Args:
        arrow_type: The type of the column.
        use: The use of the column, as in `Schema.use`.
    """
    plain = id_type(arrow_type) if use == "sparse feature" else value_type(arrow_type)
    if use == "label":
        return "; write a column of 0 and 1"
    if pt.is_temporal(plain):
        return (
            "; write the hour, the weekday or the day as an integer"
            if use == "sparse feature"
            else "; write the seconds, hours or days since a date as a number"
        )
    if pt.is_decimal(plain):
        return f"; cast it to {'int64 or string' if use == 'sparse feature' else 'float64'}"
    if pt.is_struct(plain):
        return "; write each of its fields as a column"
    if pt.is_map(plain):
        return "; write its keys as a list of ids"
    if pt.is_boolean(plain):
        return "; cast it to int64: 0 and 1"
    if pt.is_fixed_size_binary(plain):
        return "; cast it to binary, whose bytes are read as text"
    if is_list(plain) and use == "dense feature":
        return (
            "; write each number of its lists as a column, or name it in dataset.sparse if they "
            "hold ids"
        )
    if is_list(plain):
        return "; write one list of ids a row"
    return ""


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
        if use == "sparse feature":
            wanted = "integers, text, or lists of those"
            good = is_id(id_type(own_type))
        else:
            wanted = "numbers, or strings that spell numbers"
            good = is_number(arrow_type) or is_text(arrow_type) or pt.is_null(arrow_type)
        if not good:
            raise DataError(
                f"{file}: column {column} ({use} {name}) has type {own_type}; allowed: {wanted}"
                f"{_instead(own_type, use)}"
            )
        if pt.is_fixed_size_list(arrow_type) and arrow_type.list_size == 0:
            raise DataError(
                f"{file}: column {column} (sparse feature {name}) has type {arrow_type}, lists "
                "of no ids, which Arrow cannot read; write it as list or leave it out"
            )
