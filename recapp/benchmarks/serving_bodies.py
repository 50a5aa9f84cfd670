"""Make random request bodies in each protocol, from the metadata of a server's model.

| name     | route          | body                                              |
|----------|----------------|---------------------------------------------------|
| `rows`   | `infer_rows`   | rows of JSON                                      |
| `json`   | `infer`        | Open Inference, tensors in JSON                   |
| `binary` | `infer`        | Open Inference, tensors in binary after the JSON, |
|          |                | in the answer too                                 |
| `arrow`  | `infer_arrow`  | an Arrow IPC stream                               |

Numbers are uniform from 0 to 99. Ids are uniform over 32 bits, as hashes are, unless the model
refuses such ids; then they come from the model's example.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recapp.serving.open_inference import JSON_LENGTH
from recapp.serving.tensors import BINARY_SIZE, binary_of

ROUTES = {
    "rows": "infer_rows",
    "json": "infer",
    "binary": "infer",
    "arrow": "infer_arrow",
}
"""The route of each protocol."""

Columns = Mapping[str, npt.NDArray[Any] | list[Any]]
Body = tuple[bytes, dict[str, str]]
"""The bytes of a body, and its headers."""


def draw(
    metadata: Mapping[str, Any],
    example: Sequence[Mapping[str, Any]],
    rows: int,
    seed: int,
    any_ids: bool = True,
) -> Columns:
    """Return random columns for a model.

    Args:
        metadata: The metadata of the model, from the server.
        example: Rows that the model takes.
        rows: The number of rows.
        seed: The seed of the random numbers.
        any_ids: Whether ids may be any number of 32 bits; else they come from the example.
    """
    random = np.random.default_rng(seed)
    columns: dict[str, npt.NDArray[Any] | list[Any]] = {}
    for each in metadata["inputs"]:
        name = each["name"]
        if each["datatype"] == "FP32":
            columns[name] = random.integers(0, 100, rows).astype(np.float32)
        elif not any_ids or isinstance(example[0][name], list) or each["datatype"] == "INT64":
            columns[name] = [example[n][name] for n in random.integers(0, len(example), rows)]
        else:
            columns[name] = random.integers(0, 2**32, rows)
    return columns


def body_of(protocol: str, columns: Columns) -> Body:
    """Return columns as a request body.

    Args:
        protocol: A key of ROUTES.
        columns: The rows.
    """
    if protocol == "arrow":
        return _arrow(columns), {}
    if protocol == "rows":
        plain = {name: _plain(values) for name, values in columns.items()}
        rows = [dict(zip(plain, row, strict=True)) for row in zip(*plain.values(), strict=True)]
        return json.dumps({"rows": rows}).encode(), {}
    return _tensors(columns, binary=protocol == "binary")


def _plain(values: npt.NDArray[Any] | list[Any]) -> list[Any]:
    return values if isinstance(values, list) else values.tolist()


def _arrow(columns: Columns) -> bytes:
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    written: bytes = sink.getvalue().to_pybytes()
    return written


def _tensors(columns: Columns, binary: bool) -> Body:
    inputs: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for name, values in columns.items():
        pairs = [(name, values)]
        if isinstance(values, list) and any(isinstance(row, list) for row in values):
            bags = [row or [] for row in values]  # a missing list counts as an empty one
            pairs = [
                (name, [id for row in bags for id in row]),
                (f"{name}.lengths", [len(row) for row in bags]),
            ]
        for each, held in pairs:
            kind, array = _tensor(held)
            described: dict[str, Any] = {"name": each, "datatype": kind, "shape": [len(array)]}
            if binary:
                parts.append(binary_of(array))
                described["parameters"] = {BINARY_SIZE: len(parts[-1])}
            elif isinstance(array, list):
                described["data"] = [text.decode() for text in array]
            else:
                described["data"] = array.tolist()
            inputs.append(described)
    request: dict[str, Any] = {"inputs": inputs}
    if not binary:
        return json.dumps(request).encode(), {}
    text = json.dumps(request | {"parameters": {"binary_data_output": True}}).encode()
    return b"".join([text, *parts]), {JSON_LENGTH: str(len(text))}


def _tensor(values: npt.NDArray[Any] | list[Any]) -> tuple[str, npt.NDArray[Any] | list[bytes]]:
    """Return the datatype and the values of a tensor: numbers, or texts if any value is a text or
    missing.
    """
    if not isinstance(values, list):
        return ("FP32", values) if values.dtype == np.float32 else ("INT64", values)
    if all(isinstance(value, int) for value in values):
        return "INT64", np.asarray(values, dtype=np.int64)
    return "BYTES", [b"" if value is None else str(value).encode() for value in values]
