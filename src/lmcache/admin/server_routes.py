"""What concerns the server as a whole: health, figures, configuration, log level."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from lmcache import __version__
from lmcache.admin import messages as m
from lmcache.admin.requests import METRICS_OFF, AdminContext
from lmcache.admin.shared_answer import SharedAnswer
from lmcache.admin.state import ServerState
from lmcache.config.redact import redacted
from lmcache.http.fleet_messages import FleetOverview
from lmcache.http.operation import Access, Call, Operation
from lmcache.protocol.messages import OLDEST_SUPPORTED_PROTOCOL_VERSION, PROTOCOL_VERSION
from lmcache.telemetry import logs

logger = logging.getLogger("lmcache.admin")

HEALTH_BOUND_SECONDS = 2.0
EXPOSITION_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class HealthCheck:
    """Single-flight: requests that come while a check runs share its answer."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        # A thread of its own, so that nothing that hangs elsewhere delays a health check.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lmcache-health")
        self._running: asyncio.Future[str] | None = None

    async def check(self) -> str:
        """ "" or the reason why this server is not healthy."""
        if self._running is None or self._running.done():
            loop = asyncio.get_running_loop()
            self._running = loop.run_in_executor(self._thread, self._state.health, HEALTH_BOUND_SECONDS)
        try:
            # Twice the bound: health() waits for two loops.
            return await asyncio.wait_for(asyncio.shield(self._running), 2 * HEALTH_BOUND_SECONDS + 0.5)
        except asyncio.TimeoutError:
            return "The server did not tell its health in time."

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class ServerRoutes:
    def __init__(self, context: AdminContext, health: HealthCheck) -> None:
        self._context = context
        self._state = context.state
        self._health = health
        self._status = SharedAnswer(lambda: context.figures(self._state.status))
        self._fleet = SharedAnswer(lambda: context.in_thread(self._state.fleet))
        self._metrics = {True: SharedAnswer(partial(self._exposition, True))}
        self._metrics[False] = SharedAnswer(partial(self._exposition, False))  # by whether salts are hidden
        self.index_text = ""  # the list of all operations

    def operations(self) -> list[Operation]:
        public, change = Access.PUBLIC, Access.CHANGE
        return [
            Operation("GET", "/", "This list; for browsers a dashboard", public, self.index, "text/plain"),
            Operation(
                *("GET", "/healthcheck", "Do the message loop and the storage loop answer?", public),
                *(self.healthcheck, m.Health),
                other_answers={503: m.Health},
            ),
            Operation(
                *("GET", "/readyz", "May engines connect?", public, self.readyz, m.Readiness),
                other_answers={503: m.Readiness},
            ),
            Operation("GET", "/status", "Figures of this server", public, self.status, m.JsonObject),
            Operation(
                *("GET", "/metrics", "The same for Prometheus; salts are digests for those who may not read them"),
                *(public, self.metrics, "text/plain"),
                refusals={404: "metrics are off"},
            ),
            Operation(
                *("GET", "/fleet", "The servers of its fleet, as its coordinator has them", Access.READ, self.fleet),
                FleetOverview,
                refusals={404: "the server has no coordinator"},
            ),
            Operation("GET", "/config", "Options in force, secrets hidden", public, self.config, m.JsonObject),
            Operation("GET", "/config/adapters", "Those of the L2 adapters", public, self.adapters, list[m.JsonObject]),
            Operation("GET", "/version", "Versions of server and protocol", public, self.version, m.Version),
            Operation("GET", "/loglevel", "What is logged", public, self.loglevel, m.Level),
            Operation(
                *("PUT", "/loglevel", "Changes what is logged", change, self.set_loglevel, m.Level),
                body=m.LevelRequest,
                query=m.LevelQuery,
            ),
        ]

    async def index(self, call: Call) -> Response:
        """The dashboard for browsers, where it is installed; else a list of the paths."""
        page = self._context.dashboard.page() if "text/html" in call.request.headers.get("accept", "") else None
        return page or PlainTextResponse(self.index_text, headers={"Vary": "Accept"})

    async def healthcheck(self, call: Call) -> Any:
        reason = await self._health.check()
        return (503, m.Health("unhealthy", reason)) if reason else m.Health("healthy")

    async def readyz(self, call: Call) -> Any:
        reason = await self._health.check()
        if not reason and not self._state.ready():
            reason = "The server is starting or shutting down."
        return (503, m.Readiness("not ready", reason)) if reason else m.Readiness("ready")

    async def status(self, call: Call) -> dict[str, Any]:
        return await self._status.get()

    async def fleet(self, call: Call) -> FleetOverview:
        overview = await self._fleet.get()
        if overview is None:
            raise HTTPException(404, "This server has no coordinator: it was started without --coordinator-url.")
        return overview

    async def version(self, call: Call) -> m.Version:
        return m.Version(__version__, m.ProtocolVersions(PROTOCOL_VERSION, OLDEST_SUPPORTED_PROTOCOL_VERSION))

    async def config(self, call: Call) -> Any:
        return redacted(self._state.config)

    async def adapters(self, call: Call) -> Any:
        return redacted(self._state.config)["l2_adapter"]

    async def metrics(self, call: Call) -> Response:
        if not self._state.metrics.enabled:
            raise HTTPException(404, METRICS_OFF)
        return Response(await self._metrics[not call.may_read_salts].get(), media_type=EXPOSITION_TYPE)

    async def _exposition(self, hides_salts: bool) -> bytes:
        return await self._context.figures(lambda: self._state.metrics.exposition(hides_salts=hides_salts))

    async def loglevel(self, call: Call) -> m.Level:
        return m.Level(logs.current_level())  # type: ignore[arg-type]

    async def set_loglevel(self, call: Call) -> m.Level:
        level = (call.body.level or call.query.level).upper()
        if level not in logs.LEVELS:
            raise HTTPException(400, f'"level" must be one of {", ".join(logs.LEVELS)}.')
        logs.set_level(level)
        logger.info("Log level is %s from now on", level)
        return m.Level(level)
