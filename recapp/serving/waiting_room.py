"""Who gets in: how many requests there are at one time, and how many bytes of them.

A server that is asked for more than it can answer says so at once (503, Retry-After), before it has
read a body: otherwise every request would wait longer than its client does, and none be answered.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request

from recapp.serving.limits import Limits, Refused, busy, check_body_bytes


class Admission:
    """Counts the requests inside.

    Args:
        limits: The limits: `max_queue` and `max_pending_bytes` count.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.requests = 0
        self.pending_bytes = 0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Hold the place of a request inside the `with`.

        Raises:
            Refused: All places are taken.
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
        """Take room for bytes of a body.

        Raises:
            Refused: There is none.
        """
        if self.pending_bytes + count > self._limits.max_pending_bytes:
            raise busy(
                f"the bodies of waiting requests have {self.pending_bytes:,} bytes, "
                f"max_pending_bytes={self._limits.max_pending_bytes}: try again later"
            )
        self.pending_bytes += count

    def release(self, count: int) -> None:
        """Give back the room of bytes."""
        self.pending_bytes -= count


async def read_body(request: Request, limits: Limits, admission: Admission) -> memoryview:
    """Return the body of a request; its room is the caller's to release.

    Args:
        request: The request.
        limits: The limits: `max_body_bytes` counts.
        admission: Where its bytes are counted.

    Raises:
        Refused: It is compressed, too long, or there is no room for it.
        ClientDisconnect: The client has gone.
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
