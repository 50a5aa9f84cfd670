"""Tensors of the Open Inference protocol, version 2 of KServe's, as columns of Arrow and back.

    JSON     {"name": "C1", "datatype": "INT64", "shape": [3], "data": [5, null, 7]}
    binary   {"name": "C1", "datatype": "INT64", "shape": [3],
              "parameters": {"binary_data_size": 24}}, its bytes behind the JSON

Numbers in binary data are little endian. Each value of BYTES has its length in front, in four
bytes. Null in JSON is a missing value.
"""

import struct
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from recapp.dataset.arrow_types import is_list
from recapp.errors import suggest
from recapp.serving.limits import bad

ARROW_TYPES: dict[str, pa.DataType] = {
    "BOOL": pa.bool_(),
    "UINT8": pa.uint8(),
    "UINT16": pa.uint16(),
    "UINT32": pa.uint32(),
    "UINT64": pa.uint64(),
    "INT8": pa.int8(),
    "INT16": pa.int16(),
    "INT32": pa.int32(),
    "INT64": pa.int64(),
    "FP16": pa.float16(),
    "FP32": pa.float32(),
    "FP64": pa.float64(),
    "BYTES": pa.string(),
}
"""The Arrow type of each datatype of the protocol."""

BINARY_SIZE = "binary_data_size"
LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class InputTensor:
    """A tensor of a request.

    Args:
        name: Its name.
        datatype: Its datatype, a key of ARROW_TYPES.
        values_N: Its numbers or texts, flat.
        width: The columns of its shape.
    """

    name: str
    datatype: str
    values_N: pa.Array
    width: int = 1


class BinaryData:
    """The bytes behind a request's JSON; the tensors take their parts in order.

    Args:
        data: The bytes.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._taken = 0

    def take(self, count: int, name: str) -> memoryview:
        """Return the next bytes.

        Raises:
            Refused: Fewer bytes are left.
        """
        left = len(self._data) - self._taken
        if count > left:
            raise bad(
                f"input {name}: {BINARY_SIZE}={count}, but {left} bytes are left after the JSON"
            )
        self._taken += count
        return self._data[self._taken - count : self._taken]

    def check_all_taken(self) -> None:
        """Check that no byte is left.

        Raises:
            Refused: Bytes are left, so the sizes of the inputs do not add up to the body.
        """
        if self._taken != len(self._data):
            raise bad(
                f"{len(self._data)} bytes come after the JSON, but the {BINARY_SIZE} of the "
                f"inputs add up to {self._taken}"
            )


def read_tensor(entry: object, binary: BinaryData, vectors: Container[str] = ()) -> InputTensor:
    """Return an entry of a request's `inputs` as a tensor.

    Args:
        entry: The entry.
        binary: The bytes behind the JSON.
        vectors: The names of tensors with several columns.

    Raises:
        Refused: The entry is malformed; the error names the tensor.
    """
    if not isinstance(entry, Mapping) or not isinstance(name := entry.get("name"), str):
        raise bad("inputs: each is an object with name, datatype, shape and data")
    datatype = entry.get("datatype")
    if not isinstance(datatype, str) or datatype not in ARROW_TYPES:
        near = suggest(str(datatype)[:40], ARROW_TYPES)
        raise bad(f"input {name}: datatype {datatype!r:.40} does not exist; {near}")
    shape: Any = entry.get("shape")
    count = _count(shape, name, vectors)
    width = shape[1] if len(shape) > 1 else 1
    parameters = entry.get("parameters")
    if not isinstance(parameters, Mapping | None):
        raise bad(f"input {name}: parameters must be an object, not {parameters!r:.40}")
    if parameters and BINARY_SIZE in parameters:
        size = parameters[BINARY_SIZE]
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise bad(f"input {name}: {BINARY_SIZE} must be a number of bytes, not {size!r}")
        values_N = _of_bytes(binary.take(size, name), datatype, count, name)
    else:
        values_N = _of_json(entry.get("data"), datatype, name, width)
    if len(values_N) != count:
        raise bad(
            f"input {name}: shape {entry['shape']} is {count} values, but there are {len(values_N)}"
        )
    return InputTensor(name, datatype, values_N, width)


def _count(shape: Any, name: str, vectors: Container[str]) -> int:
    """Return the number of values of a tensor of shape [N] or [N, 1]; [N, V] for vectors."""
    if (
        not isinstance(shape, list)
        or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape)
        or not (len(shape) == 1 or (len(shape) == 2 and (shape[1] == 1 or name in vectors)))
    ):
        allowed = "[N, V], the width of a vector" if name in vectors else "[N, 1]"
        raise bad(f"input {name}: shape {shape!r} must be [N] or {allowed}")
    return prod(shape)


def _of_json(data: object, datatype: str, name: str, width: int) -> pa.Array:
    if not isinstance(data, list):
        raise bad(f"input {name}: has neither data, a list, nor a parameter {BINARY_SIZE}")
    if data and all(isinstance(item, list) and len(item) == width for item in data):
        data = [each for item in data for each in item]  # of shape [N, width]
    return column_of(data, ARROW_TYPES[datatype], f"input {name}", datatype)


def scalars_of(data: list[Any]) -> Iterator[Any]:
    """Yield the values of a column and the items of its lists."""
    return chain.from_iterable(value if isinstance(value, list) else (value,) for value in data)


def column_of(data: list[Any], kind: pa.DataType | None, field: str, valid: str) -> pa.Array:
    """Return values of JSON as a column.

    Args:
        data: The values; None is a missing value.
        kind: The type of the column; None infers it.
        field: The words for the field in an error.
        valid: The words for valid values in an error.

    Raises:
        Refused: A value is not a number or text of this type.
    """
    try:
        if kind is not None:
            in_lists = is_list(kind)
            scalars = list(scalars_of(data)) if in_lists else data
            _check_kinds(scalars, kind.value_type if in_lists else kind)
        elif any(isinstance(value, bool) for value in data):
            raise pa.ArrowInvalid("true and false are no numbers")
        return pa.array(data, type=kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, TypeError, ValueError) as error:
        fault = str(error).splitlines()[0][:120]
        raise bad(f"{field}: holds a value that is no {valid}: {fault}") from None


def _check_kinds(data: list[Any], kind: pa.DataType) -> None:
    """Raise ArrowInvalid for a value of another type, which Arrow would truncate or convert."""
    text = pt.is_string(kind)
    allowed = {
        str: text,
        bool: pt.is_boolean(kind),
        int: not (text or pt.is_boolean(kind)),
        float: pt.is_floating(kind),
        type(None): True,
    }
    for kind_of_value in set(map(type, data)):
        if not allowed.get(kind_of_value):
            value = next(value for value in data if type(value) is kind_of_value)
            raise pa.ArrowInvalid(repr(value)[:40])


def _of_bytes(data: memoryview, datatype: str, count: int, name: str) -> pa.Array:
    if datatype == "BYTES":
        return pa.array(_texts(data, name), type=pa.binary())
    if datatype == "BOOL":
        return pa.array(np.frombuffer(data, dtype=np.uint8) != 0)
    kind = np.dtype(ARROW_TYPES[datatype].to_pandas_dtype()).newbyteorder("<")
    if len(data) != count * kind.itemsize:
        raise bad(
            f"input {name}: {BINARY_SIZE}={len(data)}, but {count} values of {datatype} have "
            f"{count * kind.itemsize} bytes"
        )
    # copied, because a tensor may be unaligned in the body, and kernels need aligned values
    return pa.array(np.frombuffer(data, dtype=kind).astype(kind.newbyteorder("=")))


def _texts(data: memoryview, name: str) -> list[bytes]:
    texts = []
    start = 0
    while start < len(data):
        end = start + LENGTH.size
        if end > len(data):
            raise bad(f"input {name}: its binary data ends inside of a length")
        (length,) = LENGTH.unpack_from(data, start)
        start = end + length
        if start > len(data):
            raise bad(f"input {name}: a text of {length} bytes goes beyond its binary data")
        texts.append(bytes(data[end:start]))
    return texts


def binary_of(values_N: npt.NDArray[Any] | list[bytes]) -> bytes:
    """Return numbers or texts as binary data.

    Args:
        values_N: The values of a tensor.
    """
    if isinstance(values_N, list):
        return b"".join(LENGTH.pack(len(text)) + text for text in values_N)
    return values_N.astype(values_N.dtype.newbyteorder("<"), copy=False).tobytes()
