"""The HTTP server around the application: its socket, its signals, and clients that are slow.

    SIGTERM, SIGINT   no new connections; what has come is answered; then the process ends with 0
    SIGHUP            the model is read anew

uvicorn speaks HTTP, through h11: that one bounds the head of a request, which the faster parser
does not, and recapp's own part of a request is longer than the difference (docs/lab_log.md). A
client that takes longer than `timeout_s` for a head, or for a body that nobody reads any more,
loses its connection.
"""

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from recapp.console import note
from recapp.errors import ConfigError
from recapp.serving.app import Server
from recapp.serving.limits import Refused

STOPS = (signal.SIGINT, signal.SIGTERM)
KEEP_ALIVE_SECONDS = 75  # above the minute of usual load balancers, which must close first


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address.

    Args:
        host: The name or number of an interface.
        port: The port; 0 takes a free one.

    Raises:
        ConfigError: The port is taken or not allowed, or there is no such host.
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
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"port={port}: cannot listen at {host}:{port} ({error.strerror}); choose another "
            "port=N, or port=0 for any that is free"
        ) from None
    return listener


def address_of(listener: socket.socket) -> str:
    """Return the address of a listening socket as a browser takes it."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


def serve(server: Server, listener: socket.socket, started: Callable[[], None]) -> None:
    """Answer requests until a signal comes, and then what has come until then.

    Args:
        server: The routes.
        listener: Where it listens.
        started: Called when it answers.
    """
    asyncio.run(_serve(server, listener, started))


async def _serve(server: Server, listener: socket.socket, started: Callable[[], None]) -> None:
    config = uvicorn.Config(
        server.application(),
        http=protocol_with_limit(server.limits.timeout_s),
        ws="none",
        log_config=None,
        log_level="error",  # not a line for whatever is no HTTP
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=server.limits.max_connections,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(server.limits.timeout_s) + 1,
    )
    http = _Http(config)
    with _signals(http, server):
        serving = asyncio.ensure_future(http.serve(sockets=[listener]))
        while not (http.started or serving.done()):
            await asyncio.sleep(0.01)
        if http.started:
            started()
        await serving


class _Http(uvicorn.Server):
    """uvicorn's server without its handlers of signals, which would end the process by one."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def _signals(http: uvicorn.Server, server: Server) -> Iterator[None]:
    """Handle signals inside the `with`."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[Any]] = set()

    def stop() -> None:
        if not server.ends:
            note("no new connections; what has come is answered")
        server.ends = True
        http.should_exit = True

    def reload() -> None:
        task = loop.create_task(_reload(server))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    before = {number: signal.getsignal(number) for number in (*STOPS, signal.SIGHUP)}
    for number in STOPS:
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


async def _reload(server: Server) -> None:
    try:
        await server.model.reload()
    except Refused as refused:
        if refused.status == 409:
            note(refused.text)


def protocol_with_limit(seconds: float) -> type[H11Protocol]:
    """Return uvicorn's protocol with a limit on how slowly a client may send.

    Args:
        seconds: How long the head of a request may take, or a body that nobody reads any more.
    """

    class TimedProtocol(H11Protocol):
        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._unwatch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.conn.their_state is h11.SEND_BODY:
                self._watch()

        def _watch(self) -> None:
            their_state = self.conn.their_state
            answered = self.cycle is None or self.cycle.response_complete
            if their_state is h11.IDLE or (their_state is h11.SEND_BODY and answered):
                if self._late is None:
                    self._late = self.loop.call_later(seconds, self._too_late)
            else:
                self._unwatch()

        def _unwatch(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

        def _too_late(self) -> None:
            self._late = None
            self.transport.abort()

    return TimedProtocol
