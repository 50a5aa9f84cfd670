"""Servers of other places for tests: files over HTTP with ranges, and S3 by moto; both with faults.

with http_server(folder) as server:
    server.faults += [status(503)] * 2      # of the next two requests for a file's bytes
    server.url                              # http://127.0.0.1:4711
"""

import html
import os
import time
from contextlib import contextmanager
from email.utils import formatdate
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from threading import Lock, Thread
from urllib.parse import unquote

import pytest

KEYS = {
    "AWS_ACCESS_KEY_ID": "access",
    "AWS_SECRET_ACCESS_KEY": "not-to-be-shown",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def status(number):
    """A fault: the answer has this status, and no body."""
    return ("status", number)


def slow(seconds):
    """A fault: the answer begins after some seconds."""
    return ("slow", seconds)


CUT = ("cut", 0)
"""A fault: the connection ends in the middle of the answer."""


class Faults:
    """The faults of the next requests, and what was asked for.

    Attributes:
        next: The faults of the next requests.
        asked: (method, path, range) of each request.
        on_request: A function that is called with each of them, before the answer.
    """

    def __init__(self):
        self.next = []
        self.asked = []
        self.on_request = None
        self._lock = Lock()

    def take(self, method, path, wanted):
        with self._lock:
            self.asked.append((method, path, wanted))
            if self.on_request:
                self.on_request(method, path)
            return self.next.pop(0) if self.next else None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_): ...

    def do_HEAD(self):
        self._answer(body=False)

    def do_GET(self):
        self._answer(body=True)

    def _answer(self, body):
        wanted = self.headers.get("Range")
        fault = self.server.faults.take(self.command, self.path, wanted)
        if fault and fault[0] == "slow":
            time.sleep(fault[1])
        file = self.server.folder / unquote(self.path).strip("/")
        if fault and fault[0] == "status":
            return self._send(fault[1], b"", {}, body)
        if file.is_dir():
            if not self.path.endswith("/"):
                return self._send(301, b"", {"Location": f"{self.path}/"}, body)
            names = [f"{one.name}/" if one.is_dir() else one.name for one in file.iterdir()]
            links = "".join(f'<a href="{html.escape(name)}">{name}</a>' for name in names)
            top = '<a href="../">..</a><a href="?C=N;O=D">by name</a>'
            page = f"<html>{top}{links}</html>".encode()
            return self._send(200, page, {"Content-Type": "text/html"}, body)
        if not file.is_file():
            return self._send(404, b"", {}, body)
        raw = file.read_bytes()
        headers = {
            "Content-Type": "application/octet-stream",
            "Last-Modified": formatdate(os.stat(file).st_mtime, usegmt=True),
            "ETag": f'"{md5(raw).hexdigest()}"',
        }
        code = 200
        if wanted and self.server.answers_ranges:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            if int(first) >= len(raw):
                return self._send(416, b"", {}, body)
            raw = raw[int(first) : int(last) + 1 if last else None]
            code = 206
        self._send(code, raw, headers, body, cut=bool(fault) and fault[0] == "cut")

    def _send(self, code, raw, headers, body, cut=False):
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(raw))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(raw[: len(raw) // 2] if cut else raw)
        if cut:
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)


@contextmanager
def _serving(server):
    """A server that answers until the end of the `with`."""
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def http_server(folder, *, answers_ranges=True):
    """A web server of a folder, with pages that list its directories."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None
    server.folder = folder
    server.answers_ranges = answers_ranges
    server.faults = Faults()
    server.url = f"http://127.0.0.1:{server.server_port}"
    with _serving(server):
        yield server


class _Faulty:
    """An application of WSGI with faults."""

    def __init__(self, application, faults):
        self._application = application
        self._faults = faults

    def __call__(self, environ, start_response):
        method = environ["REQUEST_METHOD"]
        wanted = environ.get("HTTP_RANGE")
        fault = self._faults.take(method, environ["PATH_INFO"], wanted) or ("", 0)
        if fault[0] == "status":
            start_response(f"{fault[1]} fault", [("Content-Length", "0")])
            return [b""]
        if fault[0] == "slow":
            time.sleep(fault[1])
        parts = self._application(environ, start_response)
        if fault[0] == "cut":
            raw = b"".join(parts)
            return [raw[: len(raw) // 2]]
        return parts


@contextmanager
def s3_server():
    """A server of S3, and a pyarrow file system that writes to it."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from pyarrow.fs import S3FileSystem
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Silent(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *_): ...

    faults = Faults()
    application = _Faulty(DomainDispatcherApplication(create_backend_app), faults)
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Silent)
    server.faults = faults
    server.url = f"http://127.0.0.1:{server.port}"
    server.files = S3FileSystem(
        endpoint_override=server.url,
        access_key="access",
        secret_key="not-to-be-shown",
        allow_bucket_creation=True,
        allow_bucket_deletion=True,
    )
    with _serving(server):
        yield server


needs_s3 = [
    pytest.mark.full,
    pytest.mark.skipif(find_spec("moto") is None, reason='needs moto: pip install ".[dev]"'),
]
PLACES = ["http", pytest.param("s3", marks=needs_s3)]


@pytest.fixture(scope="module")
def s3():
    pytest.importorskip("moto", reason='needs moto: pip install ".[dev]"')
    with pytest.MonkeyPatch.context() as patch, s3_server() as server:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": server.url}.items():
            patch.setenv(name, value)
        yield server


class Shelf:
    """A folder on disk, and the same files elsewhere; `put` writes there what is on disk now."""

    def __init__(self, folder, uri, server, put):
        self.folder = folder
        self.uri = uri
        self.server = server
        self.put = put


@pytest.fixture(params=PLACES)
def shelf(request, tmp_path, monkeypatch):
    folder = tmp_path / "served" / "logs"
    folder.mkdir(parents=True)
    if request.param == "http":
        with http_server(folder.parent) as server:
            yield Shelf(folder, f"{server.url}/logs", server, lambda: None)
        return
    server = request.getfixturevalue("s3")
    bucket = f"bucket-{os.urandom(4).hex()}"
    server.files.create_dir(bucket)

    def put():
        for file in filter(os.path.isfile, folder.rglob("*")):
            with server.files.open_output_stream(
                f"{bucket}/logs/{file.relative_to(folder)}", compression=None
            ) as out:
                out.write(file.read_bytes())

    server.faults.next.clear()
    server.faults.on_request = None
    yield Shelf(folder, f"s3://{bucket}/logs", server, put)
