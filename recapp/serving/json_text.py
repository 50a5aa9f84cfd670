"""Read JSON from clients: text that is not standard JSON is refused, with one line of error."""

import json
from typing import Any, NoReturn

from recapp.serving.limits import bad


def read_object(text: bytes | memoryview) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        Refused: The text is not JSON or not an object. NaN and infinity are not JSON, although
            Python accepts them.
    """
    if not len(text):
        raise bad("the body is empty: send a JSON object")
    try:
        found = json.loads(bytes(text), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise bad(f"the body is no JSON: {str(error).splitlines()[0][:120]}") from None
    if not isinstance(found, dict):
        raise bad(f"the body must be a JSON object, not {type(found).__name__}")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON; write null where a value is missing")


def written(document: object) -> bytes:
    """Return a document as JSON."""
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
