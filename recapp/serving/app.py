"""The HTTP routes of a server, and its page for people. Each protocol reads its bodies in a file of
its own.

| route                                            | answers                                   |
|--------------------------------------------------|-------------------------------------------|
| `GET /`                                          | a page for people                         |
| `GET /metrics`                                   | Prometheus text                           |
| `GET /v2`, `/v2/health/live`, `/v2/health/ready` | the server                                |
| `GET /v2/models/NAME[/versions/V][/ready]`       | the model                                 |
| `GET /v2/models/NAME/example`                    | raw rows to try, as `infer_rows` takes it |
| `POST /v2/models/NAME[/versions/V]/infer`        | Open Inference, JSON or binary tensors    |
| `POST .../infer_rows`                            | rows of JSON                              |
| `POST /v2/repository/index`                      | the model in service                      |
| `POST /v2/repository/models/NAME/load`           | loads it anew, from the server's own path |

Every error is `{"error": "one line"}`. Pages of other sites may not post: a browser sends the
origin of the page, and the server accepts only its own origin.

The page at `/` has its style and its script inside, and loads nothing from other sites: its
Content-Security-Policy header lets the browser use only those two, by their hashes. The script
reads `/metrics` once a second.
"""

import asyncio
import base64
import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from html import escape
from importlib import resources
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from recapp.console import Column, readable
from recapp.errors import suggest
from recapp.inference.scorer import Leader
from recapp.serving.counts import Counts
from recapp.serving.json_rows import json_answer, read_object, read_rows
from recapp.serving.limits import Limits, OpenRequests, Refused, bad, busy, read_body
from recapp.serving.open_inference import read_infer
from recapp.serving.served_model import Batcher, ModelInService, Question, QueuedRequest, Served

# The function that reads the body of each route, by the last part of the route's path.
READERS = {"infer": read_infer, "infer_rows": read_rows}

EXTENSIONS = ("binary_tensor_data", "model_repository")
ERROR_LETTERS = 1000  # cuts error texts: a request may hold a name of megabytes
LOOK_SECONDS = 1.0  # between two checks of the ranks while a request waits
GONE = 499  # status in the metrics when the client has disconnected before the answer


class Server:
    """Answer the requests of all routes.

    Args:
        model: The model in service.
        batcher: The worker that computes batches.
        limits: The bounds of requests.
        counts: The counters behind `/metrics`.
        version: The version of recapp.
        leader: This rank, where several ranks hold the model; while it cannot reach a rank,
            requests get status 503.
    """

    def __init__(
        self,
        model: ModelInService,
        batcher: Batcher,
        limits: Limits,
        counts: Counts,
        version: str,
        leader: Leader | None = None,
    ) -> None:
        self.model = model
        self.batcher = batcher
        self.limits = limits
        self.counts = counts
        self.version = version
        self.leader = leader
        self.admission = OpenRequests(limits)
        counts.gauge("requests_in_progress", "Requests inside.", lambda: self.admission.requests)
        counts.gauge("queue_requests", "Requests that wait.", lambda: self.batcher.waiting)
        counts.gauge("pending_bytes", "Bytes of bodies.", lambda: self.admission.pending_bytes)
        # Whether the server is shutting down: not ready, but still answering requests.
        self.ends = False

    @property
    def is_ready(self) -> bool:
        """Return whether the server is ready for requests."""
        return not (self.ends or self._obstacle())

    def _obstacle(self) -> str:
        return self.leader.obstacle() if self.leader is not None else ""

    def _check_ranks(self) -> None:
        """Check that all ranks answer.

        Raises:
            Refused: A rank does not answer.
        """
        if obstacle := self._obstacle():
            raise busy(obstacle)

    def application(self) -> Starlette:
        """Return the routes as an ASGI application; its lifespan starts and stops the worker."""
        model = "/v2/models/{name}"
        places = (model, f"{model}/versions/{{version}}")
        routes = [
            Route("/", self._page),
            Route("/metrics", self._metrics),
            Route("/v2", self._server),
            Route("/v2/health/live", self._live),
            Route("/v2/health/ready", self._ready),
            *(Route(place, self._metadata) for place in places),
            *(Route(f"{place}/ready", self._model_ready) for place in places),
            *(Route(f"{place}/example", self._example) for place in places),
            *(
                Route(f"{place}/{verb}", partial(self.infer, verb), methods=["POST"])
                for place in places
                for verb in READERS
            ),
            Route("/v2/repository/index", self._index, methods=["POST"]),
            Route("/v2/repository/models/{name}/load", self._load, methods=["POST"]),
        ]
        return Starlette(
            routes=routes,
            lifespan=self._lifespan,
            exception_handlers={HTTPException: _no_route, Refused: _refused},
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> Any:
        self.batcher.start()
        yield
        await asyncio.to_thread(self.batcher.stop)

    # ---- about the server

    async def _page(self, request: Request) -> Response:
        return page_of(self.model.current(), self.version)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.counts.text(), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    async def _server(self, request: Request) -> Response:
        return json_answer({"name": "recapp", "version": self.version, "extensions": EXTENSIONS})

    async def _live(self, request: Request) -> Response:
        return json_answer({"live": True})

    async def _ready(self, request: Request) -> Response:
        return json_answer({"ready": self.is_ready}, 200 if self.is_ready else 503)

    # ---- about the model

    def _served(self, request: Request) -> Served:
        served = self.model.current()
        check_place(request, served)
        return served

    async def _metadata(self, request: Request) -> Response:
        return json_answer(self._served(request).metadata())

    async def _model_ready(self, request: Request) -> Response:
        served = self._served(request)
        answer = {"name": served.name, "ready": self.is_ready}
        return json_answer(answer, 200 if self.is_ready else 503)

    async def _example(self, request: Request) -> Response:
        """Return example rows, and whether they are synthetic."""
        served = self._served(request)
        return json_answer({"rows": served.example(), "made_up": served.scorer.example is None})

    async def _index(self, request: Request) -> Response:
        served = self.model.current()
        state = {
            "name": served.name,
            "version": served.scorer.version,
            "state": "READY",
            "reason": "",
        }
        return json_answer([state])

    async def _load(self, request: Request) -> Response:
        """Reload the model from the path that the server was started with."""
        check_origin(request)
        check_place(request, self.model.current())
        self._check_ranks()
        body = await self._body(request)
        self.admission.release(len(body))
        if len(body) and read_object(body) not in ({}, {"parameters": {}}):
            raise bad(
                "parameters: a reload takes none: the server reads the model again from its own "
                "artefact=..."
            )
        served = await self.model.reload()
        return json_answer({"name": served.name, "version": served.scorer.version})

    # ---- scores

    async def infer(self, verb: str, request: Request) -> Response:
        """Answer a request for scores."""
        start = time.perf_counter()
        status = 500
        try:
            response = await self._infer(verb, request, start)
            status = response.status_code
            return response
        except Refused as refused:
            status = refused.status
            raise
        except asyncio.CancelledError:
            status = GONE
            return Response(status_code=GONE)
        finally:
            self.counts.request(verb, status, time.perf_counter() - start)

    async def _infer(self, verb: str, request: Request, start: float) -> Response:
        def read(served: Served) -> Question:
            check_place(request, served)  # a reload may have changed the version in between
            return READERS[verb](body, request.headers, served, self.limits)

        check_origin(request)
        self._served(request)
        self._check_ranks()
        with self.admission.request():
            body = await self._body(request)
            try:
                work = QueuedRequest(read, start, asyncio.get_running_loop().create_future())
                self.batcher.submit(work)
                response = await self._answer(work, request, start)
            finally:
                self.admission.release(len(body))
        spans = {"queue": work.waited_s, "read": work.read_s, "model": work.model_s}
        spans["total"] = time.perf_counter() - start
        response.headers["server-timing"] = ", ".join(
            f"{name};dur={seconds * 1e3:.3f}" for name, seconds in spans.items()
        )
        return response

    async def _body(self, request: Request) -> memoryview:
        """Read the body of a request within the time limit. The caller releases its bytes from the
        admission.
        """
        try:
            async with asyncio.timeout(self.limits.timeout_s):
                return await read_body(request, self.limits, self.admission)
        except ClientDisconnect:
            raise Refused(GONE, "the client has gone") from None
        except TimeoutError:
            raise Refused(
                408,
                f"the body did not come within timeout_s={self.limits.timeout_s:g}: send it "
                "faster, or less of it",
                {"connection": "close"},
            ) from None

    async def _answer(self, work: QueuedRequest, request: Request, start: float) -> Response:
        """Wait for the answer, until it comes, the client disconnects or the time is over.

        Raises:
            Refused: The request is refused, a rank does not answer, the client has disconnected, or
                the time is over.
        """
        gone = asyncio.ensure_future(request.receive())  # ends when the client disconnects
        until = start + self.limits.timeout_s
        try:
            both: set[asyncio.Future[Any]] = {work.answer, gone}
            while (left := until - time.perf_counter()) > 0:
                look = min(left, LOOK_SECONDS)
                await asyncio.wait(both, timeout=look, return_when=asyncio.FIRST_COMPLETED)
                if work.answer.done():
                    return work.answer.result()
                if gone.done():
                    raise Refused(GONE, "the client has gone")
                self._check_ranks()
            limit = f"timeout_s={self.limits.timeout_s:g}"
            raise busy(f"no answer within {limit}: the server has more requests than it can answer")
        finally:
            work.dropped = True
            gone.cancel()


def check_place(request: Request, served: Served) -> None:
    """Check the name and the version in a path against the model in service.

    Raises:
        Refused: The model in service has another name or version.
    """
    name = request.path_params["name"]
    if name != served.name:
        raise Refused(404, f"no model {name:.80}; {suggest(name[:80], [served.name])}")
    version = request.path_params.get("version")
    if version is not None and version != served.scorer.version:
        raise Refused(
            404, f"model {name} has no version {version:.80}; {served.scorer.version} is in service"
        )


def check_origin(request: Request) -> None:
    """Check that a request comes from a program, or from a page of this server.

    Raises:
        Refused: A browser sent the request for a page of another site.
    """
    origins = request.headers.getlist("origin")
    host = ",".join(request.headers.getlist("host"))
    if origins and (not host or origins not in ([f"http://{host}"], [f"https://{host}"])):
        shown = ", ".join(origins)
        raise Refused(403, f"origin {shown:.80}: pages of other sites may not use this server")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    line = " ".join(readable(error.text).split())[:ERROR_LETTERS]
    return json_answer({"error": line}, error.status, error.headers)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:80]
    text = f"{request.method} {path}: {error.detail}; docs/serving.md lists the routes"
    return json_answer({"error": text}, error.status_code, error.headers)


# ---- the page for people

LEFT_OUT = ("path",)  # visitors of the page need not know the path of the model


def page_of(served: Served, version: str) -> Response:
    """Return the page of a model in service.

    Args:
        served: The model.
        version: The version of recapp.
    """
    style = _file("model_page.css")
    script = _file("model_page.js")
    parts = {
        "style": style,
        "script": script,
        "name": escape(readable(served.name)),
        "version": escape(readable(served.scorer.version)),
        "facts": _facts(served.scorer.info),
        "features": _folded(
            "features, all of them needed in every request",
            [
                {"name": name, "datatype": served.datatype(name)}
                for name in served.scorer.schema.inputs
            ],
        ),
        "recapp": escape(version),
    }
    html = _file("model_page.html")
    for name, text in parts.items():
        html = html.replace(f"<!--{name}-->", text).replace(f"/*{name}*/", text)
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
    }
    return HTMLResponse(html, headers=headers)


@cache
def _file(name: str) -> str:
    return resources.files("recapp.serving").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _facts(info: Mapping[str, Any]) -> str:
    """Return the facts of a model as HTML: single facts as a list, tables as tables."""
    single: list[tuple[str, Any]] = []
    tables = []
    for name, value in info.items():
        if name in LEFT_OUT:
            continue
        if isinstance(value, Mapping):
            single += [(f"{inner}", item) for inner, item in value.items()]
        elif isinstance(value, Sequence) and value and isinstance(value[0], Mapping):
            tables.append((name, value))
        else:
            single.append((name, value))
    items = "".join(
        f"<div><dt>{escape(readable(name.replace('_', ' ')))}</dt><dd>{_value(value)}</dd></div>"
        for name, value in single
    )
    return f'<dl class="facts">{items}</dl>' + "".join(_folded(*table) for table in tables)


def _value(value: Any) -> str:
    return escape(readable(Column("", "").show(value)))


def _folded(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    head = "".join(f"<th>{escape(readable(key.replace('_', ' ')))}</th>" for key in keys)
    body = "".join(
        "<tr>" + "".join(f"<td>{_value(row.get(key))}</td>" for key in keys) + "</tr>"
        for row in rows
    )
    title = f"{len(rows)} {escape(readable(name))}"
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<details><summary>{title}</summary><div class="scroll">{table}</div></details>'
