"""A server under faults for a while: models that change, overload, bad requests, slow clients, and
its own violent end. Every answer is right, every request gets one answer or loses its connection,
and memory stays where it was.

`RECAPP_SOAK_SECONDS` says how long each part takes: a few seconds by default.
"""

import http.client
import itertools
import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from serving.processes import raw, trained
from serving.test_serve_command import body_of, rows

from recapp import load_model

pytestmark = pytest.mark.full

SECONDS = float(os.environ.get("RECAPP_SOAK_SECONDS", "3"))
CLIENTS = 6
ROUNDING = 1e-6  # of float32, by what else is in a batch
GROWTH = 48e6  # bytes that memory may grow by while parts repeat


@pytest.fixture(scope="module")
def models(stored):
    """Two trained checkpoints of the same features."""
    return [trained(stored), trained(stored, "seed=2")]


@pytest.fixture(scope="module")
def expected(models):
    """The scores of some bodies by each version: what a right answer is."""
    scorers = [load_model(path) for path in models]
    bodies = []
    for seed in range(12):
        some = rows(1 + seed * 3 % 17, seed)
        bodies.append((json.dumps(body_of(some)), {s.version: s.predict(some) for s in scorers}))
    return bodies


class Clients:
    """Threads that ask without a pause and check every answer; what came of each request."""

    def __init__(self, server, expected, count=CLIENTS):
        self.server = server
        self.expected = expected
        self.came = Counter()
        self.versions = Counter()
        self.wrong = []
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(count)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._ends.set()
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads)

    def _ask(self, number):
        connection = self.server.connect()  # opens again by itself
        for turn in itertools.count(number):
            if self._ends.is_set():
                break
            body, right = self.expected[turn % len(self.expected)]
            self.came["asked"] += 1
            try:
                connection.request("POST", "/v2/models/current/infer_rows", body)
                answer = connection.getresponse()
                self._check(answer.status, answer.read(), right)
            except (OSError, http.client.HTTPException):
                self.came["lost"] += 1
                connection.close()
                time.sleep(0.02)
        connection.close()

    def _check(self, status, body, right):
        self.came[status] += 1
        if status != 200:
            return
        answer = json.loads(body)
        version = answer["model_version"]
        self.versions[version] += 1
        scores = torch.tensor(answer["scores"])
        if version not in right or len(scores) != len(right[version]):
            self.wrong.append((version, len(scores)))
        elif not torch.allclose(scores, right[version], rtol=0, atol=ROUNDING):
            self.wrong.append((version, float((scores - right[version]).abs().max())))


def all_answered(clients, *, lost=0):
    """Whether each request was answered once and rightly; `lost` at most lost their connection."""
    assert clients.wrong == []
    asked = clients.came.pop("asked")
    assert sum(clients.came.values()) == asked, clients.came
    assert clients.came["lost"] <= lost, clients.came
    assert set(clients.came) <= {200, 503, "lost"}, clients.came
    assert clients.came[200] > 0
    return True


def memory(server):
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024


@pytest.fixture
def served(models, tmp_path, start_server):
    """A server whose model is a link, and what puts another one behind it."""
    link = tmp_path / "current"
    link.symlink_to(models[0])
    server = start_server(tmp_path / "server", link)
    turns = itertools.cycle([models[1], models[0]])

    def change(target=None):
        new = tmp_path / "new"
        new.symlink_to(next(turns) if target is None else target)
        new.replace(link)

    return server, change


def test_models_change_under_load_and_no_request_notices(served, expected):
    server, change = served
    with Clients(server, expected) as clients:
        end = time.monotonic() + SECONDS
        reloads = 0
        while time.monotonic() < end or reloads < 2:
            change()
            assert server.ask("POST", "/v2/repository/models/current/load")[0] == 200
            reloads += 1
    assert all_answered(clients) and len(clients.versions) == 2
    assert set(clients.came) - {"lost"} == {200}
    assert server.stop() == 0


def test_a_damaged_model_under_load_stays_out(served, expected, tmp_path):
    server, change = served
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/manifest.json").write_text('{"format": 2')
    with Clients(server, expected) as clients:
        for _ in range(3):
            change(tmp_path / "damaged")
            status, _, body = server.ask("POST", "/v2/repository/models/current/load")
            assert status == 400 and b"stays in service" in body
    assert all_answered(clients) and len(clients.versions) == 1


def test_a_killed_server_loses_connections_and_nothing_else(
    models, expected, tmp_path, start_server
):
    link = tmp_path / "current"
    link.symlink_to(models[0])
    server = start_server(tmp_path / "server", link)
    with Clients(server, expected) as clients:
        time.sleep(SECONDS / 4)
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
        answered = clients.came[200]
        again = start_server(tmp_path / "server", link, port=server.port)
        time.sleep(SECONDS / 4)
    assert answered and clients.came[200] > answered
    assert all_answered(clients, lost=10**6)
    assert again.stop() == 0


def test_overload_is_refused_and_what_is_taken_is_right(models, expected, tmp_path, start_server):
    link = tmp_path / "current"
    link.symlink_to(models[0])
    server = start_server(tmp_path / "server", link, "max_queue=4")
    with Clients(server, expected, 24) as clients:
        time.sleep(SECONDS)
    assert clients.came[503] > 0
    assert all_answered(clients)
    after = server.metrics()
    assert after["recapp_requests_in_progress"] == after["recapp_pending_bytes"] == 0
    assert server.ask("GET", "/v2/health/live")[0] == 200
    assert server.stop() == 0


def disturb(server, ends, chance):
    """Send whatever a server should not be sent, until the end."""
    head = b"POST /v2/models/current/infer HTTP/1.1\r\nhost: x\r\n"
    good = json.dumps({"rows": [{"I1": 1}]}).encode()
    while not ends.is_set():
        with raw(server) as connection:
            kind = chance.randrange(5)
            if kind == 0:  # noise
                connection.sendall(chance.randbytes(200) + b"\r\n\r\n")
            elif kind == 1:  # goes away in the middle of a body
                connection.sendall(head + b"content-length: 1000\r\n\r\n" + good)
            elif kind == 2:  # goes away before the answer
                connection.sendall(head + b"content-length: %d\r\n\r\n" % len(good) + good)
            elif kind == 3:  # a head that does not end
                connection.sendall(head)
                time.sleep(0.05)
            else:
                connection.sendall(head + b"content-length: 2\r\n\r\n{}")
                assert connection.recv(4096).startswith(b"HTTP/1.1 ")


def test_memory_stays_flat_under_everything_at_once(served, expected):
    server, change = served
    ends = threading.Event()
    bad = [
        threading.Thread(target=disturb, args=(server, ends, random.Random(n))) for n in range(2)
    ]
    sizes = []
    for thread in bad:
        thread.start()
    try:
        with Clients(server, expected) as clients:
            for _ in range(4):
                for _ in range(2):  # both models, so that each part ends with the same one
                    change()
                    assert server.ask("POST", "/v2/repository/models/current/load")[0] == 200
                time.sleep(SECONDS / 2)
                sizes.append(memory(server))
    finally:
        ends.set()
        for thread in bad:
            thread.join(60)
    assert all_answered(clients)
    assert sizes[-1] - sizes[0] < GROWTH, sizes
    time.sleep(0.5)
    after = server.metrics()
    assert after["recapp_requests_in_progress"] == after["recapp_pending_bytes"] == 0
    assert server.stop() == 0
    assert "Traceback" not in server.errors
