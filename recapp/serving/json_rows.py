"""JSON of clients: objects, columns of values, and rows as a person writes them:

    {"rows": [{"age": 31, "user": "ann", "seen": [4, 9]}]}

Text that is not standard JSON is refused, with one line of error. A feature that a row omits has a
missing value there, like null; a feature that no row has is an error. Fields that are not features
are ignored, like extra columns of Arrow, but a row that has such a field must have all features:
otherwise a misspelt feature would be scored as a missing value.

A value is a scalar or a list of scalars; all rows write a feature in one way. A feature with dots
in its name, as `user.id`, may stand inside of objects or lists of these, `{"user": {"id": 7}}`;
there it may be absent. Other nesting is refused before Arrow reads it: Arrow takes minutes for a
type of a thousand levels, and a body of a few kilobytes can contain one.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from heapq import nsmallest
from itertools import chain
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from starlette.responses import Response
from torch import Tensor

from recapp.dataset.arrow_types import is_list, is_text
from recapp.dataset.schema import Schema
from recapp.serving.limits import Limits, bad, check_most, check_rows
from recapp.serving.served_model import Question, Served
from recapp.tasks.task import one_or_all

NULL = "null is a missing value"
SHOWN = 5  # the most fields that an error lists


def read_rows(
    body: memoryview, headers: Mapping[str, str], served: Served, limits: Limits
) -> Question:
    """Read a question from rows of JSON.

    Args:
        body: The body.
        headers: The headers of the request; not used.
        served: The model that answers.
        limits: The bounds of rows and ids.

    Raises:
        Refused: The body is malformed, or does not fit the model.
    """
    rows = read_object(body).get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise bad('rows: must be a list of objects, {"rows": [{"FEATURE": VALUE}]}')
    check_rows(len(rows), limits)
    features = served.scorer.schema.inputs
    rows = [_flat(row, features) for row in rows]
    _check_names(rows, features)
    table = pa.table({name: _column(name, rows, served) for name in features})
    check_ids(table, served.scorer.schema, limits)

    def write(outputs: Mapping[str, Tensor]) -> Response:
        scores = {
            name: column.tolist() for name, column in served.scorer.task.scores(outputs).items()
        }
        return json_answer({**served.named, "scores": one_or_all(scores)})

    return Question(table, write)


def _flat(row: dict[str, Any], features: Sequence[str]) -> dict[str, Any]:
    """Return a row in which features that stand inside of objects have their whole names.

    Raises:
        Refused: Something else stands where a feature has an object.
    """
    inside = [name for name in features if "." in name and name not in row]
    above = {key for key in row if any(name.startswith(f"{key}.") for name in inside)}
    found = {name: _inside(row, name, name) for name in inside if _key_above(row, name)}
    return {key: value for key, value in row.items() if key not in above} | found


def _key_above(row: Mapping[str, Any], name: str) -> str | None:
    return next((key for key in row if name.startswith(f"{key}.")), None)


def _inside(value: Any, name: str, feature: str) -> Any:
    """Return what stands under a name inside of objects; None without it."""
    if value is None:
        return None
    if isinstance(value, list) and not any(isinstance(one, list) for one in value):
        return [_inside(one, name, feature) for one in value]
    if not isinstance(value, dict):
        raise bad(f"feature {feature}: {value!r:.40} stands where an object is expected")
    key = _key_above(value, name)
    if name in value or key is None:
        return value.get(name)
    return _inside(value[key], name[len(key) + 1 :], feature)


def _check_names(rows: Sequence[Mapping[str, Any]], features: tuple[str, ...]) -> None:
    """Check that each feature is in some row, and that no row has another field in its place.

    Raises:
        Refused: A feature is in no row, or a row lacks a feature and has another field.
    """
    names = {name for row in rows for name in row}
    others = names.difference(features)
    for name in features:
        if name not in names:
            shown = ", ".join(field[:80] for field in nsmallest(SHOWN, others))
            hint = f"{NULL}; of other names the rows have {shown}" if others else NULL
            raise bad(f"feature {name}: missing in every row; {hint}")
    for number, row in enumerate(rows if others else ()):
        field = next((field for field in row if field in others), None)
        lacking = next((name for name in features if name not in row), None)
        if field is not None and lacking is not None:
            raise bad(
                f"feature {lacking}: missing in row {number}, which has {field:.80}; write "
                f"{lacking} instead, or null for {lacking}"
            )


def _column(name: str, rows: list[dict[str, Any]], served: Served) -> pa.Array:
    values = [row.get(name) for row in rows]
    schema = served.scorer.schema
    field = f"feature {name}"
    vector = name in schema.vectors
    weighs = name in schema.id_weight_columns
    numbers = vector or weighs or name in schema.dense
    allowed = (
        "number, or a list of those"
        if weighs
        else "number"
        if numbers
        else "integer or text, or a list of those"
    )
    allowed = "list of numbers" if vector else "integer" if name in schema.times else allowed
    kinds = set(map(type, scalars_of(values)))
    if dict in kinds or list in kinds:
        fault = "an object" if dict in kinds else "a list inside of a list"
        raise bad(f"{field}: holds a value that is no {allowed}: {fault}")
    kind = pa.float64() if vector else None
    if any(type(value) is int and not -(2**63) <= value < 2**63 for value in scalars_of(values)):
        kind = pa.float64() if numbers else pa.uint64()
    if numbers and (kind or {int, float} <= kinds):
        values = [_rounded(value) for value in values]
    if kind and (vector or any(isinstance(value, list) for value in values)):
        kind = pa.list_(kind)
    return column_of(values, kind, field, allowed)


def _rounded(value: Any) -> Any:
    """Return a value with the nearest floats of its integers; infinity for one that is too
    large.
    """
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    try:
        return float(value) if type(value) is int else value
    except OverflowError:
        return math.inf if value > 0 else -math.inf


# ---- values


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
