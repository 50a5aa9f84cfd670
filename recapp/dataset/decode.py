"""Arrow columns -> numpy columns: ids, numbers and labels in the ways that logs write them.

    "05db9164"            hexadecimal, up to 16 digits    -> 98275684
    98275684, -1934120    integers; a negative int32 is a 32-bit hash that lost its sign: + 2**32
    "" or null            missing                         -> MISSING for an id, 0 for a number (after the transform's own rule)

Whole columns at a time, and a dictionary-encoded column once per dictionary where that is the shorter of the two. A value that
cannot be read raises `BadValue` with its index in the column; `collate` knows which file and row that is.
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from recapp.dataset.schema import is_text
from recapp.sparse.batch import MISSING

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


class BadValue(Exception):
    """A value that cannot be read: its index in the column, and what is wrong with it."""

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(problem)
        self.index = index
        self.problem = problem


def decode_ids(column: pa.Array) -> Int64Array:
    """Ids [N] of a column of integers or hexadecimal strings; MISSING where it is null or empty."""
    if pt.is_dictionary(column.type):
        return _ids_through_dictionary(column)
    kind = column.type
    if pt.is_null(kind):
        return np.full(len(column), MISSING, dtype=np.int64)
    if is_text(kind):
        return _from_hex(_as_text(column))
    if pt.is_floating(kind):
        return _from_whole_floats(column)
    missing = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    values = (column.fill_null(0) if column.null_count else column).to_numpy(zero_copy_only=False)
    if pt.is_int32(kind):
        values = values.view(np.uint32)
    ids: Int64Array = values.astype(np.int64)
    if missing is not None:
        ids[missing] = MISSING
    return ids


def decode_bags(column: pa.Array) -> tuple[Int64Array, Int64Array]:
    """Ids [L] and lengths [N] of a column of lists; a null list is an empty bag, a null or empty element no id."""
    if pt.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    ids = decode_ids(column.flatten())
    absent = ids == MISSING
    if absent.any():
        sample_L = np.repeat(np.arange(len(lengths)), lengths)
        lengths = lengths - np.bincount(sample_L[absent], minlength=len(lengths))
        ids = ids[~absent]
    return ids, lengths


def decode_numbers(column: pa.Array) -> tuple[Float32Array, npt.NDArray[np.bool_] | None]:
    """Numbers [N] of a column of numbers or of strings that spell them, and which are missing (None: none); those are 0."""
    if pt.is_dictionary(column.type):
        return _numbers_through_dictionary(column)
    if pt.is_null(column.type):
        return np.zeros(len(column), dtype=np.float32), np.ones(len(column), dtype=np.bool_)
    if is_text(column.type):
        column = _spelled_numbers(_as_text(column))
    missing = None
    if column.null_count:
        missing = column.is_null().to_numpy(zero_copy_only=False)
        column = column.fill_null(0)
    with np.errstate(over="ignore"):  # 1e300 becomes infinity, which is refused below
        values = column.to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    finite = np.isfinite(values)
    if not finite.all():
        index = int(np.argmin(finite))
        raise BadValue(index, f"holds {column[index].as_py()}, which is not finite")
    return values, missing


def decode_labels(column: pa.Array) -> Float32Array:
    """Labels [N], each 0 or 1."""
    values, missing = decode_numbers(column)
    bad = (values != 0) & (values != 1)
    if missing is not None:
        bad |= missing
    if bad.any():
        index = int(np.argmax(bad))
        raise BadValue(index, f"holds {column[index].as_py()!r}; a label must be 0 or 1")
    return values


def _ids_through_dictionary(column: pa.DictionaryArray) -> Int64Array:
    """Decode the dictionary and look values up, unless it is longer than the column (a large row group read in parts)."""
    if len(column.dictionary) <= len(column):
        try:
            values = np.append(decode_ids(column.dictionary), MISSING)
            found: Int64Array = values[_codes(column)]
            return found
        except BadValue:
            pass  # the plain column below knows which row it is, and whether any row here has it
    return decode_ids(column.dictionary_decode())


def _numbers_through_dictionary(column: pa.DictionaryArray) -> tuple[Float32Array, npt.NDArray[np.bool_] | None]:
    if len(column.dictionary) > len(column):
        return decode_numbers(column.dictionary_decode())
    try:
        values, missing = decode_numbers(column.dictionary)
    except BadValue:
        return decode_numbers(column.dictionary_decode())
    codes = _codes(column)
    absent = np.zeros(len(values), dtype=np.bool_) if missing is None else missing
    absent_N = np.append(absent, True)[codes]
    return np.append(values, np.float32(0))[codes], absent_N if absent_N.any() else None


def _codes(column: pa.DictionaryArray) -> Int64Array:
    """Indices into the dictionary [N]; a null becomes the entry behind the last."""
    indices = column.indices
    if indices.null_count:
        indices = indices.fill_null(len(column.dictionary))
    codes: Int64Array = indices.to_numpy(zero_copy_only=False)
    return codes


def _from_whole_floats(column: pa.Array) -> Int64Array:
    """Integers that a tool stored as floats because some were missing (NaN or null)."""
    values = column.cast(pa.float64()).fill_null(np.nan).to_numpy(zero_copy_only=False)
    missing = np.isnan(values)
    whole = np.where(missing, 0.0, values)
    good = (whole == np.floor(whole)) & (np.abs(whole) < 2**53)
    if not good.all():
        index = int(np.argmin(good))
        raise BadValue(index, f"holds {values[index]}; an id must be an integer or a hexadecimal string")
    ids: Int64Array = whole.astype(np.int64)
    ids[missing] = MISSING
    return ids


def _as_text(column: pa.Array) -> pa.Array:
    """Bytes as text, where they are ASCII (digits are); a copy of nothing."""
    if pt.is_string(column.type) or pt.is_large_string(column.type):
        return column
    try:
        return column.cast(pa.large_string() if pt.is_large_binary(column.type) else pa.string())
    except pa.ArrowInvalid:
        values = column.to_pylist()
        index = next(i for i, value in enumerate(values) if value is not None and not value.isascii())
        raise BadValue(index, f"holds the bytes {values[index][:20]!r}, which are no text") from None


def _hex_pairs() -> npt.NDArray[np.int16]:
    """Value of two hexadecimal digits, by the 16-bit word they make in memory; -1 for any other two bytes."""
    digits = np.full(256, -1, dtype=np.int16)
    for value, (lower, upper) in enumerate(zip(b"0123456789abcdef", b"0123456789ABCDEF", strict=True)):
        digits[lower] = digits[upper] = value
    words = np.arange(65536, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
    high, low = digits[words[:, 0]], digits[words[:, 1]]
    return np.where((high < 0) | (low < 0), np.int16(-1), high * np.int16(16) + low)


_HEX_PAIRS = _hex_pairs()


def _from_hex(column: pa.Array) -> Int64Array:
    """Ids of hexadecimal strings of at most 16 digits; eight digits each, as Criteo writes them, need no copy of the text."""
    if column.null_count:
        column = column.fill_null("")
    lengths = pc.binary_length(column).to_numpy(zero_copy_only=False)
    present = lengths > 0
    if ((lengths == 8) | ~present).all():
        values, width = _text_bytes(column), 8
    else:
        if int(lengths.max()) > 16:
            raise _not_hex(column, int(np.argmax(lengths > 16)))
        text = pc.ascii_lpad(column.filter(pa.array(present)), width=16, padding="0")
        values, width = _text_bytes(text), 16
    pairs = _HEX_PAIRS[values.view(np.uint16).reshape(-1, width // 2)]
    if pairs.size and int(pairs.min()) < 0:
        raise _not_hex(column, int(np.flatnonzero(present)[int(np.argmax((pairs < 0).any(axis=1)))]))
    ids = np.full(len(column), MISSING, dtype=np.int64)
    number = np.zeros(len(pairs), dtype=np.int64)
    for place in range(width // 2):
        number = (number << 8) | pairs[:, place]
    ids[present] = number
    return ids


def _text_bytes(column: pa.Array) -> npt.NDArray[np.uint8]:
    """The characters of a string column, one value behind the other, where Arrow keeps them."""
    _, offsets, data = column.buffers()
    kind = np.int64 if pt.is_large_string(column.type) else np.int32
    bounds = np.frombuffer(offsets, dtype=kind, count=len(column) + 1, offset=column.offset * np.dtype(kind).itemsize)
    first, last = int(bounds[0]), int(bounds[-1])
    if data is None or first == last:
        return np.zeros(0, dtype=np.uint8)
    return np.frombuffer(data, dtype=np.uint8, count=last - first, offset=first)


def _not_hex(column: pa.Array, index: int) -> BadValue:
    return BadValue(index, f"holds {column[index].as_py()[:40]!r}; an id must be an integer or at most 16 hexadecimal digits")


def _spelled_numbers(column: pa.Array) -> pa.Array:
    """Strings to float64, "" to null."""
    filled = pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column)
    try:
        return filled.cast(pa.float64())
    except pa.ArrowInvalid:
        index = _first_unspelled(filled)
        raise BadValue(index, f"holds {filled[index].as_py()[:40]!r}, which is not a number") from None


def _first_unspelled(column: pa.Array) -> int:
    """Index of the first string that is no number, by halving."""
    first, last = 0, len(column)
    while last - first > 1:
        middle = (first + last) // 2
        try:
            column.slice(first, middle - first).cast(pa.float64())
            first = middle
        except pa.ArrowInvalid:
            last = middle
    return first
