"""The limits of a server, and the errors for requests that exceed them.

A refusal is an HTTP status and one line of text. The line names the field of the request, or the
setting of the server, and the fix.

An overloaded server refuses a request at once (503, Retry-After), before it reads the body.
Otherwise the queue would grow until every client gave up before its answer came.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from recapp.settings.values import Positive, Timeout

if TYPE_CHECKING:
    from starlette.requests import Request

RETRY_AFTER_SECONDS = 1


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a server, each a setting of `recapp.serve`.

    Args:
        max_body_bytes: The bytes of a request's body.
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


def check_most(count: int, setting: str, fault: str, limits: Limits) -> None:
    """Check a number of a request against a limit.

    Args:
        count: The number.
        setting: The name of the limit.
        fault: The words for a number above the limit.
        limits: The limits.

    Raises:
        Refused: The number is above the limit.
    """
    most = getattr(limits, setting)
    if count > most:
        hint = f"send less at once, or start the server with a larger {setting}"
        raise Refused(413, f"{fault}, above {setting}={most}: {hint}")


def check_rows(count: int, limits: Limits) -> None:
    """Check the rows of a request.

    Raises:
        Refused: There are none, or more than `max_rows`.
    """
    if count == 0:
        raise bad("the request has no rows: send at least one")
    check_most(count, "max_rows", f"the request has {count:,} rows", limits)


class OpenRequests:
    """Count the requests in the server, and the bytes of their bodies.

    Args:
        limits: The limits; only `max_queue` and `max_pending_bytes` are used.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.requests = 0
        self.pending_bytes = 0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request inside the `with`.

        Raises:
            Refused: `max_queue` requests are in the server.
        """
        if self.requests >= self._limits.max_queue:
            raise busy(
                f"{self.requests} requests are waiting, max_queue={self._limits.max_queue}: try "
                "again later"
            )
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    def take(self, count: int) -> None:
        """Count bytes of a body.

        Raises:
            Refused: The total would exceed `max_pending_bytes`.
        """
        if self.pending_bytes + count > self._limits.max_pending_bytes:
            raise busy(
                f"the bodies of waiting requests have {self.pending_bytes:,} bytes, "
                f"max_pending_bytes={self._limits.max_pending_bytes}: try again later"
            )
        self.pending_bytes += count

    def release(self, count: int) -> None:
        """Stop counting bytes of a body."""
        self.pending_bytes -= count


async def read_body(request: "Request", limits: Limits, admission: OpenRequests) -> memoryview:
    """Read the body of a request. The caller releases its bytes from `admission`.

    Args:
        request: The request.
        limits: The limits; only `max_body_bytes` is used.
        admission: The counter of the bytes.

    Raises:
        Refused: The body is compressed or too long, or the server holds too many bytes.
        ClientDisconnect: The client has disconnected.
    """
    encoding = request.headers.get("content-encoding", "").strip()
    if encoding.lower() not in ("", "identity"):
        raise Refused(
            415,
            f"Content-Encoding: {encoding[:40]}: bodies are taken as they are; send it without",
            {"accept-encoding": "identity"},
        )

    def check(count: int) -> None:
        check_most(count, "max_body_bytes", f"the body has {count:,} bytes or more", limits)

    length = request.headers.get("content-length", "0")
    if length.isdecimal():
        check(int(length))
    parts: list[bytes] = []
    total = 0
    try:
        async for part in request.stream():
            check(total + len(part))
            admission.take(len(part))
            total += len(part)
            parts.append(part)
    except BaseException:
        admission.release(total)
        raise
    return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))
