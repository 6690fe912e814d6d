"""Serves an application on one thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from lmcache.errors import ResourceError
from lmcache.http.connection_places import ConnectionPlaces, LimitedListener
from lmcache.transport.forks import not_for_children
from lmcache.transport.listening import listen

logger = logging.getLogger("lmcache.http")

SILENCE_SECONDS = 10.0

MAX_CONNECTIONS = 256
_START_SECONDS = 10.0
_STOP_SECONDS = 5.0
_GRACE_SECONDS = 2

Scope = dict[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


class _Server(uvicorn.Server):
    """uvicorn checks ten times a second whether it should stop; this one sleeps until `stop_requested`."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stop_requested = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.stop_requested.wait()


class JoinedWrites:
    """A transport that sends what was written in one turn of the loop at once: uvicorn writes the head of an answer and
    its body apart, and each would be a packet."""

    _MOST_BYTES = 64 << 10  # that wait for the end of the turn

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._waiting = bytearray()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, content: bytes) -> None:
        if not self._waiting and content:
            self._loop.call_soon(self._flush)
        self._waiting += content
        if len(self._waiting) > self._MOST_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, bytearray()
            self._transport.write(waiting)

    def get_write_buffer_size(self) -> int:
        return len(self._waiting) + self._transport.get_write_buffer_size()

    def close(self) -> None:
        self._flush()
        self._transport.close()


class _Protocol(H11Protocol):
    """Closes connections without progress: no new request came and nothing of an answer left for a while. uvicorn waits
    for ever for the end of a header, and for a client to take its answer, so that a few hundred such connections would
    keep every health check out."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, JoinedWrites(transport, self.loop)))
        self._last_progress = self._progress()
        self._silence = self.loop.call_later(SILENCE_SECONDS, self._close_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        self._silence.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Where an answer has begun, or was the last one of this connection, there is no place for another."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def _progress(self) -> tuple[object, int]:
        unsent_bytes = 0
        with contextlib.suppress(AttributeError):  # asyncio's TLS knows nothing of itself once it was closed twice
            unsent_bytes = self.transport.get_write_buffer_size()
        return self.cycle, unsent_bytes

    def _close_if_silent(self) -> None:
        progress = self._progress()
        unsent_bytes = progress[1]
        computing = self.cycle is not None and not self.cycle.response_complete and not unsent_bytes
        if progress == self._last_progress and not computing:
            self.transport.abort()  # `close` would wait for what is unsent
        else:
            self._last_progress = progress
            self._silence = self.loop.call_later(SILENCE_SECONDS, self._close_if_silent)


def limited_sockets(host: str, ports: Sequence[tuple[int, str]], connections: int = 0) -> list[socket.socket]:
    """Listening sockets at (port, its flag), which share so many connections, MAX_CONNECTIONS where that is 0.
    ResourceError where one cannot be had."""
    places = ConnectionPlaces(connections or MAX_CONNECTIONS)
    found: list[socket.socket] = []
    try:
        for port, flag in ports:
            found.append(not_for_children(LimitedListener(listen(host, port, flag), places)))
    except ResourceError:
        for listening in found:
            listening.close()
        raise
    return found


class HttpThread:
    """Serves `app` at these sockets from `start` to `stop`, and closes them. `connections` as the sockets'. `beside`
    starts on the loop what runs meanwhile; `ended` is called when nothing is served any more."""

    def __init__(
        self,
        app: App,
        sockets: Sequence[socket.socket],
        *,
        tls: ssl.SSLContext | None = None,
        keep_alive_seconds: int = 5,
        connections: int = 0,
        beside: Callable[[], asyncio.Task[None]] | None = None,
        ended: Callable[[], object] = lambda: None,
    ) -> None:
        self._app = app
        self._sockets = list(sockets)
        self._tls = tls
        self._keep_alive_seconds = keep_alive_seconds
        self._connections = connections or MAX_CONNECTIONS
        self._beside = beside
        self._ended = ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: _Server | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lmcache-http", daemon=True)

    def start(self) -> None:
        self._thread.start()
        if not self._started.wait(_START_SECONDS):
            raise ResourceError(f"The HTTP listener did not start within {_START_SECONDS:.0f} s.")

    def stop(self) -> None:
        """Lets requests under way finish for a moment, then closes. Idempotent."""
        loop, server = self._loop, self._server
        if loop is not None and server is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has just ended by itself
                loop.call_soon_threadsafe(server.stop_requested.set)
            self._thread.join(_STOP_SECONDS)
        self.close()

    def close(self) -> None:
        for listening in self._sockets:
            listening.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:
            logger.exception("The HTTP listener ended by a fault")
        finally:
            self._ended()

    async def _serve(self) -> None:
        # What uvicorn logs is either logged by app.py or noise that any port scanner can make.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._loop = asyncio.get_running_loop()
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            loop="asyncio",
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # who calls is who connected: see access.py
            server_header=False,
            date_header=False,
            limit_concurrency=16 * self._connections,  # a burst may come before those that lost their place are closed
            timeout_keep_alive=self._keep_alive_seconds,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        config.load()
        config.ssl = self._tls
        self._server = _Server(config)
        self._started.set()
        beside = self._beside() if self._beside is not None else None
        try:
            await self._server.serve(sockets=self._sockets)
        finally:
            if beside is not None:
                beside.cancel()
