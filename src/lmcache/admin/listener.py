"""Serves the HTTP resources, and the Prometheus port beside them, on one thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from lmcache.admin.access import AdminToken
from lmcache.admin.app import build_app
from lmcache.admin.connections import ConnectionPlaces, LimitedListener
from lmcache.admin.history_routes import keep_history
from lmcache.admin.state import ServerState
from lmcache.admin.tls import server_context
from lmcache.core.address import http_listening_host
from lmcache.errors import ResourceError
from lmcache.l2.background import spawn
from lmcache.transport.forks import not_for_children
from lmcache.transport.listening import listen

logger = logging.getLogger("lmcache.admin")

SILENCE_SECONDS = 10.0

MAX_CONNECTIONS = 256
_START_SECONDS = 10.0
_STOP_SECONDS = 5.0
_GRACE_SECONDS = 2

_Scope = dict[str, Any]
_App = Callable[[_Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


class _Server(uvicorn.Server):
    """uvicorn checks ten times a second whether it should stop; this one sleeps until `stop_requested`."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stop_requested = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.stop_requested.wait()


class _Protocol(H11Protocol):
    """Closes connections without progress: no new request came and nothing of an answer left for a while. uvicorn waits
    for ever for the end of a header, and for a client to take its answer, so that a few hundred such connections would
    keep every health check out."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
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


def _limited(listening: socket.socket, places: ConnectionPlaces) -> socket.socket:
    return not_for_children(LimitedListener(listening, places))


class HttpListener:
    """Binds at construction (ResourceError when a port cannot be had), serves from `start` to `stop`."""

    def __init__(self, state: ServerState) -> None:
        config = state.config
        self._state = state
        token = AdminToken(config.admin_token_file)
        self._tls = server_context(config.http_tls_cert, config.http_tls_key)
        host = http_listening_host(config.http_host)
        places = ConnectionPlaces(MAX_CONNECTIONS)
        self._sockets = [_limited(listen(host, config.http_port, "--http-port"), places)]
        self.http_port: int = self._sockets[0].getsockname()[1]
        self.prometheus_port: int | None = None
        if config.metrics_enabled:
            try:
                self._sockets.append(_limited(listen(host, config.prometheus_port, "--prometheus-port"), places))
            except ResourceError:
                self.close()
                raise
            self.prometheus_port = self._sockets[1].getsockname()[1]
        self._app = build_app(state, token)
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
            self._app.state.close()

    async def _serve(self) -> None:
        # What uvicorn logs is either logged by app.py or noise that any port scanner can make.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._loop = asyncio.get_running_loop()
        config = uvicorn.Config(
            self._dispatch,
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
            limit_concurrency=16 * MAX_CONNECTIONS,  # a burst may come before those that lost their place are closed
            timeout_keep_alive=5,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        config.load()
        config.ssl = self._tls
        self._server = _Server(config)
        self._started.set()
        sampling = spawn(keep_history(self._app.state.context), "history of metrics")
        try:
            await self._server.serve(sockets=self._sockets)
        finally:
            sampling.cancel()

    async def _dispatch(self, scope: _Scope, receive: Any, send: Any) -> None:
        """The Prometheus port has /metrics and nothing else."""
        on_metrics_port = scope["type"] == "http" and (scope.get("server") or ("", 0))[1] == self.prometheus_port
        if on_metrics_port and scope["path"] != "/metrics":
            scope = {**scope, "path": "/metrics" if scope["path"] == "/" else "/nothing-but-metrics-on-this-port"}
        app: _App = self._app
        await app(scope, receive, send)
