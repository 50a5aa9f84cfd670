"""Send load on a schedule (open loop): a request is sent when it is due, even if earlier requests
have no answer yet.

    due   |  |  |  |  |  |  |  |        request n is due at n / rate
    sent  |  |  |  |      || |  |       later where every connection waits for an answer
          `------ latency counts from the due time, not from the time of sending

A client that waits for an answer before it sends the next request sends less to a slow server, and
hides most of the time that users would wait (coordinated omission). Here the wait of a late request
counts from its due time.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

HEAD_END = b"\r\n\r\n"
GIVE_UP = 5  # times the planned seconds of a load; requests not sent by then stay unanswered


@dataclass
class Load:
    """The answers to one load.

    Args:
        seconds: The time from the first due request to the last answer.
        asked: The number of due requests; those without an answer were refused or never sent.
    """

    seconds: float = 0.0
    asked: int = 0
    latencies: list[float] = field(default_factory=list)  # seconds of answered requests
    refused: int = 0  # answered by 503
    failed: list[str] = field(default_factory=list)  # all other answers
    timings: list[dict[str, float]] = field(default_factory=list)  # milliseconds in the server


class Connection:
    """A connection that sends one request at a time.

    Args:
        host: The server's host.
        port: The server's port.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> tuple[int, dict[str, str], bytes]:
        """Send a request and return status, headers and body of its answer."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        writer.write(request)
        head = (await reader.readuntil(HEAD_END)).decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in head[1:] if line)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if headers.get("connection") == "close":
            self.close()
        return int(head[0].split(" ", 2)[1]), headers, body

    def close(self) -> None:
        """Close the connection; the next request opens it again."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def request_of(path: str, body: bytes, headers: dict[str, str]) -> bytes:
    """Return the bytes of a POST request with a body."""
    lines = [f"POST {path} HTTP/1.1", "host: server", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def send(
    host: str, port: int, requests: Sequence[bytes], rate: float, seconds: float, connections: int
) -> Load:
    """Send requests on a schedule.

    Args:
        host: The server's host.
        port: The server's port.
        requests: The bytes of each request; requests are sent in turn.
        rate: The due requests per second; 0 sends the next one whenever a connection is free.
        seconds: The duration of the schedule.
        connections: The largest number of connections.
    """
    load = Load()
    free = deque(Connection(host, port) for _ in range(connections))
    came = asyncio.Semaphore(connections)
    start = time.perf_counter()
    tasks: set[asyncio.Task[None]] = set()
    for number in itertools.count() if not rate else range(int(rate * seconds)):
        due = start + number / rate if rate else time.perf_counter()
        if not rate and due >= start + seconds:
            break
        load.asked += 1
        if time.perf_counter() > start + GIVE_UP * seconds:
            continue  # the request stays without an answer
        if (early := due - time.perf_counter()) > 0:
            await asyncio.sleep(early)
        await came.acquire()
        if not rate:
            due = time.perf_counter()
        request = requests[number % len(requests)]
        task = asyncio.create_task(_one(load, free, came, request, due))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    load.seconds = time.perf_counter() - start
    for connection in free:
        connection.close()
    return load


async def _one(
    load: Load, free: deque[Connection], came: asyncio.Semaphore, request: bytes, due: float
) -> None:
    connection = free.pop()
    try:
        status, headers, body = await connection.ask(request)
        if status == 200:
            load.latencies.append(time.perf_counter() - due)
            load.timings.append(_timing(headers.get("server-timing", "")))
        elif status == 503:
            load.refused += 1
        else:
            load.failed.append(f"{status}: {body[:200].decode(errors='replace')}")
    except (OSError, asyncio.IncompleteReadError) as error:
        connection.close()
        load.failed.append(repr(error))
    finally:
        free.append(connection)
        came.release()


def _timing(text: str) -> dict[str, float]:
    parts = (part.partition(";dur=") for part in text.split(", ") if part)
    return {name: float(value) for name, _, value in parts}
