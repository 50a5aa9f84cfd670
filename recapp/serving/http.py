"""The HTTP server around the application: its socket, its signals, and the time of a head.

    SIGTERM, SIGINT   stop accepting, answer the open requests, and exit with 0
    a rank is lost    the same, but exit with an error
    SIGHUP            reload the model

uvicorn speaks HTTP through h11; it bounds the bytes of a head, and answers connections above
`max_connections` with 503. It has no limit on the time of a head, nor of the rest of a body after
the answer: `TimedProtocol` closes such a connection after `timeout_s`, and takes no request with
two lengths. After a signal each answer closes its connection, and an idle connection stays open for
LINGER_SECONDS, because a request may be on its way.
"""

import asyncio
import errno
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from recapp.console import note
from recapp.errors import ConfigError
from recapp.serving.app import Server
from recapp.serving.limits import Limits, Refused

STOPS = (signal.SIGINT, signal.SIGTERM)
KEEP_ALIVE_SECONDS = 75  # load balancers wait 60 s and must close first
LINGER_SECONDS = 1.0  # for which an idle connection stays open after a signal
LISTENS = 1024  # connections that wait to be accepted
ACCEPTS = 16  # connections accepted above the limit before the server closes them
REFUSED_AT_ONCE = 64  # connections above the limit that are answered with 503, not just closed
OWN_FILES = 64  # open files beside connections: those of the model and of a reload
HEAD_BYTES = 2**16
LENGTHS = {b"content-length", b"transfer-encoding"}


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address.

    Args:
        host: The name or number of an interface.
        port: The port; 0 takes a free port.

    Raises:
        ConfigError: The port is taken or not allowed, or the host does not exist.
    """
    fix = "host=127.0.0.1 is this machine alone, host=0.0.0.0 all its networks"
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"host={host}: there is no such host ({error.strerror}); {fix}") from None
    both = family == socket.AF_INET6  # host=:: takes IPv4, too
    try:
        return socket.create_server(address, family=family, backlog=LISTENS, dualstack_ipv6=both)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        if error.errno in (errno.EADDRNOTAVAIL, errno.EINVAL):
            raise ConfigError(
                f"host={host}: this machine has no such address ({why}); {fix}"
            ) from None
        raise ConfigError(
            f"port={port}: cannot listen at {host}:{port} ({why}); choose another "
            "port=N, or port=0 for any that is free"
        ) from None


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
    limits = server.limits
    allow_open_files(limits)
    most = limits.max_connections + REFUSED_AT_ONCE
    config = uvicorn.Config(
        closing_at_the_end(server),
        http=type("Protocol", (TimedProtocol,), {"seconds": limits.timeout_s, "most": most}),
        ws="none",
        log_config=None,
        log_level="critical",  # no log line for each invalid request
        access_log=False,
        backlog=ACCEPTS,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=limits.max_connections + 1,  # uvicorn refuses the one that reaches it
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(limits.timeout_s) + 1,
    )
    asyncio.run(HttpServer(config, server, started).serve([listener]))


class HttpServer(uvicorn.Server):
    """uvicorn's server, which ends without raising its signal again, and when a rank is lost.

    Args:
        config: The settings of uvicorn.
        server: The routes.
        started: A callback; called when the server accepts requests.
    """

    def __init__(self, config: uvicorn.Config, server: Server, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._server = server
        self._say_started = started
        self._reloads: set[asyncio.Task[None]] = set()

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(LISTENS)  # asyncio has one number for LISTENS and ACCEPTS
        self._say_started()

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end; uvicorn asks ten times a second."""
        leader = self._server.leader
        if leader is not None and leader.failure is not None:  # it can compute no more scores
            self._end()
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals inside the `with`."""
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in (*STOPS, signal.SIGHUP)}
        for number in STOPS:
            loop.add_signal_handler(number, self._end)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    def _end(self) -> None:
        if not self._server.ends:
            note("no new connections; pending requests are answered")
        self._server.ends = True
        self.should_exit = True

    def _reload(self) -> None:
        task = asyncio.get_running_loop().create_task(_reload(self._server))
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)


async def _reload(server: Server) -> None:
    try:
        await server.model.reload()
    except Refused as refused:
        if refused.status == 409:
            note(refused.text)


def closing_at_the_end(server: Server) -> ASGIApp:
    """Return the routes as an application whose answers close their connections once the server
    ends: a client must not send another request there.

    Args:
        server: The routes.
    """
    routes = server.application()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_closing(message: Message) -> None:
            if server.ends and message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await routes(scope, receive, send_closing)

    return answer


def allow_open_files(limits: Limits) -> None:
    """Raise the limit of open files of this process where the connections need that.

    Raises:
        ConfigError: The process may not open so many files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = limits.max_connections + REFUSED_AT_ONCE + OWN_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"max_connections={limits.max_connections}: this process may open {hard} files, and "
            f"needs {needed}: raise that limit (ulimit -n), or choose a smaller max_connections"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


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
            raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
        return event


class TimedProtocol(H11Protocol):
    """uvicorn's protocol with a limit on the time of a head, and a last limit on connections."""

    # Seconds for the head of a request, or for the rest of a body after the answer.
    seconds = 0.0

    # The most open connections; a further connection is closed at once.
    most = 0

    _timer: asyncio.TimerHandle | None = None

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

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unwatch()

    def on_response_complete(self) -> None:
        """Close the connection if the rest of a body does not arrive in time after the answer."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._watch()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP, unless it is the rest of a body that already has its answer."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        self.transport.close()

    def shutdown(self) -> None:
        """Close the connection after the answer to its open request; without one, after
        LINGER_SECONDS.
        """
        if not self._is_answered():
            self.cycle.keep_alive = False
        self.loop.call_later(LINGER_SECONDS, self._leave)

    def _leave(self) -> None:
        if self._is_answered():
            self.transport.close()

    def _is_answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        state = self.conn.their_state
        if state is h11.IDLE or (state is h11.SEND_BODY and self._is_answered()):
            if self._timer is None:
                self._timer = self.loop.call_later(self.seconds, self.transport.abort)
        else:
            self._unwatch()

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
