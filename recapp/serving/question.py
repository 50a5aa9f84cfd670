"""A request in the form that all protocols share: raw rows, and a function that writes the answer.

body -> Question(table, write)        the protocol's own file reads it
outputs by name -> write -> Response  and writes the answer

JSON of clients is read here: text that is not standard JSON is refused, with one line of error.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from starlette.responses import Response
from torch import Tensor

from recapp.dataset.arrow_types import is_list, is_text
from recapp.dataset.collate import RawTable
from recapp.dataset.schema import Schema
from recapp.serving.limits import Limits, bad, check_most


@dataclass(frozen=True, slots=True)
class Question:
    """The rows of a request, and the writer of its answer.

    Args:
        table: The rows, with the column names of the model's schema.
        write: Writes the answer from the outputs of the rows by name, each [B] on the CPU.
    """

    table: RawTable
    write: Callable[[Mapping[str, Tensor]], Response]


def read_object(text: bytes | memoryview) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        Refused: The text is not JSON or not an object. NaN and infinity are not JSON, although
            Python accepts them.
    """
    if not len(text):
        raise bad("the body is empty: send a JSON object")
    try:
        document = json.loads(bytes(text), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise bad(f"the body is no JSON: {str(error).splitlines()[0][:120]}") from None
    if not isinstance(document, dict):
        raise bad(f"the body must be a JSON object, not {type(document).__name__}")
    return document


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON; write null where a value is missing")


def written(document: object) -> bytes:
    """Return a document as JSON."""
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()


def json_answer(
    document: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an answer whose body is a document as JSON."""
    return Response(written(document), status, headers, media_type="application/json")


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


def check_ids(table: pa.Table, schema: Schema, limits: Limits) -> None:
    """Check the number of ids of a request, over all features and rows.

    Args:
        table: The raw rows of the request.
        schema: The columns of the model.
        limits: The bounds of ids.

    Raises:
        Refused: There are more than `max_ids`.
    """
    chunks = ((name, chunk) for name in schema.sparse for chunk in table.column(name).chunks)
    count = sum(_ids_in(chunk, schema.separator.get(name)) for name, chunk in chunks)
    check_most(count, "max_ids", f"the request has {count:,} ids", limits)


def _ids_in(column: pa.Array, separator: str | None = None) -> int:
    """Return the number of ids in a column of single ids, of lists or of texts with a separator."""
    if not is_list(column.type):
        several = separator is not None and is_text(column.type)
        more = pc.sum(pc.count_substring(column, separator)).as_py() if several else None
        return len(column) + (more or 0)
    # reads lengths only: a list of nulls may declare any length and holds no bytes
    return int(pc.sum(pc.list_value_length(column)).as_py() or 0)
