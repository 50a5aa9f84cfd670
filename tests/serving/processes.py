"""A server in a process of its own, and plain requests over sockets."""

import http.client
import json
import re
import signal
import socket
import time
from contextlib import closing

from jobs import metrics_of, start


def trained(stored, *overrides):
    """A small trained checkpoint."""
    run = stored.small_run("tables.id_rule=hash", *overrides, world=1)
    return run / metrics_of(run)["checkpoint"]


class ServerProcess:
    """`python -m recapp.serve` at a free port, or at the one that it had before."""

    def __init__(self, folder, artefact, *settings, port=0, **variables):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        given = [f"artefact={artefact}", f"port={port}", "format=json", *settings]
        self.process = start("serve", *given, cwd=folder, **variables)
        try:
            self.row = self._row()
        except BaseException:
            self.stop(signal.SIGKILL)
            raise
        self.address = self.row["address"]
        self.host, _, port = self.address.removeprefix("http://").partition(":")
        self.port = int(port)

    def _row(self):
        end = time.monotonic() + 120
        while not (text := (self.folder / "out.txt").read_text()).endswith("\n"):
            assert self.process.poll() is None, self.errors
            assert time.monotonic() < end, "it does not start"
            time.sleep(0.05)
        return json.loads(text)["rows"][0]

    @property
    def errors(self):
        """What it has said on standard error."""
        return (self.folder / "err.txt").read_text()

    def connect(self):
        """A connection to it."""
        return http.client.HTTPConnection(self.host, self.port, timeout=60)

    def ask(self, method, path, body=None, connection=None, headers=()):
        """(status, headers, body) of an answer."""
        given = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        with closing(self.connect()) if connection is None else _kept(connection) as held:
            held.request(method, path, given, dict(headers))
            answer = held.getresponse()
            return answer.status, dict(answer.headers), answer.read()

    def metrics(self):
        """The numbers that it has counted, by name and labels."""
        lines = self.ask("GET", "/metrics")[2].decode().splitlines()
        pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        return {name: float(value) for name, _, value in pairs}

    def stop(self, number=signal.SIGTERM):
        """Send a signal and wait for the end; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(60)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Leave no process behind, whatever a test found."""
        self.stop(signal.SIGKILL)


class _kept:
    def __init__(self, connection):
        self.connection = connection

    def __enter__(self):
        return self.connection

    def __exit__(self, *_):
        pass


def whole(connection):
    """What comes until the other side closes the connection."""
    came = bytearray()
    try:
        while part := connection.recv(4096):
            came += part
    except ConnectionError:
        pass
    return bytes(came)


def one_answer(connection):
    """The head and the body of an answer, whose connection may stay open."""
    came = b""
    while b"\r\n\r\n" not in came:
        came += connection.recv(4096)
    head, _, body = came.partition(b"\r\n\r\n")
    length = int(re.search(rb"content-length: (\d+)", head)[1])
    while len(body) < length:
        body += connection.recv(4096)
    return head, body


def raw(server):
    """A socket that speaks whatever the test writes."""
    return socket.create_connection((server.host, server.port), timeout=60)
