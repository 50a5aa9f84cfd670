"""Rows as a person writes them: `{"rows": [{"age": 31, "user": "ann", "seen": [4, 9]}]}`.

A feature that a row leaves out is missing there, like null. One that no row has is an error, and so
is a name that the model does not know: a misspelt feature would be scored as a missing one.

A value is a scalar or a list of scalars. Whatever is nested deeper is refused before Arrow sees it:
it takes minutes over a type of a thousand levels, which a body of some kilobytes spells.
"""

import math
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from torch import Tensor

from recapp.errors import suggest
from recapp.serving.feature_columns import ids_in
from recapp.serving.json_text import read_object, written
from recapp.serving.limits import Limits, bad, check_ids, check_rows
from recapp.serving.question import Question, Reply, scores_of
from recapp.serving.served_model import Served
from recapp.serving.tensors import column_of, scalars_of


def read_rows(
    body: memoryview, headers: Mapping[str, str], served: Served, limits: Limits
) -> Question:
    """Return what rows of JSON ask.

    Args:
        body: The body.
        headers: The headers of the request; none matters.
        served: The model that is to answer.
        limits: How many rows and ids there may be.

    Raises:
        Refused: The body is malformed, or does not fit the model.
    """
    rows = read_object(body).get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise bad('rows: must be a list of objects, {"rows": [{"FEATURE": VALUE}]}')
    check_rows(len(rows), limits)
    features = served.features
    here = {name for row in rows for name in row}
    for name in sorted(here.difference(features)):
        raise bad(
            f"row feature {name}: the model has no such feature; {suggest(name[:80], features)}"
        )
    for name in features:
        if name not in here:
            raise bad(f"feature {name}: missing in every row; null is a missing value")
    table = pa.table({name: _column(name, rows, served) for name in features})
    check_ids(sum(ids_in(table[name].chunk(0)) for name in served.scorer.schema.sparse), limits)
    named = {"model_name": served.name, "model_version": served.version}
    return Question(table, lambda logits_B: _reply(named, logits_B))


def _column(name: str, rows: list[dict[str, Any]], served: Served) -> pa.Array:
    values = [row.get(name) for row in rows]
    dense = name in served.scorer.schema.dense
    wanted = "number" if dense else "integer or text, or a list of those"
    _check_flat(values, f"feature {name}", wanted)
    kind = None
    if any(type(value) is int and not -(2**63) <= value < 2**63 for value in scalars_of(values)):
        kind = pa.float64() if dense else pa.uint64()
    if dense and (kind or {int, float} <= set(map(type, values))):
        values = [_rounded(value) if type(value) is int else value for value in values]
    if kind and any(isinstance(value, list) for value in values):
        kind = pa.list_(kind)
    return column_of(values, kind, f"feature {name}", wanted)


def _check_flat(values: list[Any], field: str, wanted: str) -> None:
    """Raise Refused for an object, and for a list inside of a list."""
    kinds = set(map(type, scalars_of(values)))
    if dict in kinds or list in kinds:
        found = "an object" if dict in kinds else "a list inside of a list"
        raise bad(f"{field}: holds a value that is no {wanted}: {found}")


def _rounded(value: int) -> float:
    """Return an integer as the nearest float, which is infinite where there is none."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _reply(named: Mapping[str, str], logits_B: Tensor) -> Reply:
    return Reply(written({**named, "scores": scores_of(logits_B).tolist()}))
