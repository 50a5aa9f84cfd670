"""The limits of a server, and the errors for requests that exceed them.

A refusal is an HTTP status and one line of text. The line names the field of the request, or the
setting of the server, and the fix.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from recapp.settings.values import Positive, Timeout

RETRY_AFTER_SECONDS = 1
HINT = "send less at once, or start the server with a larger {0}"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a server, each a setting of `recapp.serve`.

    Args:
        max_body_bytes: The bytes of a request's body, and the decompressed bytes of an Arrow body.
        max_rows: The number of rows of a request.
        max_ids: The number of ids of a request, over all features and rows.
        max_queue: The number of requests that are read, wait or are computed at one time.
        max_pending_bytes: The total bytes of the bodies of these requests.
        max_connections: The number of connections that are open at one time.
        timeout_s: The seconds that a request may take, from its first byte to its answer.
    """

    max_body_bytes: Positive = 4 * 2**20
    max_rows: Positive = 4096
    max_ids: Positive = 2**18
    max_queue: Positive = 256
    max_pending_bytes: Positive = 2**28
    max_connections: Positive = 1024
    timeout_s: Timeout = 10


@dataclass
class Refused(Exception):
    """The error answer to a request.

    Args:
        status: The HTTP status.
        text: One line that names the wrong field and its fault, or the limit.
        headers: The headers of the answer.
    """

    status: int
    text: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text


def bad(text: str) -> Refused:
    """Return the refusal of an invalid request: status 400."""
    return Refused(400, text)


def busy(text: str) -> Refused:
    """Return the refusal of a request that may be sent again later: status 503 with Retry-After."""
    return Refused(503, text, {"retry-after": str(RETRY_AFTER_SECONDS)})


def check_body_bytes(count: int, limits: Limits) -> None:
    """Check the bytes of a body, or its decompressed bytes.

    Raises:
        Refused: There are more than `max_body_bytes`.
    """
    if count > limits.max_body_bytes:
        raise Refused(
            413,
            f"the body has {count:,} bytes or more, above max_body_bytes={limits.max_body_bytes}: "
            + HINT.format("max_body_bytes"),
        )


def check_rows(count: int, limits: Limits) -> None:
    """Check the rows of a request.

    Raises:
        Refused: There are none, or more than `max_rows`.
    """
    if count == 0:
        raise bad("the request has no rows: send at least one")
    if count > limits.max_rows:
        raise Refused(
            413,
            f"the request has {count:,} rows, above max_rows={limits.max_rows}: "
            + HINT.format("max_rows"),
        )


def check_ids(count: int, limits: Limits) -> None:
    """Check the ids of a request.

    Raises:
        Refused: There are more than `max_ids`.
    """
    if count > limits.max_ids:
        raise Refused(
            413,
            f"the request has {count:,} ids, above max_ids={limits.max_ids}: "
            + HINT.format("max_ids"),
        )
