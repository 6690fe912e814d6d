"""Serves the HTTP resources, and the Prometheus port beside them."""

from __future__ import annotations

import asyncio
from typing import Any

from lmcache.admin.app import build_app
from lmcache.admin.history_routes import keep_history
from lmcache.admin.state import ServerState
from lmcache.clock import Clock
from lmcache.core.address import http_listening_host
from lmcache.environment import SYSTEM
from lmcache.http.access import AdminToken
from lmcache.http.listener import App, HttpThread, Scope, limited_sockets
from lmcache.http.tls import server_context
from lmcache.l2.background import spawn


class HttpListener:
    """Binds at construction (ResourceError when a port cannot be had), serves from `start` to `stop`."""

    def __init__(self, state: ServerState, clock: Clock = SYSTEM.clock) -> None:
        config = state.config
        token = AdminToken(config.admin_token_file)
        tls = server_context(config.http_tls_cert, config.http_tls_key)
        ports = [(config.http_port, "--http-port")]
        if config.metrics_enabled:
            ports.append((config.prometheus_port, "--prometheus-port"))
        sockets = limited_sockets(http_listening_host(config.http_host), ports)
        self.http_port, *others = (int(listening.getsockname()[1]) for listening in sockets)
        self.prometheus_port = others[0] if others else None
        self._app = build_app(state, token, clock)
        context = self._app.state.context

        def begin_history() -> asyncio.Task[None]:
            return spawn(keep_history(context), "history of metrics")

        self._thread = HttpThread(
            *(self._dispatch, sockets), tls=tls, beside=begin_history, ended=self._app.state.close
        )
        self.start, self.stop, self.close = self._thread.start, self._thread.stop, self._thread.close

    async def _dispatch(self, scope: Scope, receive: Any, send: Any) -> None:
        """The Prometheus port has /metrics and nothing else."""
        on_metrics_port = scope["type"] == "http" and (scope.get("server") or ("", 0))[1] == self.prometheus_port
        if on_metrics_port and scope["path"] != "/metrics":
            scope = {**scope, "path": "/metrics" if scope["path"] == "/" else "/nothing-but-metrics-on-this-port"}
        app: App = self._app
        await app(scope, receive, send)
