"""Arrow columns -> numpy columns: ids, numbers and labels in the ways that logs write them.

    98275684, "98275684"  integers, and text that spells one as it is printed ("-5"; not "007", "+5", "1e3")  -> itself
    "DE", "81ce-a2", "007"    any other text        -> XXH64 (seed 0) of its bytes, as int64 (`recapp/kernels/numba_text.py`)
    "" or null                missing               -> MISSING for an id, 0 for a number (after the transform's own rule)

So an id is the same whether a file keeps it as text or in any type of integers; a uint64 of 2^63 and more is what its text would be. -2^63
stands for missing ids, so as an id it is an error. Columns that the data set calls hexadecimal (Criteo's) are read otherwise:

    "05db9164"            up to 16 digits                 -> 98275684
    -1934120 (int32)      a 32-bit hash that lost its sign    -> + 2**32

Whole columns at a time, and a dictionary-encoded column once per dictionary where that is the shorter of the two. A value that
cannot be read raises `BadValue` with its index in the column; `collate` knows which file and row that is.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from recapp.dataset.schema import TextIds, is_text
from recapp.kernels.numba_text import ids_of_texts
from recapp.sparse.batch import MISSING

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

_RESERVED = "the one number that is no id: it stands for a missing one"
_NO_INTEGER = (
    "which is no integer; set dataset.id_rule=hash (or the id_rule of its table), under which any text is an id, or name the column in "
    "dataset.hex if it is hexadecimal"
)
_HEX_ONLY = "an id of a column that dataset.hex or dataset.naming calls hexadecimal has at most 16 hexadecimal digits"


class BadValue(Exception):
    """A value that cannot be read: its index in the column, and what is wrong with it."""

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(problem)
        self.index = index
        self.problem = problem


def decode_ids(column: pa.Array, text: TextIds = TextIds.HASHED) -> Int64Array:
    """Ids [N] of a column of integers or text, which is read as `text` says; MISSING where it is null or empty."""
    if pt.is_dictionary(column.type):
        return _ids_through_dictionary(column, text)
    kind = column.type
    if pt.is_null(kind):
        return np.full(len(column), MISSING, dtype=np.int64)
    if is_text(kind):
        return _from_hex(_as_text(column)) if text is TextIds.HEX else _from_text(column, text)
    if pt.is_floating(kind):
        return _from_whole_floats(column)
    missing = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    values = (column.fill_null(0) if column.null_count else column).to_numpy(zero_copy_only=False)
    if pt.is_int32(kind) and text is TextIds.HEX:
        values = values.view(np.uint32)
    if pt.is_uint64(kind) and text is not TextIds.HEX and len(values) and int(values.max()) >= 2**63:
        return _from_text(column.cast(pa.string()), text)
    ids: Int64Array = values.astype(np.int64)
    if pt.is_int64(kind) or pt.is_uint64(kind):
        _refuse_missing(ids, column)
    if missing is not None:
        ids[missing] = MISSING
    return ids


def decode_bags(column: pa.Array, text: TextIds = TextIds.HASHED) -> tuple[Int64Array, Int64Array]:
    """Ids [L] and lengths [N] of a column of lists; a null list is an empty bag, a null or empty element no id.

    A bad value is told by the index of its row, not of the element.
    """
    if pt.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    try:
        ids = decode_ids(column.flatten(), text)
    except BadValue as error:
        raise BadValue(int(np.searchsorted(np.cumsum(lengths), error.index, side="right")), error.problem) from None
    absent = ids == MISSING
    if absent.any():
        sample_L = np.repeat(np.arange(len(lengths)), lengths)
        lengths = lengths - np.bincount(sample_L[absent], minlength=len(lengths))
        ids = ids[~absent]
    return ids, lengths


def decode_numbers(column: pa.Array) -> tuple[Float32Array, BoolArray | None]:
    """Numbers [N] of a column of numbers or of text that spells them, and which are missing (None: none); those are 0."""
    values, missing = _numbers(column)
    with np.errstate(over="ignore"):  # 1e300 becomes infinity, which is refused below
        numbers: Float32Array = values.astype(np.float32, copy=False)
    finite = np.isfinite(numbers)
    if not finite.all():
        index = int(np.argmin(finite))
        raise BadValue(index, f"holds {values[index]}, which is not finite")
    return numbers, missing


def decode_labels(column: pa.Array) -> Float32Array:
    """Labels [N], each exactly 0 or 1."""
    values, missing = _numbers(column)
    bad = (values != 0) & (values != 1)
    if missing is not None:
        bad |= missing
    if bad.any():
        index = int(np.argmax(bad))
        raise BadValue(index, f"holds {_shown(column[index])}; a label must be 0 or 1")
    labels: Float32Array = values.astype(np.float32, copy=False)
    return labels


def _numbers(column: pa.Array) -> tuple[npt.NDArray[Any], BoolArray | None]:
    """Numbers [N] in the type that the column has them in, and which are missing; those are 0."""
    if pt.is_dictionary(column.type):
        return _numbers_through_dictionary(column)
    if pt.is_null(column.type):
        return np.zeros(len(column), dtype=np.float32), np.ones(len(column), dtype=np.bool_)
    if is_text(column.type):
        column = _spelled_numbers(_as_text(column))
    missing = None
    if column.null_count:
        missing = column.is_null().to_numpy(zero_copy_only=False)
        column = column.fill_null(False if pt.is_boolean(column.type) else 0)
    return column.to_numpy(zero_copy_only=False), missing


def _ids_through_dictionary(column: pa.DictionaryArray, text: TextIds) -> Int64Array:
    """Decode the dictionary and look values up, unless it is longer than the column (a large row group read in parts)."""
    codes = _codes(column)
    if len(column.dictionary) <= len(column):
        try:
            values = np.append(decode_ids(column.dictionary, text), MISSING)
            found: Int64Array = values[codes]
            return found
        except BadValue:
            pass  # the plain column below knows which row it is, and whether any row here has it
    return decode_ids(column.dictionary_decode(), text)


def _numbers_through_dictionary(column: pa.DictionaryArray) -> tuple[npt.NDArray[Any], BoolArray | None]:
    codes = _codes(column)
    if len(column.dictionary) > len(column):
        return _numbers(column.dictionary_decode())
    try:
        values, missing = _numbers(column.dictionary)
    except BadValue:
        return _numbers(column.dictionary_decode())
    absent = np.zeros(len(values), dtype=np.bool_) if missing is None else missing
    absent_N = np.append(absent, True)[codes]
    return np.append(values, values.dtype.type(0))[codes], absent_N if absent_N.any() else None


def _codes(column: pa.DictionaryArray) -> npt.NDArray[Any]:
    """Indices into the dictionary [N]; a null becomes the entry behind the last.

    A damaged page may hold any index, and Arrow looks none of them up here.
    """
    indices, entries = column.indices, len(column.dictionary)
    if indices.null_count:
        indices = indices.fill_null(entries)
    codes: npt.NDArray[Any] = indices.to_numpy(zero_copy_only=False)
    unsigned = codes.view(f"u{codes.itemsize}")
    if len(codes) and int(unsigned.max()) >= entries + bool(column.indices.null_count):
        raise BadValue(int(unsigned.argmax()), "is damaged: its page's dictionary has no such entry; write the file again or leave it out")
    return codes


def _from_whole_floats(column: pa.Array) -> Int64Array:
    """Integers that a tool stored as floats because some were missing (NaN or null)."""
    values = column.cast(pa.float64()).fill_null(np.nan).to_numpy(zero_copy_only=False)
    missing = np.isnan(values)
    whole = np.where(missing, 0.0, values)
    good = (whole == np.floor(whole)) & (np.abs(whole) < 2**53)
    if not good.all():
        index = int(np.argmin(good))
        raise BadValue(index, f"holds {values[index]}; an id must be an integer or text")
    ids: Int64Array = whole.astype(np.int64)
    ids[missing] = MISSING
    return ids


def _refuse_missing(ids: Int64Array, column: pa.Array) -> None:
    """An id that is the number that stands for missing ones would change its meaning."""
    if len(ids) and int(ids.min()) == MISSING:
        raise BadValue(int(np.argmin(ids)), f"holds {_shown(column[int(np.argmin(ids))])}, {_RESERVED}")


def _from_text(column: pa.Array, text: TextIds) -> Int64Array:
    """Ids of text that is not hexadecimal; bytes that are no UTF-8 are hashed as they are."""
    if column.null_count:
        column = column.fill_null(pa.scalar(b"", pa.binary()).cast(column.type))
    ids = np.empty(len(column), dtype=np.int64)
    bad = ids_of_texts(*_bytes_and_bounds(column), text is TextIds.INTEGERS, ids)
    if bad >= 0:
        shown = _shown(column[int(bad)])
        raise BadValue(int(bad), f"holds {shown}, {_RESERVED if shown == repr(str(MISSING)) else _NO_INTEGER}")
    return ids


def _shown(value: pa.Scalar) -> str:
    """A value for a message; of text at most 40 characters, as bytes where it is no UTF-8."""
    if not value.is_valid or not is_text(value.type):
        return repr(value.as_py())
    content: bytes = value.as_buffer().to_pybytes()
    try:
        return repr(content.decode()[:40])
    except UnicodeDecodeError:
        return repr(content[:40])


def _as_text(column: pa.Array) -> pa.Array:
    """Bytes that were not marked as text, as text: what is none spells neither a number nor an id and is found there."""
    if pt.is_binary(column.type) or pt.is_large_binary(column.type):
        return column.cast(pa.large_string() if pt.is_large_binary(column.type) else pa.string(), safe=False)
    return column


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
    if width > 8 and len(number) and int(number.min()) == MISSING:
        index = int(np.flatnonzero(present)[int(np.argmin(number))])
        raise BadValue(index, f"holds {_shown(column[index])}, {_RESERVED}")
    ids[present] = number
    return ids


def _text_bytes(column: pa.Array) -> npt.NDArray[np.uint8]:
    """The characters of a text column, one value behind the other, where Arrow keeps them."""
    data, bounds = _bytes_and_bounds(column)
    return data[int(bounds[0]) : int(bounds[-1])]


def _bytes_and_bounds(column: pa.Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]:
    """The buffer of a text column's characters, and where each value begins and the last one ends in it [N + 1]; both read-only."""
    _, offsets, data = column.buffers()
    kind = np.int64 if pt.is_large_string(column.type) or pt.is_large_binary(column.type) else np.int32
    bounds = np.frombuffer(offsets, dtype=kind, count=len(column) + 1, offset=column.offset * np.dtype(kind).itemsize)
    values = np.frombuffer(data or b"", dtype=np.uint8)
    bounds.flags.writeable = values.flags.writeable = False  # the kernel is compiled for one kind of array
    return values, bounds


def _not_hex(column: pa.Array, index: int) -> BadValue:
    return BadValue(index, f"holds {_shown(column[index])}; {_HEX_ONLY}")


def _spelled_numbers(column: pa.Array) -> pa.Array:
    """Strings to float64, "" to null."""
    filled = pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column)
    try:
        return filled.cast(pa.float64())
    except pa.ArrowInvalid:
        index = _first_unspelled(filled)
        raise BadValue(index, f"holds {_shown(filled[index])}, which is not a number") from None


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
