"""A request in the form that all protocols share: raw rows, and a function that writes the answer.

body -> Question(table, write)        the protocol's own file reads it
outputs by name -> write -> Reply     and writes the answer

JSON of clients is read here: text that is not standard JSON is refused, with one line of error.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor

from recapp.dataset.raw_rows import RawTable
from recapp.serving.limits import bad

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer.

    Args:
        body: The bytes of the answer.
        content_type: The media type of the body.
        headers: Further headers.
    """

    body: bytes
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Question:
    """The rows of a request, and the writer of its answer.

    Args:
        table: The rows, with the column names of the model's schema.
        write: Writes the answer from the outputs of the rows by name, each [B] on the CPU.
    """

    table: RawTable
    write: Callable[[Mapping[str, Tensor]], Reply]


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
