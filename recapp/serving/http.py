"""The HTTP server around the application: its socket, its signals, and limits on slow clients.

    SIGTERM, SIGINT   stop accepting, answer the open requests, and exit with 0
    a rank is lost    the same, but exit with an error
    SIGHUP            reload the model

uvicorn speaks HTTP through h11. h11 bounds the head of a request, which the faster parser does not;
the difference in time is less than recapp's own part of a request (docs/lab_log.md). The server
closes the connection of a client that takes longer than `timeout_s` for a head, or for the rest of
a body after the answer. After a signal each answer closes its connection, and an idle connection
stays open for LINGER_SECONDS, because a request may be on its way.
"""

import asyncio
import errno
import resource
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sized
from contextlib import contextmanager
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from recapp.console import note
from recapp.errors import ConfigError
from recapp.serving.app import Server
from recapp.serving.json_text import written
from recapp.serving.limits import RETRY_AFTER_SECONDS, Limits, Refused
from recapp.serving.question import JSON

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

STOPS = (signal.SIGINT, signal.SIGTERM)
KEEP_ALIVE_SECONDS = 75  # load balancers wait 60 s and must close first
LINGER_SECONDS = 1.0  # for which an idle connection stays open after a signal
LOOK_SECONDS = 0.2  # between two checks of the ranks
LISTENS = 1024  # connections that wait to be accepted
ACCEPTS = 16  # connections accepted above the limit before the server closes them
OWN_FILES = 64  # open files beside connections: those of the model and of a reload
HEAD_BYTES = 2**16
NO_HTTP = (
    "this is no HTTP/1.1, its head is longer than 64 KB, or it has both Content-Length and "
    "Transfer-Encoding"
)
LENGTHS = {b"content-length", b"transfer-encoding"}


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address.

    Args:
        host: The name or number of an interface.
        port: The port; 0 takes a free port.

    Raises:
        ConfigError: The port is taken or not allowed, or the host does not exist.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(
            f"host={host}: there is no such host ({error.strerror}); host=127.0.0.1 is this "
            "machine alone, host=0.0.0.0 all its networks"
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(LISTENS)
    except OSError as error:
        listener.close()
        if error.errno in (errno.EADDRNOTAVAIL, errno.EINVAL):
            raise ConfigError(
                f"host={host}: this machine has no such address ({error.strerror}); "
                "host=127.0.0.1 is this machine alone, host=0.0.0.0 all its networks"
            ) from None
        raise ConfigError(
            f"port={port}: cannot listen at {host}:{port} ({error.strerror}); choose another "
            "port=N, or port=0 for any that is free"
        ) from None
    return listener


def address_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


def serve(server: Server, listener: socket.socket, started: Callable[[], None]) -> None:
    """Answer requests until a signal comes or a rank is lost; then answer the open requests and
    end.

    Args:
        server: The routes.
        listener: The socket on which the server listens.
        started: A callback; called when the server accepts requests.
    """
    asyncio.run(_serve(server, listener, started))


async def _serve(server: Server, listener: socket.socket, started: Callable[[], None]) -> None:
    door = Door(server)
    config = uvicorn.Config(
        door,
        http=protocol_with_limits(server.limits, most_connections(server.limits)),
        ws="none",
        log_config=None,
        log_level="error",  # no log line for each invalid request
        access_log=False,
        backlog=ACCEPTS,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(server.limits.timeout_s) + 1,
    )
    http = _Http(config)
    door.connections = http.server_state.connections
    with _signals(http, server):
        serving = asyncio.ensure_future(http.serve(sockets=[listener]))
        while not (http.started or serving.done()):
            await asyncio.sleep(0.01)
        if http.started:
            listener.listen(LISTENS)  # asyncio has one number for LISTENS and ACCEPTS
            started()
        while not serving.done():
            if server.is_lost:
                _stop(http, server)
            await asyncio.wait([serving], timeout=LOOK_SECONDS)
        await serving


class _Http(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would end the process by a signal."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def _signals(http: uvicorn.Server, server: Server) -> Iterator[None]:
    """Install the signal handlers inside the `with`."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[Any]] = set()

    def reload() -> None:
        task = loop.create_task(_reload(server))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    before = {number: signal.getsignal(number) for number in (*STOPS, signal.SIGHUP)}
    for number in STOPS:
        loop.add_signal_handler(number, _stop, http, server)
    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def _stop(http: uvicorn.Server, server: Server) -> None:
    if not server.ends:
        note("no new connections; pending requests are answered")
    server.ends = True
    http.should_exit = True


async def _reload(server: Server) -> None:
    try:
        await server.model.reload()
    except Refused as refused:
        if refused.status == 409:
            note(refused.text)


class Door:
    """ASGI middleware of all requests: it limits the connections, and closes them on shutdown.

    Args:
        server: The routes.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._app = server.application()
        self.connections: Sized = ()
        """The open connections; uvicorn's own set."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request; the arguments are those of ASGI."""

        async def sent(message: Message) -> None:
            if self._server.ends and message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        most = self._server.limits.max_connections
        if scope["type"] == "http" and len(self.connections) > most:
            await _answer(
                send,
                503,
                f"{len(self.connections)} connections are open, max_connections={most}: try again "
                "later",
                (b"retry-after", str(RETRY_AFTER_SECONDS).encode()),
            )
        else:
            await self._app(scope, receive, sent)


def _error(text: str) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """Return the body and the headers of an error that ends its connection."""
    body = written({"error": text})
    headers = [
        (b"content-type", JSON.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    return body, headers


async def _answer(send: Send, status: int, text: str, *more: tuple[bytes, bytes]) -> None:
    body, headers = _error(text)
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *more]})
    await send({"type": "http.response.body", "body": body})


def most_connections(limits: Limits) -> int:
    """Return the number of connections that may be open, with those that are answered with 503.

    Each connection is an open file, so this raises the process's limit of open files where the
    system allows that. At the limit, asyncio logs an error thousands of times a second.

    Raises:
        ConfigError: The process may not open the files that `max_connections` needs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = limits.max_connections + OWN_FILES
    wanted = needed + limits.max_connections
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return wanted - OWN_FILES
    if soft <= needed:
        raise ConfigError(
            f"max_connections={limits.max_connections}: this process may open {soft} files, and "
            f"needs more than {needed}: raise that limit (ulimit -n), or choose a smaller "
            "max_connections"
        )
    return min(soft, wanted) - OWN_FILES


class OneLength(h11.Connection):
    """A connection that takes no request with two lengths: a proxy in front that believes the other
    one would take what follows for a part of somebody else's request.
    """

    def next_event(self) -> Any:
        """Return the next event.

        Raises:
            RemoteProtocolError: A request has both lengths.
        """
        event = super().next_event()
        if isinstance(event, h11.Request) and {name for name, _ in event.headers} >= LENGTHS:
            raise h11.RemoteProtocolError(NO_HTTP)
        return event


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol with limits on slow clients and on the number of connections."""

    seconds = 0.0
    """Seconds for the head of a request, or for the rest of a body after the answer."""

    most = 0
    """The most open connections; a further connection is closed at once."""

    _late: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = OneLength(h11.SERVER, HEAD_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of a connection, or close a connection above the limit."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.abort()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        """Handle bytes from the client."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        super().connection_lost(exc)
        self._unwatch()

    def on_response_complete(self) -> None:
        """Close the connection if the rest of a body does not arrive in time after the answer."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._watch()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with 400, unless it is the rest of a body that already has its
        answer.
        """
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body, headers = _error(NO_HTTP)
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event))
        self.transport.close()

    def shutdown(self) -> None:
        """Close the connection after the answer to its open request; without one, after
        LINGER_SECONDS.
        """
        if not self._answered():
            self.cycle.keep_alive = False
        self.loop.call_later(LINGER_SECONDS, self._leave)

    def _leave(self) -> None:
        if self._answered():
            self.transport.close()

    def _answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        their_state = self.conn.their_state
        if their_state is h11.IDLE or (their_state is h11.SEND_BODY and self._answered()):
            if self._late is None:
                self._late = self.loop.call_later(self.seconds, self._too_late)
        else:
            self._unwatch()

    def _unwatch(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        self._late = None
        self.transport.abort()


def protocol_with_limits(limits: Limits, most: int) -> type[LimitedProtocol]:
    """Return the protocol of a server.

    Args:
        limits: The limits of the server; only `timeout_s` is used.
        most: The most open connections.
    """
    return type("Protocol", (LimitedProtocol,), {"seconds": limits.timeout_s, "most": most})
