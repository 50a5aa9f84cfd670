"""Convert text columns of Arrow to ids and numbers, with errors for other values.

Text is strings, and bytes that their writer did not mark as strings. Functions read whole columns
in Arrow's own buffers: the characters of all values, one value after the other, and the bounds
between values.
"""

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from recapp.dataset.arrow_types import is_text
from recapp.dataset.schema import TextIds
from recapp.errors import DataError
from recapp.sparse.keyed_jagged_tensor import MISSING

Int64Array = npt.NDArray[np.int64]

RESERVED = "the one number that is no id: it stands for a missing one"
_NO_INTEGER = (
    "which is no integer; set dataset.id_rule=hash (or the id_rule of its table), under which any "
    "text is an id, or name the column in dataset.hex if it is hexadecimal"
)
_HEX_ONLY = (
    "an id of a column that dataset.hex or dataset.naming calls hexadecimal has at most 16 "
    "hexadecimal digits"
)


class BadValue(Exception):
    """The error for an unreadable value.

    Args:
        index: The index of the value in the column.
        problem: The fault of the value, in words.
    """

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(problem)
        self.index = index
        self.problem = problem


def refuse(bad_N: npt.NDArray[np.bool_], problem: Callable[[int], str]) -> None:
    """Refuse a column with bad values.

    Args:
        bad_N: A mask of bad values, [N].
        problem: Returns the fault of the value at an index, in words.

    Raises:
        BadValue: A value is bad; the error names the first one.
    """
    if bad_N.any():
        index = int(np.argmax(bad_N))
        raise BadValue(index, problem(index))


def ids_of_text(column: pa.Array, text: TextIds) -> Int64Array:
    """Return the ids of text that is not hexadecimal, [N].

    Bytes that are not UTF-8 are hashed unchanged.

    Args:
        column: Text; a null is an empty text.
        text: Whether to hash or to refuse text that spells no integer.

    Raises:
        BadValue: A text must spell an integer but does not, or spells MISSING.
    """
    if column.null_count:
        column = column.fill_null(pa.scalar(b"", pa.binary()).cast(column.type))
    ids = np.empty(len(column), dtype=np.int64)
    bad = _kernel()(*_bytes_and_bounds(column), text is TextIds.INTEGERS, ids)
    if bad >= 0:
        value = shown(column[int(bad)])
        raise BadValue(
            int(bad), f"holds {value}, {RESERVED if value == repr(str(MISSING)) else _NO_INTEGER}"
        )
    return ids


@lru_cache(None)
def _kernel() -> Callable[..., int]:
    """Import the compiled loop that makes ids of text; columns of integers need no numba."""
    if not find_spec("numba"):
        raise DataError("columns of text ids need numba, which is not there: pip install numba")
    from recapp.kernels.numba_text import ids_of_texts

    return ids_of_texts


def shown(value: pa.Scalar) -> str:
    """Return a value as text for a message.

    Text is cut to 40 characters; text that is not UTF-8 is shown as bytes.
    """
    if not value.is_valid or not is_text(value.type):
        return repr(value.as_py())
    content: bytes = value.as_buffer().to_pybytes()
    try:
        return repr(content.decode()[:40])
    except UnicodeDecodeError:
        return repr(content[:40])


def as_text(column: pa.Array) -> pa.Array:
    """Return a column of unmarked bytes as text; bytes other than UTF-8 spell nothing."""
    if pt.is_binary(column.type) or pt.is_large_binary(column.type):
        return column.cast(
            pa.large_string() if pt.is_large_binary(column.type) else pa.string(), safe=False
        )
    return column


def _hex_pairs() -> npt.NDArray[np.int16]:
    """Return the value of two hexadecimal digits by the 16-bit word of their bytes, [65536].

    The value is -1 for any other two bytes.
    """
    digits = np.full(256, -1, dtype=np.int16)
    digits[[*b"0123456789abcdefABCDEF"]] = [*range(16), *range(10, 16)]
    words = np.arange(65536, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
    high = digits[words[:, 0]]
    low = digits[words[:, 1]]
    return np.where((high < 0) | (low < 0), np.int16(-1), high * np.int16(16) + low)


_HEX_PAIRS = _hex_pairs()


def ids_of_hex(column: pa.Array) -> Int64Array:
    """Return the ids of hexadecimal strings of at most 16 digits, [N].

    Strings of eight digits, as in Criteo's logs, need no copy of the text.

    Raises:
        BadValue: A string is not hexadecimal, is longer, or spells MISSING.
    """
    if column.null_count:
        column = column.fill_null("")
    lengths = pc.binary_length(column).to_numpy(zero_copy_only=False)
    present = lengths > 0
    if ((lengths == 8) | ~present).all():
        values = _text_bytes(column)
        width = 8
    else:
        if int(lengths.max()) > 16:
            raise _not_hex(column, int(np.argmax(lengths > 16)))
        text = pc.ascii_lpad(column.filter(pa.array(present)), width=16, padding="0")
        values = _text_bytes(text)
        width = 16
    pairs = _HEX_PAIRS[values.view(np.uint16).reshape(-1, width // 2)]
    if pairs.size and int(pairs.min()) < 0:
        raise _not_hex(
            column, int(np.flatnonzero(present)[int(np.argmax((pairs < 0).any(axis=1)))])
        )
    ids = np.full(len(column), MISSING, dtype=np.int64)
    number = np.zeros(len(pairs), dtype=np.int64)
    for pair in range(width // 2):
        number = (number << 8) | pairs[:, pair]
    if width > 8 and len(number) and int(number.min()) == MISSING:
        index = int(np.flatnonzero(present)[int(np.argmin(number))])
        raise BadValue(index, f"holds {shown(column[index])}, {RESERVED}")
    ids[present] = number
    return ids


def _text_bytes(column: pa.Array) -> npt.NDArray[np.uint8]:
    data, bounds = _bytes_and_bounds(column)
    return data[int(bounds[0]) : int(bounds[-1])]


def _bytes_and_bounds(column: pa.Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]:
    """Return the buffer of a text column's characters and the values' bounds in it, [N + 1].

    Both are read-only.
    """
    _, offsets, data = column.buffers()
    kind = (
        np.int64 if pt.is_large_string(column.type) or pt.is_large_binary(column.type) else np.int32
    )
    if len(column):
        start = column.offset * np.dtype(kind).itemsize
        bounds = np.frombuffer(offsets, dtype=kind, count=len(column) + 1, offset=start)
    else:  # other programs may write no bounds at all
        bounds = np.zeros(1, kind)
    values = np.frombuffer(data or b"", dtype=np.uint8)
    # The kernel is compiled only for read-only arrays.
    bounds.flags.writeable = False
    values.flags.writeable = False
    return values, bounds


def _not_hex(column: pa.Array, index: int) -> BadValue:
    return BadValue(index, f"holds {shown(column[index])}; {_HEX_ONLY}")


def spelled_numbers(column: pa.Array) -> pa.Array:
    """Convert strings to float64, and empty strings to null.

    Raises:
        BadValue: A string is not a number.
    """
    texts = pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column)
    if _spells_numbers(texts):
        return texts.cast(pa.float64())
    index = next(i for i in range(len(texts)) if not _spells_numbers(texts.slice(i, 1)))
    raise BadValue(index, f"holds {shown(texts[index])}, which is not a number")


def _spells_numbers(column: pa.Array) -> bool:
    try:
        column.cast(pa.float64())
    except pa.ArrowInvalid:
        return False
    return True
