"""`serve`: measure the answers of a server to a rising load, in each protocol.

    artefact -> `recapp.serve` in a process of its own -> its highest rate in requests per second
    (each connection sends again at once) -> shares of that rate, on a schedule -> latencies

Protocols and request sizes take turns in each round. Latency counts from the due time of a request
(`tests/speed/serving_client.py`). `rows_ratio` is the highest rate of a round over the
highest rate with JSON rows: above 1 is a higher rate. The header `Server-Timing` of each answer
holds the server's own time. The overhead is this time minus the model's, and includes the wait for
other requests. Client and server share the machine.
"""

import asyncio
import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from recapp.console import note, progress
from recapp.errors import LaunchError
from recapp.reporting.phases import quartiles

from .lab import Lab, Settings
from .line_process import LineProcess
from .serving_client import (
    ROUTES,
    Connection,
    Load,
    body_of,
    draw,
    request_of,
    send,
)

BODIES = 64  # different bodies, sent in turn
CONNECTIONS = 32
SATURATION = 1.0  # the share that is sent without a schedule
SECONDS_TO_END = 20  # for the end of the server
LEAST_FOR_999 = 1000  # the number of answers that a p99.9 needs

Case = tuple[str, int]
"""A protocol, and the rows of a request."""


@dataclass
class Found:
    """The loads of one case at one share, round by round."""

    rates: list[float] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)


def run(session: Lab) -> None:
    """Measure a server.

    Args:
        session: The session; its settings name the artefact.
    """
    settings = session.settings
    with _server(settings, session.folder / "server.txt") as (host, port, row):
        requests = asyncio.run(_requests(host, port, row["model"], settings))
        shares = sorted({*settings.load, SATURATION})
        found: dict[tuple[Case, float], Found] = {
            (case, share): Found() for case in requests for share in shares
        }
        with progress("serve, rounds", settings.rounds) as advance:
            for number in range(settings.rounds):
                cases = list(requests)[:: 1 if number % 2 == 0 else -1]
                for case in cases:
                    _round(host, port, requests[case], case, shares, settings, found)
                advance(1)
    for (case, share), loads in found.items():
        session.add(_row(case, share, loads, found.get((("rows", case[1]), share))))


@contextmanager
def _server(settings: Settings, errors: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Run a server inside the `with`; yield its host, its port and its first row.

    Args:
        settings: The settings of the benchmark.
        errors: The file of its standard error.
    """
    command = [sys.executable, "-m", "recapp.serve", "port=0", "format=json"]
    command += [f"artefact='{settings.artefact}'", f"threads={settings.threads[0]}"]
    process = LineProcess("recapp.serve", command, errors)
    try:
        row = json.loads(process.answer())["rows"][0]
        host, _, port = row["address"].removeprefix("http://").rpartition(":")
        yield host, int(port), row
    finally:
        process.terminate()
        process.close(SECONDS_TO_END)


async def _requests(
    host: str, port: int, model: str, settings: Settings
) -> dict[Case, list[bytes]]:
    """Return the requests of each case as bytes."""
    connection = Connection(host, port)
    place = f"/v2/models/{model}"
    said = []
    for path in (place, f"{place}/example"):
        request = f"GET {path} HTTP/1.1\r\nhost: server\r\n\r\n".encode()
        said.append(json.loads((await connection.ask(request))[2]))
    metadata = said[0]
    example = said[1]["rows"]
    drawn = partial(draw, metadata, example)
    tried = request_of(f"{place}/{ROUTES['rows']}", *body_of("rows", drawn(64, 0)))
    any_ids = (await connection.ask(tried))[0] == 200
    if not any_ids:
        note("the model refuses unknown ids: requests have the ids of its example")
    connection.close()
    requests: dict[Case, list[bytes]] = {}
    for rows in settings.batch_size:
        columns = [drawn(rows, seed, any_ids) for seed in range(BODIES)]
        for protocol in settings.protocol:
            path = f"{place}/{ROUTES[protocol]}"
            bodies = [body_of(protocol, each) for each in columns]
            requests[protocol, rows] = [request_of(path, *body) for body in bodies]
    return requests


def _round(
    host: str,
    port: int,
    requests: list[bytes],
    case: Case,
    shares: list[float],
    settings: Settings,
    found: Mapping[tuple[Case, float], Found],
) -> None:
    """Find the highest rate of a case, then send each share of this rate."""
    seconds = settings.round_seconds

    def measure(rate: float) -> Load:
        load = asyncio.run(send(host, port, requests, rate, seconds, CONNECTIONS))
        if load.failed or not load.latencies:
            raise LaunchError(
                f"serve, {case[0]}, {case[1]} rows: {len(load.failed)} of {load.asked} requests "
                f"failed: {load.failed[0] if load.failed else 'all were refused'}"
            )
        return load

    most = measure(0)
    rate = len(most.latencies) / most.seconds
    for share in shares:
        held = found[case, share]
        held.rates.append(rate * share)
        held.loads.append(most if share == SATURATION else measure(rate * share))


def _row(case: Case, share: float, found: Found, rows: Found | None) -> dict[str, Any]:
    """Return the row of one case at one share."""
    latencies = sorted(ms * 1e3 for load in found.loads for ms in load.latencies)
    medians = [statistics.median(load.latencies) * 1e3 for load in found.loads]
    _, first, third = quartiles(medians)
    timings = [timing for load in found.loads for timing in load.timings]
    overhead = [timing["total"] - timing["model"] for timing in timings]
    compared = zip(rows.rates, found.rates, strict=True) if rows and share == SATURATION else ()
    ratios = [ours / theirs for theirs, ours in compared]
    asked = sum(load.asked for load in found.loads)
    answered = len(latencies)
    seconds = sum(load.seconds for load in found.loads)
    keys = ("rows_ratio", "rows_ratio_q1", "rows_ratio_q3")
    return {
        "protocol": case[0],
        "rows": case[1],
        "load": "most" if share == SATURATION else share,
        "rate": statistics.median(found.rates),
        "requests_per_second": answered / seconds,
        "rows_per_second": answered * case[1] / seconds,
        "median_ms": _quantile(latencies, 0.5),
        "q1_ms": first,
        "q3_ms": third,
        "p99_ms": _quantile(latencies, 0.99),
        "p999_ms": _quantile(latencies, 0.999) if answered >= LEAST_FOR_999 else None,
        "unanswered_share": 1 - answered / asked,
        "server_ms": statistics.median(timing["total"] for timing in timings),
        "model_ms": statistics.median(timing["model"] for timing in timings),
        "read_ms": statistics.median(timing["read"] for timing in timings),
        "overhead_ms": statistics.median(overhead),
        **dict(zip(keys, quartiles(ratios) if ratios else (None,) * 3, strict=True)),
    }


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
