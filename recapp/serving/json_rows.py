"""Rows of JSON as a person writes them: `{"rows": [{"age": 31, "user": "ann", "seen": [4, 9]}]}`.

A feature that a row omits has a missing value there, like null; a feature that no row has is an
error. Fields that are not features are ignored, like extra columns of Arrow. So a misspelt feature
could be scored as a missing value. Therefore a row that omits a feature and has a field with almost
the same name is refused.

A value is a scalar or a list of scalars. Rows may write the ids of one feature in different ways,
as integers, as text and in lists: a proxy that joins requests of several clients sends such rows.
Deeper nesting is refused before Arrow reads it: Arrow
takes minutes for a type of a thousand levels, and a body of a few kilobytes can contain one.
"""

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from heapq import nsmallest
from typing import Any

import pyarrow as pa
from starlette.responses import Response
from torch import Tensor

from recapp.dataset.schema import TextIds
from recapp.serving.limits import Limits, bad, check_rows
from recapp.serving.question import (
    Question,
    check_ids,
    column_of,
    json_answer,
    read_object,
    scalars_of,
)
from recapp.serving.served_model import Served
from recapp.tasks.task import one_or_all

ALIKE = 0.8  # share of equal letters of a misspelt name: I1 is not a misspelt C1
LONGEST = 100  # letters of a name that may be misspelt
MOST_OTHERS = 100  # fields that are compared with the features
NULL = "null is a missing value"
WHOLE_FLOATS = 2**53  # below, each integer is a float of its own
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
    _check_names(rows, features)
    table = pa.table({name: _column(name, rows, served) for name in features})
    check_ids(table, served.scorer.schema, limits)

    def write(outputs: Mapping[str, Tensor]) -> Response:
        scores = {
            name: column.tolist() for name, column in served.scorer.task.scores(outputs).items()
        }
        return json_answer({**served.named, "scores": one_or_all(scores)})

    return Question(table, write)


def _check_names(rows: Sequence[Mapping[str, Any]], features: tuple[str, ...]) -> None:
    """Check that each feature is in some row, and that no row misspells a feature.

    Raises:
        Refused: A feature is in no row, or a row misspells a feature; the error names both.
    """
    names = {name for row in rows for name in row}
    others = nsmallest(MOST_OTHERS, names.difference(features))
    misspelt = {field: name for field in others if (name := _meant(field, features))}
    for name in features:
        if name not in names:
            near = [field for field in misspelt if misspelt[field] == name]
            hint = f"did you mean to write {name} for {near[0]:.80}?" if near else NULL
            if others and not near:
                hint += (
                    f"; of other names the rows have {', '.join(x[:80] for x in others[:SHOWN])}"
                )
            raise bad(f"feature {name}: missing in every row; {hint}")
    for number, row in enumerate(rows if misspelt else ()):
        for field in misspelt.keys() & row.keys():
            name = misspelt[field]
            if name not in row:
                raise bad(
                    f"feature {name}: missing in row {number}, which has {field:.80}; write {name} "
                    f"instead, or null for {name}"
                )


@lru_cache(4096)  # requests repeat their fields
def _meant(field: str, features: tuple[str, ...]) -> str:
    """Return the feature that a field misspells; empty if there is none. The digits must be equal,
    because they distinguish the columns of a log.
    """
    plain = {_plain(name): name for name in features if _digits(name) == _digits(field)}
    near = get_close_matches(_plain(field), plain, 1, ALIKE) if len(field) <= LONGEST else []
    return plain[near[0]] if near else ""


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.casefold()))


def _digits(name: str) -> str:
    return "".join(filter(str.isdecimal, name))


def _column(name: str, rows: list[dict[str, Any]], served: Served) -> pa.Array:
    values = [row.get(name) for row in rows]
    schema = served.scorer.schema
    if name in schema.vectors:
        return _vectors(name, values)
    dense = name in schema.dense
    allowed = "number" if dense else "integer or text, or a list of those"
    allowed = "integer" if name in schema.times else allowed
    _check_flat(values, f"feature {name}", allowed)
    values = _in_one_form(values, dense, schema.text_ids(name) is TextIds.HEX)
    kind = None
    if any(type(value) is int and not -(2**63) <= value < 2**63 for value in scalars_of(values)):
        kind = pa.float64() if dense else pa.uint64()
    if dense and (kind or {int, float} <= set(map(type, values))):
        values = [_rounded(value) if type(value) is int else value for value in values]
    if kind and any(isinstance(value, list) for value in values):
        kind = pa.list_(kind)
    return column_of(values, kind, f"feature {name}", allowed)


def _in_one_form(values: list[Any], dense: bool, hexadecimal: bool) -> list[Any]:
    """Return the values of a feature in one form of Arrow: numbers become text if there is text,
    whole floats become integers beside integers, and single ids become lists if there are lists.

    A value that has no such form stays, and Arrow refuses it.
    """
    kinds = set(map(type, scalars_of(values)))

    def same(value: Any) -> Any:
        if type(value) is list:
            return [same(item) for item in value]
        if not dense and type(value) is float and value.is_integer() and abs(value) < WHOLE_FLOATS:
            value = int(value)
        if str not in kinds or type(value) not in (int, float):
            return value
        if dense:
            return repr(_rounded(value))
        if not (type(value) is int and -(2**63) <= value < 2**64):
            return value
        return f"{value % 2**64:x}" if hexadecimal else str(value)

    mixed = {int, float} & kinds if str in kinds else not dense and {int, float} <= kinds
    if mixed:
        values = [same(value) for value in values]
    if any(type(value) is list for value in values):
        # a list with an empty text is an empty bag, where a single one is a missing id
        values = [v if v is None or type(v) is list else None if v == "" else [v] for v in values]
    return values


def _vectors(name: str, values: list[Any]) -> pa.Array:
    field = f"feature {name}"
    _check_flat(values, field, "list of numbers")
    for value in values:
        if value is not None and not isinstance(value, list):
            raise bad(f"{field}: holds {str(value)[:40]}, which is no list of numbers")
    numbers = [
        None if value is None else [_rounded(x) if type(x) is int else x for x in value]
        for value in values
    ]
    return column_of(numbers, pa.list_(pa.float64()), field, "list of numbers")


def _check_flat(values: list[Any], field: str, allowed: str) -> None:
    kinds = set(map(type, scalars_of(values)))
    if dict in kinds or list in kinds:
        fault = "an object" if dict in kinds else "a list inside of a list"
        raise bad(f"{field}: holds a value that is no {allowed}: {fault}")


def _rounded(value: int) -> float:
    """Return the nearest float to an integer; infinity if the integer is too large."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
