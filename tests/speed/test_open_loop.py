"""Load on a schedule: what a slow server makes people wait is counted from when they came."""

import asyncio
from itertools import pairwise

from .serving_client import request_of, send

WORK = 0.03  # seconds of the server below


def loaded(rate, seconds, connections=1, answer=b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n"):
    """What came of a load on a server that answers one request of a connection after another."""

    async def serve(reader, writer):
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await asyncio.sleep(WORK)
                writer.write(answer + b"server-timing: model;dur=2.5, total;dur=4\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    async def run():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        request = request_of("/", b"", {})
        found = await send("127.0.0.1", port, [request], rate, seconds, connections)
        server.close()
        await asyncio.sleep(0.1)  # its connections notice
        return found

    return asyncio.run(run())


def test_a_request_that_could_not_be_sent_in_time_has_waited_since_it_was_due():
    load = loaded(rate=100, seconds=0.1)
    assert load.asked == len(load.latencies) == 10
    for number, latency in enumerate(load.latencies):
        assert latency >= (number + 1) * WORK - number * 0.01
    assert all(later > sooner for sooner, later in pairwise(load.latencies))


def test_without_a_schedule_a_request_is_sent_when_a_connection_is_free():
    load = loaded(rate=0, seconds=0.2, connections=2)
    assert load.asked == len(load.latencies) >= 2 and min(load.latencies) >= WORK
    assert load.timings[0] == {"model": 2.5, "total": 4.0}


def test_what_is_refused_or_fails_is_no_answer():
    refused = loaded(50, 0.1, answer=b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n")
    assert refused.asked == refused.refused == 5 and refused.latencies == refused.failed == []
    failed = loaded(50, 0.1, answer=b"HTTP/1.1 400 Bad\r\ncontent-length: 0\r\n")
    assert len(failed.failed) == 5 and failed.failed[0].startswith("400: ")
