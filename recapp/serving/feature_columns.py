"""Make one Arrow table of raw rows, with the columns of the model's schema, from input tensors.

    NAME [B]                     a value per row; null or "" is a missing value
    NAME [B], NAME.present [B]   BOOL: where it is false the value is missing
    NAME [L], NAME.lengths [B]   a list of ids per row: NAME holds them all, row after row
    NAME [B, V]                  a vector of V numbers per row

A missing id of a feature without lists in training differs from an empty list: a missing id reads
the table's row for missing ids, as in training; an empty list reads no row.

The decoder of training does the rest (ids of texts, numbers that are not finite).
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recapp.dataset.arrow_types import is_list, is_text
from recapp.dataset.schema import Schema
from recapp.errors import suggest
from recapp.serving.limits import Limits, bad, check_ids, check_rows
from recapp.serving.tensors import InputTensor

LENGTHS = ".lengths"
PRESENT = ".present"
NO_IDS = ("BOOL", "FP16", "FP32", "FP64")
NO_NUMBERS = ("BOOL",)


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
    check_columns(table, schema, limits)
    return table


def check_columns(table: pa.Table, schema: Schema, limits: Limits) -> None:
    """Check the number of ids of a request.

    Args:
        table: The raw rows of the request.
        schema: The columns of the model.
        limits: The bounds of rows and ids.

    Raises:
        Refused: There are more than the server takes.
    """
    chunks = ((name, chunk) for name in schema.sparse for chunk in table.column(name).chunks)
    check_ids(sum(_ids_in(chunk, schema.separator.get(name)) for name, chunk in chunks), limits)


def _ids_in(column: pa.Array, separator: str | None = None) -> int:
    """Return the number of ids in a column of single ids, of lists or of texts with a separator."""
    if not is_list(column.type):
        several = separator is not None and is_text(column.type)
        more = pc.sum(pc.count_substring(column, separator)).as_py() if several else None
        return len(column) + (more or 0)
    # reads lengths only: a list of nulls may declare any length and holds no bytes
    return int(pc.sum(pc.list_value_length(column)).as_py() or 0)


def _by_name(tensors: Sequence[InputTensor], schema: Schema) -> dict[str, InputTensor]:
    features = schema.inputs
    known = {*features, *(f"{name}{PRESENT}" for name in features)}
    known |= {f"{name}{LENGTHS}" for name in schema.sparse}
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
