"""Limit the number of concurrent requests and their bytes.

An overloaded server refuses a request at once (503, Retry-After), before it reads the body.
Otherwise the queue would grow until every client gave up before its answer came.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request

from recapp.serving.limits import Limits, Refused, busy, check_body_bytes


class Admission:
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


async def read_body(request: Request, limits: Limits, admission: Admission) -> memoryview:
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
    length = request.headers.get("content-length", "0")
    if length.isdecimal():
        check_body_bytes(int(length), limits)
    parts: list[bytes] = []
    taken = 0
    try:
        async for part in request.stream():
            check_body_bytes(taken + len(part), limits)
            admission.take(len(part))
            taken += len(part)
            parts.append(part)
    except BaseException:
        admission.release(taken)
        raise
    return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))
