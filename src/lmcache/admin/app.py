"""The HTTP resources of a server. Answers are JSON; errors are {"error": one sentence}."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from lmcache import __version__
from lmcache.admin.access import may_read_salts, why_refused
from lmcache.admin.quota import QuotaResources
from lmcache.admin.state import ServerState
from lmcache.config import unbuilt
from lmcache.config.redact import redacted
from lmcache.config.values import did_you_mean
from lmcache.errors import LMCacheError
from lmcache.protocol.version import OLDEST_SUPPORTED_PROTOCOL_VERSION, PROTOCOL_VERSION
from lmcache.telemetry import logs

logger = logging.getLogger("lmcache.admin")

HEALTH_BOUND_SECONDS = 2.0
MAX_BODY_BYTES = 64 * 1024
BODY_DEADLINE_SECONDS = 10.0
EXPOSITION_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_DASHBOARD = Path(__file__).with_name("dashboard.html")
_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
TIERS = ["l1", "l2", "all"]

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
    """Asks the server whether it answers; callers that come while a question is open share its answer."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        # A thread of its own: nothing that hangs elsewhere may keep health from being told.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lmcache-health")
        self._open: asyncio.Future[str] | None = None

    async def ask(self) -> str:
        """ "" or the reason why this server is not healthy."""
        if self._open is None or self._open.done():
            loop = asyncio.get_running_loop()
            self._open = loop.run_in_executor(self._thread, self._state.health, HEALTH_BOUND_SECONDS)
        try:
            # Twice the bound: health() asks two loops.
            return await asyncio.wait_for(asyncio.shield(self._open), 2 * HEALTH_BOUND_SECONDS + 0.5)
        except asyncio.TimeoutError:
            return "The server did not tell its health in time."

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class Resources:
    """The handlers. What may take time runs on a few threads, so that no request holds up another kind."""

    def __init__(self, state: ServerState, token: str) -> None:
        self._state = state
        self._token = token
        self._health = Health(state)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="lmcache-admin")

    def close(self) -> None:
        self._health.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def index(self, request: Request) -> Response:
        """A page for browsers, a list of what there is for everybody else."""
        if "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(
                _DASHBOARD.read_text(encoding="utf-8"), headers={"Content-Security-Policy": _PAGE_POLICY}
            )
        return PlainTextResponse(_INDEX.format(version=__version__))

    async def healthcheck(self, request: Request) -> Response:
        reason = await self._health.ask()
        if reason:
            return JSONResponse({"status": "unhealthy", "reason": reason}, 503)
        return JSONResponse({"status": "healthy"})

    async def readyz(self, request: Request) -> Response:
        reason = await self._health.ask()
        if not reason and not self._state.ready():
            reason = "The server is starting or shutting down."
        return JSONResponse(
            {"status": "not ready", "reason": reason} if reason else {"status": "ready"}, 503 if reason else 200
        )

    async def status(self, request: Request) -> Response:
        return JSONResponse(await self.in_thread(self._state.status))

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
        hides_salts = not self.may_read_salts(request)
        text = await self.in_thread(lambda: self._state.metrics.exposition(hides_salts=hides_salts))
        return Response(text, media_type=EXPOSITION_TYPE)

    async def loglevel(self, request: Request) -> Response:
        if request.method == "PUT":
            body = await self.change(request, {"level"})
            level = str(body.get("level") or request.query_params.get("level") or "").upper()
            if level not in logs.LEVELS:
                raise HTTPException(400, f'"level" must be one of {", ".join(logs.LEVELS)}.')
            logs.set_level(level)
            logger.info("Log level is %s from now on", level)
        return JSONResponse({"level": logs.current_level()})

    async def clear(self, request: Request) -> Response:
        body = await self.change(request, {"tier", "force"})
        tier = body.get("tier", "l1")
        if tier not in TIERS:
            raise HTTPException(400, f'"tier" must be one of {", ".join(TIERS)}, got {tier!r}.')
        if not isinstance(body.get("force", False), bool):
            raise HTTPException(400, '"force" must be true or false.')
        # With force or without: what an engine is reading is unreachable at once and freed when it has finished.
        objects, size_bytes = await self.in_thread(lambda: self._state.clear(tier))
        logger.info("Cleared %s by request: %d objects, %d bytes", tier, objects, size_bytes)
        return JSONResponse({"status": "ok", "ok": True, "tier": tier, "objects": objects, "bytes": size_bytes})

    def may_read_salts(self, request: Request) -> bool:
        return may_read_salts(request, self._token)

    async def change(self, request: Request, allowed: set[str]) -> dict[str, Any]:
        """The body of a request that changes state, once it is known that it may."""
        if refusal := why_refused(request, self._token):
            raise HTTPException(403, refusal)
        try:
            raw = await asyncio.wait_for(_read(request), BODY_DEADLINE_SECONDS)
        except asyncio.TimeoutError:
            raise HTTPException(408, "The body did not arrive in time.") from None
        try:
            body = json.loads(raw) if raw else {}
        except (ValueError, RecursionError):
            raise HTTPException(400, "The body is not JSON.") from None
        if not isinstance(body, dict):
            raise HTTPException(400, "The body must be a JSON object.")
        for key in body:
            if key not in allowed:
                guess = did_you_mean(key, sorted(allowed)).rstrip("?")
                raise HTTPException(400, f"The body has no key {key!r}{guess + '?' if guess else '.'}")
        return body


async def _read(request: Request) -> bytes:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"The body is larger than {MAX_BODY_BYTES} bytes.")
    return body


def _unbuilt(what: str, instead: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return JSONResponse({"error": f"{what} is not built yet: {instead}."}, 501)

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
    resources = Resources(state, token)
    routes = [
        Route("/", resources.index),
        Route("/healthcheck", resources.healthcheck),
        Route("/readyz", resources.readyz),
        Route("/status", resources.status),
        Route("/version", resources.version),
        Route("/config", resources.config),
        Route("/config/adapters", resources.adapters),
        Route("/metrics", resources.metrics),
        Route("/loglevel", resources.loglevel, methods=["GET", "PUT"]),
        Route("/cache/clear", resources.clear, methods=["POST"]),
        *QuotaResources(state, resources.in_thread, resources.change, resources.may_read_salts).routes(),
    ]
    every_method = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    routes += [Route(path, _unbuilt(*texts), methods=every_method) for path, texts in unbuilt.HTTP.items()]
    app = Starlette(
        routes=routes,
        exception_handlers={HTTPException: _http_error, LMCacheError: _known_fault, Exception: _unknown_fault},
    )
    app.state.close = resources.close
    return app
