"""The HTTP resources of a server. Answers are JSON; errors are {"error": one sentence}."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from lmcache import __version__
from lmcache.admin.quota_routes import QuotaRoutes
from lmcache.admin.requests import AdminContext
from lmcache.admin.state import ServerState
from lmcache.config import unbuilt
from lmcache.config.redact import redacted
from lmcache.errors import LMCacheError
from lmcache.protocol.messages import OLDEST_SUPPORTED_PROTOCOL_VERSION, PROTOCOL_VERSION
from lmcache.telemetry import logs
from lmcache.tiering.storage_loop import TIERS

logger = logging.getLogger("lmcache.admin")

HEALTH_BOUND_SECONDS = 2.0
EXPOSITION_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_DASHBOARD = Path(__file__).with_name("dashboard.html")
_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"

_INDEX = """LMCache server {version}

GET  /healthcheck      do the message loop and the storage loop answer?
GET  /readyz           may engines connect?
GET  /status           figures of this server
GET  /metrics          the same for Prometheus
GET  /config           options in force, secrets hidden; /config/adapters: the L2 adapters
GET  /version
GET  /loglevel         PUT {{"level": "DEBUG"}} changes it
POST /cache/clear      {{"tier": "l1"}}, "l2" or "all"
GET  /quota            what each cache salt may keep, and has; salts are digests without the admin token, as in /metrics
PUT  /quota/SALT       {{"limit_gb": 1.5}} sets it; GET shows one, DELETE removes it; _default is the empty salt
"""


class Health:
    """Health checks, single-flight: requests that come while a check runs share its answer."""

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
    """What concerns the server as a whole."""

    def __init__(self, context: AdminContext, health: Health) -> None:
        self._context = context
        self._state = context.state
        self._health = health

    def routes(self) -> list[Route]:
        return [
            Route("/", self.index),
            Route("/healthcheck", self.healthcheck),
            Route("/readyz", self.readyz),
            Route("/status", self.status),
            Route("/version", self.version),
            Route("/config", self.config),
            Route("/config/adapters", self.adapters),
            Route("/metrics", self.metrics),
            Route("/loglevel", self.loglevel, methods=["GET", "PUT"]),
            Route("/cache/clear", self.clear, methods=["POST"]),
        ]

    async def index(self, request: Request) -> Response:
        """The dashboard for browsers, where it is installed; else a list of the paths."""
        if "text/html" in request.headers.get("accept", "") and _DASHBOARD.exists():
            return HTMLResponse(
                _DASHBOARD.read_text(encoding="utf-8"), headers={"Content-Security-Policy": _PAGE_POLICY}
            )
        return PlainTextResponse(_INDEX.format(version=__version__))

    async def healthcheck(self, request: Request) -> Response:
        reason = await self._health.check()
        if reason:
            return JSONResponse({"status": "unhealthy", "reason": reason}, 503)
        return JSONResponse({"status": "healthy"})

    async def readyz(self, request: Request) -> Response:
        reason = await self._health.check()
        if not reason and not self._state.ready():
            reason = "The server is starting or shutting down."
        return JSONResponse(
            {"status": "not ready", "reason": reason} if reason else {"status": "ready"}, 503 if reason else 200
        )

    async def status(self, request: Request) -> Response:
        return JSONResponse(await self._context.in_thread(self._state.status))

    async def version(self, request: Request) -> Response:
        protocol = {"current": PROTOCOL_VERSION, "oldest_supported": OLDEST_SUPPORTED_PROTOCOL_VERSION}
        return JSONResponse({"version": __version__, "protocol_version": protocol})

    async def config(self, request: Request) -> Response:
        return JSONResponse(redacted(self._state.config))

    async def adapters(self, request: Request) -> Response:
        return JSONResponse(redacted(self._state.config)["l2_adapter"])

    async def metrics(self, request: Request) -> Response:
        if not self._state.metrics.enabled:
            raise HTTPException(
                404, "Metrics are off: the server was started with --disable-metrics or --disable-observability."
            )
        hides_salts = not self._context.may_read_salts(request)
        text = await self._context.in_thread(lambda: self._state.metrics.exposition(hides_salts=hides_salts))
        return Response(text, media_type=EXPOSITION_TYPE)

    async def loglevel(self, request: Request) -> Response:
        if request.method == "PUT":
            body = await self._context.change(request, {"level"})
            level = str(body.get("level") or request.query_params.get("level") or "").upper()
            if level not in logs.LEVELS:
                raise HTTPException(400, f'"level" must be one of {", ".join(logs.LEVELS)}.')
            logs.set_level(level)
            logger.info("Log level is %s from now on", level)
        return JSONResponse({"level": logs.current_level()})

    async def clear(self, request: Request) -> Response:
        body = await self._context.change(request, {"tier", "force"})
        tier = body.get("tier", "l1")
        if tier not in TIERS:
            raise HTTPException(400, f'"tier" must be one of {", ".join(TIERS)}, got {tier!r}.')
        if not isinstance(body.get("force", False), bool):
            raise HTTPException(400, '"force" must be true or false.')
        # `force` changes nothing: what an engine is reading is unreachable at once, and freed when it has finished.
        objects, size_bytes = await self._context.in_thread(lambda: self._state.clear(tier))
        logger.info("Cleared %s by request: %d objects, %d bytes", tier, objects, size_bytes)
        return JSONResponse({"status": "ok", "ok": True, "tier": tier, "objects": objects, "bytes": size_bytes})


def _unbuilt(subject: str, instead: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return JSONResponse({"error": f"{subject} is not built yet: {instead}."}, 501)

    return answer


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence = error.detail
    if sentence == "Not Found":
        sentence = f"There is nothing at {request.url.path}; GET / lists what there is."
    elif sentence == "Method Not Allowed":
        sentence = f"{request.url.path} does not take {request.method}."
    return JSONResponse({"error": sentence}, error.status_code, headers=error.headers)


async def _known_fault(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 503)


async def _unknown_fault(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse({"error": f"The server failed to answer ({type(error).__name__}); its log says more."}, 500)


def build_app(state: ServerState, token: str = "") -> Starlette:
    """`token` is the admin token, "" when only this host may change state."""
    context, health = AdminContext(state, token), Health(state)
    routes = ServerRoutes(context, health).routes() + QuotaRoutes(context).routes()
    every_method = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    routes += [Route(path, _unbuilt(*texts), methods=every_method) for path, texts in unbuilt.HTTP.items()]
    app = Starlette(
        routes=routes,
        exception_handlers={HTTPException: _http_error, LMCacheError: _known_fault, Exception: _unknown_fault},
    )

    def close() -> None:
        health.close()
        context.close()

    app.state.close = close
    return app
