"""Decode Arrow columns of ids, numbers and labels, in the forms of real logs, to numpy columns.

    98275684, "98275684"     an integer, or text that spells one as it is printed    -> itself
    "DE", "81ce-a2", "007"   any other text    -> XXH64, seed 0, of its bytes as an int64
    "" or null               missing           -> MISSING for an id, 0 for a number

So an id is the same whether a file stores it as text or as any integer type; a uint64 or a decimal
of 2^63 or more is read like its text, and so is a UUID. Bytes of one length are read like others.
-2^63 stands for missing ids, so as an id it is an error. Columns that the data set declares as
hexadecimal (Criteo's) are read differently:

    "05db9164"               up to 16 digits                     -> 98275684
    -1934120 (int32)         a 32-bit hash that lost its sign    -> + 2**32

Functions decode whole columns, in Arrow's own buffers: of text, the characters of all values, one
value after the other, and the bounds between values. Text is strings, and bytes that their writer
did not mark as strings. `ColumnPlaces` writes the usual columns of a chunk by few compiled calls
(`recapp/dataset/compiled_values.py`), and leaves the others to the functions. An unreadable value
raises `BadValue` with its index in the column; `collate` adds the file and the row.

Shapes: N rows of a column, L ids of a column of lists, D columns of a vector.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from recapp.dataset.arrow_types import is_text, spelled_ids, value_type
from recapp.dataset.data_settings import DAY_SECONDS
from recapp.dataset.schema import TextIds
from recapp.errors import DataError
from recapp.sparse.missing_ids import MISSING

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

RESERVED = ", the one number that is no id: it stands for a missing one"
_SPELL_MISSING = (repr(str(MISSING)), repr(f"{-MISSING:x}"))
_NO_INTEGER = (
    ", which is no integer; set dataset.id_rule=hash (or the id_rule of its table), under which "
    "any text is an id, or name the column in dataset.hex if it is hexadecimal"
)
_HEX_ONLY = (
    "; an id of a column that dataset.hex or dataset.naming calls hexadecimal has at most 16 "
    "hexadecimal digits"
)
# Arrays of the numpy types of Arrow's, by its numbers of types, for columns that are decoded in one
# pass.
_INTEGERS = {
    kind.id: np.zeros(0, kind.to_pandas_dtype())
    for kind in (
        *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
        *(pa.uint8(), pa.uint16(), pa.uint32()),
    )
}
_NUMBERS = _INTEGERS | {
    kind.id: np.zeros(0, kind.to_pandas_dtype())
    for kind in (pa.uint64(), pa.float32(), pa.float64())
}
# Text, plain and in dictionaries, by the type of its bounds.
_OF_DICTIONARY = 1000  # beyond Arrow's numbers of types
_TEXTS = {
    of + kind.id: np.zeros(0, size)
    for of in (0, _OF_DICTIONARY)
    for kind, size in (
        *((pa.string(), np.int32), (pa.binary(), np.int32)),
        *((pa.large_string(), np.int64), (pa.large_binary(), np.int64)),
    )
}
# The rules of `recapp/dataset/compiled_values.py`; numbers have none.
_RULES = {TextIds.HASHED: 0, TextIds.INTEGERS: 1, TextIds.HEX: 2, None: None}
_INT32 = pa.int32().id
_UINT32 = pa.uint32().id
_DICTIONARY = pa.dictionary(pa.int32(), pa.string()).id
_address_of = ctypes.pythonapi.PyCapsule_GetPointer
_address_of.restype = ctypes.c_void_p
_address_of.argtypes = ctypes.py_object, ctypes.c_char_p
# The ticks of each unit of time in a second.
TICKS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}

_FINITE = " in 32 bits; write a number up to 3.4e38, or null where it is missing, which counts as 0"
_LABEL = (
    ": write 1 for what counts as a click (such as a rating of 4 or more), 0 for what does not; "
    "or set dataset.label_from=4"
)
_UNKNOWN = "; where it is unknown, write 0 and a weight of 0 (dataset.weight={label: column})"
_ID = ": write a whole number, or use the column as a dense feature"
_NO_ENTRY = (
    "is damaged: its page's dictionary has no such entry; write the file again or leave it out"
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
    """Return the ids of text, [N]; MISSING for a null or empty one.

    Bytes that are not UTF-8 are hashed unchanged.

    Args:
        column: The text.
        text: The rule for its ids.

    Raises:
        BadValue: A text is not as the rule wants it, or spells MISSING.
    """
    ids_1N = np.empty((1, len(column)), dtype=np.int64)
    number_1 = np.zeros(1, dtype=np.int64)
    places = ColumnPlaces.of(pa.record_batch([column], [""]))
    bad_1 = compiled_texts().decode_texts(
        places.address, number_1, number_1, _TEXTS[places.kinds[0]], _RULES[text], MISSING, ids_1N
    )
    if (bad := int(bad_1[0])) >= 0:
        value = shown(column[bad])
        problem = _HEX_ONLY if text is TextIds.HEX else _NO_INTEGER
        raise BadValue(bad, f"holds {value}{RESERVED if value in _SPELL_MISSING else problem}")
    ids: Int64Array = ids_1N[0]
    return ids


@lru_cache(None)
def compiled_texts() -> Any:
    """Import the compiled loops over text; columns of integers need no numba."""
    if not find_spec("numba"):
        raise DataError("text ids and crosses need numba, which is not there: pip install numba")
    from recapp.dataset import compiled_values

    return compiled_values


@lru_cache(None)
def compiled() -> Any:
    """Import the compiled loops over columns; plans on paper need no numba."""
    from recapp.dataset import compiled_columns

    return compiled_columns


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


def spelled_numbers(column: pa.Array) -> pa.Array:
    """Convert strings to float64, and empty strings to null.

    Raises:
        BadValue: A string is not a number.
    """
    texts = pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column)
    with suppress(pa.ArrowInvalid):
        return texts.cast(pa.float64())
    index = next(i for i in range(len(texts)) if not _spells_numbers(texts.slice(i, 1)))
    raise BadValue(index, f"holds {shown(texts[index])}, which is not a number")


def _spells_numbers(column: pa.Array) -> bool:
    try:
        column.cast(pa.float64())
    except pa.ArrowInvalid:
        return False
    return True


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
    column = spelled_ids(without_dictionary(column))
    kind = column.type
    if pt.is_null(kind):
        return np.full(len(column), MISSING, dtype=np.int64)
    if is_text(kind):
        return ids_of_text(column, text)
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
    ids: Int64Array = values.astype(np.int64)
    if (pt.is_int64(kind) or pt.is_uint64(kind)) and len(ids) and int(ids.min()) == MISSING:
        refuse(ids == MISSING, lambda index: f"holds {shown(column[index])}{RESERVED}")
    if missing is not None:
        ids[missing] = MISSING
    return ids


class ColumnPlaces(NamedTuple):
    """Where the columns of a record batch lie, by Arrow's C data interface.

    Args:
        numbers: The number of each column, by name.
        kinds: Arrow's number of each column's type.
        address: The address of the record batch.
        owner: What keeps the address valid.
    """

    numbers: dict[str, int]
    kinds: list[int]
    address: int
    owner: object

    @staticmethod
    def of(batch: pa.RecordBatch) -> "ColumnPlaces":
        """Find the columns of a record batch, which must be kept meanwhile."""
        numbers = {name: number for number, name in enumerate(batch.schema.names)}
        kinds = [
            kind.value_type.id + _OF_DICTIONARY
            if kind.id == _DICTIONARY and kind.index_type.id == _INT32
            else kind.id
            for kind in batch.schema.types
        ]
        _, owner = batch.__arrow_c_array__()
        return ColumnPlaces(numbers, kinds, _address_of(owner, b"arrow_array"), owner)

    def write(
        self, names: Sequence[str], texts: Sequence[Any], absent: float, out_SN: npt.NDArray[Any]
    ) -> list[int]:
        """Write columns of integers, floats or text, those of one type in one pass.

        Args:
            names: The columns.
            texts: The rule for ids of text of each.
            absent: What is written where a value is missing.
            out_SN: The ids, in 64 or 32 bits, or the numbers that are written.

        Returns:
            The rows of `out_SN` of other columns, and of those with a value that it cannot hold.
        """
        is_number = out_SN.dtype == np.float32
        decode = compiled().decode_floats if is_number else compiled().decode_integers
        alike: dict[tuple[int, Any], list[int]] = {}
        for row, (name, text) in enumerate(zip(names, texts, strict=True)):
            kind = self.kinds[self.numbers[name]]
            if kind not in _TEXTS:
                kind = _UINT32 if kind == _INT32 and text is TextIds.HEX else kind
                text = None
            alike.setdefault((kind, text), []).append(row)
        rest: list[int] = []
        for (kind, text), rows in alike.items():
            like = (_NUMBERS if is_number else _INTEGERS).get(kind)
            number_C = np.array([self.numbers[names[row]] for row in rows])
            row_C = np.array(rows)
            if like is not None:
                odd_C = decode(self.address, number_C, row_C, like, absent, out_SN)
                rows = [row for row, is_odd in zip(rows, odd_C.tolist(), strict=True) if is_odd]
            elif kind in _TEXTS and out_SN.dtype != np.int32:
                odd_C = compiled_texts().decode_texts(
                    self.address, number_C, row_C, _TEXTS[kind], _RULES[text], absent, out_SN
                )
                rows = row_C[odd_C >= 0].tolist()
            rest += rows
        return rest


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
    column = without_dictionary(column)
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


def decode_labels(column: pa.Array, least: float | None = None) -> Float32Array:
    """Return labels, each exactly 0 or 1, or a text of false or true, [N].

    Text is compared before its conversion, which would round other text to 0 or 1 ("1e-400").

    Args:
        column: The labels.
        least: The least number that counts as 1, others being 0; None where labels are 0 and 1.

    Raises:
        BadValue: A value is neither 0 nor 1, or no number.
    """
    if least is not None:
        return (decode_finite(column, "label") >= np.float32(least)).astype(np.float32)
    if is_text(value_type(column.type)):
        column = without_dictionary(column)
        known = pc.index_in(column, pa.array(["0", "1"]))
        if not known.null_count:  # the usual two, at a fifth of the time
            return np.asarray(known.to_numpy().astype(np.float32))
        zero, one = (
            pc.match_substring_regex(column, rf"\A({label})\z")
            .fill_null(False)
            .to_numpy(zero_copy_only=False)
            for label in (r"0(\.0+)?|false|False|FALSE", r"1(\.0+)?|true|True|TRUE")
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
    column = without_dictionary(column)
    if pt.is_null(column.type):
        return np.zeros(len(column), dtype=np.float32), np.ones(len(column), dtype=np.bool_)
    if is_text(column.type):
        column = spelled_numbers(as_text(column))
    if pt.is_decimal(column.type):
        column = column.cast(pa.float64())
    missing = None
    if column.null_count:
        missing = column.is_null().to_numpy(zero_copy_only=False)
        column = column.fill_null(False if pt.is_boolean(column.type) else 0)
    return column.to_numpy(zero_copy_only=False), missing


def without_dictionary(column: pa.Array) -> pa.Array:
    """Return the values of a dictionary-encoded column; another column as it is.

    A damaged page may hold any index, which Arrow does not compare with the size of the dictionary.

    Raises:
        BadValue: An index lies beyond the dictionary.
    """
    if not pt.is_dictionary(column.type):
        return column
    beyond = pc.greater_equal(column.indices, len(column.dictionary))
    bad = pc.or_(beyond, pc.less(column.indices, 0)).fill_null(False)
    refuse(bad.to_numpy(zero_copy_only=False), lambda index: _NO_ENTRY)
    return column.dictionary_decode()


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
