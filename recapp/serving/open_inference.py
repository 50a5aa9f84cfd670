"""The Open Inference protocol, version 2 of KServe's: read a question from a body of `infer`, and
write its answer.

    {"id": "7", "inputs": [...], "outputs": [{"name": "score"}]}
    -> {"model_name": ..., "model_version": ..., "id": "7", "outputs": [{"name": "score", ...}]}

Inputs are tensors of JSON or of bytes. Numbers in binary data are little endian. Each value of
BYTES has its length in front, in four bytes. Null in JSON is a missing value.

    JSON     {"name": "C1", "datatype": "INT64", "shape": [3], "data": [5, null, 7]}
    binary   {"name": "C1", "datatype": "INT64", "shape": [3],
              "parameters": {"binary_data_size": 24}}, its bytes behind the JSON

They become one Arrow table of raw rows, with the columns of the model's schema. The decoder of
training does the rest (ids of texts, numbers that are not finite).

    NAME [B]                     a value per row; null or "" is a missing value
    NAME [B], NAME.present [B]   BOOL: where it is false the value is missing
    NAME [L], NAME.lengths [B]   a list of ids per row: NAME holds them all, row after row
    NAME [B, V]                  a vector of V numbers per row

A missing id of a feature without lists in training differs from an empty list: a missing id reads
the table's row for missing ids, as in training; an empty list reads no row.

Outputs are the columns of scores (`score`, a probability) and the outputs of the model (`logit`);
without `outputs` the answer has the scores. The parameter `binary_data` of an output, or
`binary_data_output` of the request, makes an output binary.
"""

import struct
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from starlette.responses import Response
from torch import Tensor

from recapp.dataset.schema import Schema
from recapp.errors import suggest
from recapp.serving.json_rows import (
    check_ids,
    column_of,
    json_answer,
    read_object,
    written,
)
from recapp.serving.limits import Limits, bad, check_rows
from recapp.serving.served_model import Question, Served, columns_of

JSON_LENGTH = "inference-header-content-length"
BINARY = "application/octet-stream"
BINARY_SIZE = "binary_data_size"
ALL_BINARY = "binary_data_output"
LENGTHS = ".lengths"
PRESENT = ".present"
NO_IDS = ("BOOL", "FP16", "FP32", "FP64")
NO_NUMBERS = ("BOOL",)
LENGTH = struct.Struct("<I")
# The Arrow type of each datatype of the protocol.
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


def read_infer(
    body: memoryview, headers: Mapping[str, str], served: Served, limits: Limits
) -> Question:
    """Read a question from the body of an `infer` request.

    Args:
        body: The body.
        headers: The headers of the request.
        served: The model that answers.
        limits: The bounds of rows and ids.

    Raises:
        Refused: The body is malformed, or does not fit the model.
    """
    text, data = _split(body, headers.get(JSON_LENGTH))
    request = read_object(text)
    choices = _choices(request, served)
    schema = served.scorer.schema
    table = table_of(_tensors(request, data, schema.vectors), schema, limits)
    identity = request.get("id")
    if identity is not None and not isinstance(identity, str):
        raise bad(f"id: must be text, not {identity!r}")
    head = served.named if identity is None else {**served.named, "id": identity}

    def write(outputs: Mapping[str, Tensor]) -> Response:
        plain = {name: values_B.float() for name, values_B in outputs.items()}
        return _reply(head, choices, {**plain, **served.scorer.task.scores(outputs)})

    return Question(table, write)


def _split(body: memoryview, length: str | None) -> tuple[memoryview, memoryview]:
    """Return the JSON of a body and the binary data behind it."""
    if length is None:
        return body, body[:0]
    if not length.isdecimal() or len(length) > 18 or int(length) > len(body):
        raise bad(
            f"Inference-Header-Content-Length: {length[:20]} must be the bytes of the JSON, at "
            f"most the {len(body)} of the body"
        )
    return body[: int(length)], body[int(length) :]


def _tensors(
    request: Mapping[str, Any], data: memoryview, vectors: Container[str]
) -> list[InputTensor]:
    inputs = request.get("inputs")
    if not isinstance(inputs, list) or not inputs:
        raise bad("inputs: missing; a list of tensors, one for each feature of the model")
    tensors = []
    left = data
    for entry in inputs:
        tensor, left = read_tensor(entry, left, vectors)
        tensors.append(tensor)
    if len(left):
        raise bad(
            f"{len(data)} bytes come after the JSON, but the {BINARY_SIZE} of the "
            f"inputs add up to {len(data) - len(left)}"
        )
    return tensors


def _parameters(entry: object, field: str) -> Mapping[str, Any]:
    if entry is None:
        return {}
    if not isinstance(entry, Mapping):
        raise bad(f"{field} must be an object, not {entry!r:.40}")
    return entry


def _flag(parameters: Mapping[str, Any], name: str, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise bad(f"parameter {name}: must be true or false, not {value!r:.40}")
    return value


def _choices(request: Mapping[str, Any], served: Served) -> dict[str, bool]:
    """Return the outputs that a request asks for, each with whether its values are binary."""
    everything = _flag(_parameters(request.get("parameters"), "parameters:"), ALL_BINARY, False)
    outputs = request.get("outputs")
    if outputs is None:
        return dict.fromkeys(columns_of(served.scorer), everything)
    if not isinstance(outputs, list) or not outputs:
        raise bad(f"outputs: must be a list of objects with a name: {', '.join(served.outputs)}")
    choices: dict[str, bool] = {}
    for entry in outputs:
        name = entry.get("name") if isinstance(entry, Mapping) else entry
        if not isinstance(entry, Mapping) or name not in served.outputs:
            near = suggest(str(name)[:40], served.outputs)
            raise bad(f"output {name!r:.40}: the model has none; {near}")
        if name in choices:
            raise bad(f"output {name}: is named twice")
        parameters = _parameters(entry.get("parameters"), f"output {name}: parameters:")
        if parameters.get("classification"):
            raise bad(f"output {name}: classification needs classes, which a score does not have")
        choices[name] = _flag(parameters, "binary_data", everything)
    return choices


def _reply(
    head: Mapping[str, str], choices: Mapping[str, bool], values: Mapping[str, Tensor]
) -> Response:
    outputs: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for name, binary in choices.items():
        values_B = values[name]
        described: dict[str, Any] = {
            "name": name,
            "datatype": "FP32",
            "shape": [len(values_B)],
        }
        if binary:
            parts.append(binary_of(values_B.numpy()))
            described["parameters"] = {BINARY_SIZE: len(parts[-1])}
        else:
            described["data"] = values_B.tolist()
        outputs.append(described)
    document = {**head, "outputs": outputs}
    if not parts:
        return json_answer(document)
    text = written(document)
    headers = {JSON_LENGTH: str(len(text))}
    return Response(b"".join([text, *parts]), headers=headers, media_type=BINARY)


# ---- tensors


def read_tensor(
    entry: object, data: memoryview, vectors: Container[str] = ()
) -> tuple[InputTensor, memoryview]:
    """Return an entry of a request's `inputs` as a tensor, and the binary data of later entries.

    Args:
        entry: The entry.
        data: The binary data of this entry, if it has any, and of later entries.
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
    parameters = _parameters(entry.get("parameters"), f"input {name}: parameters")
    if BINARY_SIZE in parameters:
        size = parameters[BINARY_SIZE]
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise bad(f"input {name}: {BINARY_SIZE} must be a number of bytes, not {size!r}")
        if size > len(data):
            raise bad(
                f"input {name}: {BINARY_SIZE}={size}, but {len(data)} bytes are left after the JSON"
            )
        values_N = _of_bytes(data[:size], datatype, count, name)
        data = data[size:]
    else:
        values_N = _of_json(entry.get("data"), datatype, name, width)
    if len(values_N) != count:
        raise bad(
            f"input {name}: shape {entry['shape']} is {count} values, but there are {len(values_N)}"
        )
    return InputTensor(name, datatype, values_N, width), data


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


# ---- columns


def table_of(tensors: Sequence[InputTensor], schema: Schema, limits: Limits) -> pa.Table:
    """Return the tensors of a request as raw rows.

    Args:
        tensors: The tensors.
        schema: The columns of the model.
        limits: The bounds of rows and ids.

    Raises:
        Refused: A feature is unknown, missing, given twice, has a wrong datatype, or differs from
            the others in its number of values; the error names the feature.
    """
    by_name = _by_name(tensors, schema)
    columns = {name: _column(name, by_name, schema) for name in schema.inputs}
    first, rows = next((name, len(column)) for name, column in columns.items())
    for name, column in columns.items():
        if len(column) != rows:
            raise bad(
                f"input {name}: has {len(column)} rows, but {first} has {rows}; a feature with "
                f"several ids per row needs {name}{LENGTHS}"
            )
    check_rows(rows, limits)
    table = pa.table(columns)
    check_ids(table, schema, limits)
    return table


def _by_name(tensors: Sequence[InputTensor], schema: Schema) -> dict[str, InputTensor]:
    features = schema.inputs
    known = {*features, *(f"{name}{PRESENT}" for name in features)}
    known |= {f"{name}{LENGTHS}" for name in (*schema.sparse, *schema.id_weight_columns)}
    by_name: dict[str, InputTensor] = {}
    for tensor in tensors:
        if tensor.name not in known:
            near = suggest(tensor.name[:80], features)
            raise bad(f"input {tensor.name}: the model has no such feature; {near}")
        if tensor.name in by_name:
            raise bad(f"input {tensor.name}: is sent twice")
        by_name[tensor.name] = tensor
    missing = [name for name in features if name not in by_name]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise bad(f"input {missing[0]}{more}: missing; every feature of the model is needed")
    return by_name


def _column(name: str, by_name: Mapping[str, InputTensor], schema: Schema) -> pa.Array:
    tensor = by_name[name]
    if name in schema.vectors:
        return _vectors(name, by_name, schema.vectors[name])
    sparse = name in schema.sparse or name in schema.times
    if tensor.datatype in (NO_IDS if sparse else NO_NUMBERS):
        allowed = "INT64 or BYTES" if sparse else "FP32, FP64, INT64 or BYTES"
        raise bad(f"input {name}: datatype {tensor.datatype} must be {allowed}")
    lengths = by_name.get(f"{name}{LENGTHS}")
    present = by_name.get(f"{name}{PRESENT}")
    if lengths is not None and present is not None:
        raise bad(f"input {name}{PRESENT}: a row without ids has the length 0 in {name}{LENGTHS}")
    if lengths is not None:
        return _lists(tensor, lengths)
    return tensor.values_N if present is None else _with_nulls(tensor, present)


def _vectors(name: str, by_name: Mapping[str, InputTensor], width: int) -> pa.Array:
    tensor = by_name[name]
    if tensor.datatype in ("BOOL", "BYTES") or tensor.width != width:
        raise bad(
            f"input {name}: is {tensor.datatype} of {tensor.width} columns, and must be FP32 of "
            f"shape [N, {width}]"
        )
    if f"{name}{PRESENT}" in by_name:
        raise bad(f"input {name}{PRESENT}: write zeros for a missing vector")
    return pa.FixedSizeListArray.from_arrays(tensor.values_N, width)


def _lists(tensor: InputTensor, lengths: InputTensor) -> pa.Array:
    if not lengths.datatype.removeprefix("U").startswith("INT") or lengths.values_N.null_count:
        raise bad(f"input {lengths.name}: must be INT32 or INT64, without null")
    counts = lengths.values_N.to_numpy()
    if len(counts) and int(counts.min()) < 0:
        raise bad(f"input {lengths.name}: holds {counts.min()}; a length is 0 or more")
    if len(counts) and int(counts.max()) > len(tensor.values_N):  # the sum could overflow
        total = int(counts.max())
    else:
        total = int(counts.sum(dtype=np.int64))
    if total != len(tensor.values_N):
        raise bad(
            f"input {lengths.name}: the lengths add up to {total}, but {tensor.name} has "
            f"{len(tensor.values_N)} ids"
        )
    bounds = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
    return pa.LargeListArray.from_arrays(bounds, tensor.values_N)


def _with_nulls(tensor: InputTensor, present: InputTensor) -> pa.Array:
    flags_N = present.values_N
    if present.datatype != "BOOL" or len(flags_N) != len(tensor.values_N) or flags_N.null_count:
        raise bad(
            f"input {present.name}: must be BOOL with the {len(tensor.values_N)} values of "
            f"{tensor.name}, without null"
        )
    return pc.if_else(flags_N, tensor.values_N, pa.scalar(None, tensor.values_N.type))
