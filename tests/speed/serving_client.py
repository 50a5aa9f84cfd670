"""The client of a measured server: it makes random requests in each protocol, from the metadata of
the server's model, and sends them on a schedule (open loop).

| name     | route          | body                                              |
|----------|----------------|---------------------------------------------------|
| `rows`   | `infer_rows`   | rows of JSON                                      |
| `json`   | `infer`        | Open Inference, tensors in JSON                   |
| `binary` | `infer`        | Open Inference, tensors in binary after the JSON, |
|          |                | in the answer too                                 |

Numbers are uniform from 0 to 99. Ids are uniform over 32 bits, as hashes are, unless the model
refuses such ids; then they come from the model's example.

A request is sent when it is due, even if earlier requests have no answer yet:

    due   |  |  |  |  |  |  |  |        request n is due at n / rate
    sent  |  |  |  |      || |  |       later where every connection waits for an answer
          `------ latency counts from the due time, not from the time of sending

A client that waits for an answer before it sends the next request sends less to a slow server, and
hides most of the time that users would wait (coordinated omission). Here the wait of a late request
counts from its due time.
"""

import asyncio
import itertools
import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from recapp.serving.open_inference import BINARY_SIZE, JSON_LENGTH, binary_of

ROUTES = {
    "rows": "infer_rows",
    "json": "infer",
    "binary": "infer",
}
"""The route of each protocol."""

Columns = Mapping[str, npt.NDArray[Any] | list[Any]]
Body = tuple[bytes, dict[str, str]]
"""The bytes of a body, and its headers."""


def draw(
    metadata: Mapping[str, Any],
    example: Sequence[Mapping[str, Any]],
    rows: int,
    seed: int,
    any_ids: bool = True,
) -> Columns:
    """Return random columns for a model.

    Args:
        metadata: The metadata of the model, from the server.
        example: Rows that the model takes.
        rows: The number of rows.
        seed: The seed of the random numbers.
        any_ids: Whether ids may be any number of 32 bits; else they come from the example.
    """
    random = np.random.default_rng(seed)
    columns: dict[str, npt.NDArray[Any] | list[Any]] = {}
    for each in metadata["inputs"]:
        name = each["name"]
        if each["datatype"] == "FP32":
            columns[name] = random.integers(0, 100, rows).astype(np.float32)
        elif not any_ids or isinstance(example[0][name], list) or each["datatype"] == "INT64":
            columns[name] = [example[n][name] for n in random.integers(0, len(example), rows)]
        else:
            columns[name] = random.integers(0, 2**32, rows)
    return columns


def body_of(protocol: str, columns: Columns) -> Body:
    """Return columns as a request body.

    Args:
        protocol: A key of ROUTES.
        columns: The rows.
    """
    if protocol == "rows":
        plain = {name: _plain(values) for name, values in columns.items()}
        rows = [dict(zip(plain, row, strict=True)) for row in zip(*plain.values(), strict=True)]
        return json.dumps({"rows": rows}).encode(), {}
    return _tensors(columns, binary=protocol == "binary")


def _plain(values: npt.NDArray[Any] | list[Any]) -> list[Any]:
    return values if isinstance(values, list) else values.tolist()


def _tensors(columns: Columns, binary: bool) -> Body:
    inputs: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for name, values in columns.items():
        pairs = [(name, values)]
        if isinstance(values, list) and any(isinstance(row, list) for row in values):
            bags = [row or [] for row in values]  # a missing list counts as an empty one
            pairs = [
                (name, [id for row in bags for id in row]),
                (f"{name}.lengths", [len(row) for row in bags]),
            ]
        for each, held in pairs:
            kind, array = _tensor(held)
            described: dict[str, Any] = {"name": each, "datatype": kind, "shape": [len(array)]}
            if binary:
                parts.append(binary_of(array))
                described["parameters"] = {BINARY_SIZE: len(parts[-1])}
            elif isinstance(array, list):
                described["data"] = [text.decode() for text in array]
            else:
                described["data"] = array.tolist()
            inputs.append(described)
    request: dict[str, Any] = {"inputs": inputs}
    if not binary:
        return json.dumps(request).encode(), {}
    text = json.dumps(request | {"parameters": {"binary_data_output": True}}).encode()
    return b"".join([text, *parts]), {JSON_LENGTH: str(len(text))}


def _tensor(values: npt.NDArray[Any] | list[Any]) -> tuple[str, npt.NDArray[Any] | list[bytes]]:
    """Return the datatype and the values of a tensor: numbers, or texts if any value is a text or
    missing.
    """
    if not isinstance(values, list):
        return ("FP32", values) if values.dtype == np.float32 else ("INT64", values)
    if all(isinstance(value, int) for value in values):
        return "INT64", np.asarray(values, dtype=np.int64)
    return "BYTES", [b"" if value is None else str(value).encode() for value in values]


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
