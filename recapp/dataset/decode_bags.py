"""Decode columns of lists to bags of ids, and the weights of these ids.

    history           history_weights          ids       weights
    [4, null, 9]      [.5, .1, 2]        ->    4 9       .5 2
    "4|9"             "1|0"              ->    4 9       1 0        dataset.separator={history: '|'}
    7                 .25                ->    7         .25        a bag of one

A missing id, padding and their weights are left out. Shapes: N rows, L values of lists.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from recapp.dataset.arrow_types import is_list, is_text, value_type
from recapp.dataset.decode import (
    BadValue,
    Float32Array,
    Int64Array,
    decode_ids,
    decode_numbers,
    refuse,
    without_dictionary,
)
from recapp.dataset.schema import Schema, TextIds
from recapp.errors import ConfigError
from recapp.sparse.missing_ids import MISSING


class IdWeights(NamedTuple):
    """The weights of the ids of a column, as they stand in their own column.

    Args:
        name: The column.
        weight_L: The weights, [L]; NaN where one is missing.
        length_N: The number of weights of each row, [N].
    """

    name: str
    weight_L: Float32Array
    length_N: Int64Array


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
    weights: IdWeights | None = None,
) -> tuple[Int64Array, Int64Array, Float32Array | None]:
    """Return the ids [L] and lengths [N] of a column of lists, and the weights [L] of the ids if
    they have some.

    A null list is an empty bag; null or empty elements and padding are skipped.

    Args:
        column: A list of ids for each row, or one id, which is a list of one.
        text: The rule for ids of text.
        null_is_id: Whether a null list is a bag with one missing id.
        padding: The id that fills lists up to a length; None for lists without.
        separator: What stands between the ids of a text; None if a text is one id.
        weights: The weights of the ids; None without.

    Raises:
        BadValue: A value is not an id, or a row has another number of ids than of weights; the
            index is that of its row (not of the element).
    """
    elements, lengths = _elements(column, separator)
    if weights is not None:
        refuse(
            weights.length_N != lengths,
            lambda n: (
                f"holds {lengths[n]} ids, and column {weights.name} {weights.length_N[n]} weights: "
                "write a weight for each id"
            ),
        )
    try:
        ids = decode_ids(elements, text)
    except BadValue as error:
        raise BadValue(_row_of(lengths, error.index), error.problem) from None
    weight_L = None if weights is None else weights.weight_L
    absent = ids == MISSING
    if padding is not None:
        absent |= ids == padding
    if weight_L is not None and weights is not None and (bad := np.isnan(weight_L) & ~absent).any():
        row = _row_of(lengths, int(bad.argmax()))
        raise BadValue(row, f"holds an id without a weight in column {weights.name}")
    if absent.any():
        sample_L = np.repeat(np.arange(len(lengths)), lengths)
        lengths = lengths - np.bincount(sample_L[absent], minlength=len(lengths))
        ids = ids[~absent]
        weight_L = None if weight_L is None else weight_L[~absent]
    if null_is_id and column.null_count:
        null_N = column.is_null().to_numpy(zero_copy_only=False)
        ids = np.insert(ids, (np.cumsum(lengths) - lengths)[null_N], MISSING)
        lengths = np.where(null_N, 1, lengths)
    return ids, lengths, weight_L


def decode_id_weights(column: pa.Array, name: str, separator: str | None) -> IdWeights:
    """Return the weights of ids.

    Args:
        column: A list of numbers for each row, or one number.
        name: The name of the column, for messages.
        separator: What stands between the numbers of a text; None if a text is one number.

    Raises:
        BadValue: A value is not a finite float32; the index is that of its row.
    """
    elements, lengths = _elements(column, separator)
    try:
        weight_L, missing_L = decode_numbers(elements)
    except BadValue as error:
        raise BadValue(_row_of(lengths, error.index), error.problem) from None
    if missing_L is not None:
        weight_L = np.where(missing_L, np.float32(np.nan), weight_L)
    return IdWeights(name, weight_L, lengths)


def _elements(column: pa.Array, separator: str | None) -> tuple[pa.Array, Int64Array]:
    """Return the values of lists, one list after the other, and the lengths of the lists, [N]."""
    if separator and is_text(value_type(column.type)):
        column = pc.split_pattern(without_dictionary(column), separator)
    if pt.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    if not is_list(column.type):
        return column, np.ones(len(column), dtype=np.int64)
    counts = pc.fill_null(pc.list_value_length(column), 0)
    return column.flatten(), counts.to_numpy(zero_copy_only=False).astype(np.int64)


def _row_of(length_N: Int64Array, element: int) -> int:
    return int(np.searchsorted(np.cumsum(length_N), element, side="right"))
