"""The HTTP interface of a server: the table of its operations, and the application that serves them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lmcache import __version__
from lmcache.admin import messages as m
from lmcache.admin.history_routes import HistoryRoutes
from lmcache.admin.object_routes import ObjectRoutes
from lmcache.admin.pin_routes import PinRoutes
from lmcache.admin.quota_routes import QuotaRoutes
from lmcache.admin.requests import AdminContext
from lmcache.admin.server_routes import HealthCheck, ServerRoutes
from lmcache.admin.state import ServerState
from lmcache.clock import Clock
from lmcache.config import unbuilt
from lmcache.environment import SYSTEM
from lmcache.http import openapi
from lmcache.http.app import EVERY_METHOD, application, index_text, routes
from lmcache.http.operation import Access, Call, Operation
from lmcache.http.problem import problem


def operations(context: AdminContext, health: HealthCheck) -> list[Operation]:
    """All of them."""
    server = ServerRoutes(context, health)
    table = server.operations() + HistoryRoutes(context).operations() + ObjectRoutes(context).operations()
    table += PinRoutes(context).operations() + QuotaRoutes(context).operations()
    described: list[dict[str, Any]] = []  # made when it is first asked for

    async def describe(call: Call) -> Any:
        if not described:
            about = "Health, figures and administration of a KV cache server."
            described.append(openapi.document(table, __version__, "LMCache server", about))
        return described[0]

    table.append(
        Operation("GET", "/openapi.json", "All of this as OpenAPI", Access.PUBLIC, describe, m.JsonObject),
    )
    server.index_text = index_text(f"LMCache server {__version__}", table)
    return table


def _elsewhere(instead: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return problem(501, f"A cache server has no {request.url.path}: {instead}.")

    return answer


def build_app(state: ServerState, token: Callable[[], str] = lambda: "", clock: Clock = SYSTEM.clock) -> Starlette:
    """`token` gives the admin token that counts now, "" when only this host may change state. `state.context` of the
    application has what all operations share; at the end comes `state.close()`."""
    context, health = AdminContext(state, token, clock), HealthCheck(state)
    all_routes = routes(operations(context, health), context.admit, state.audit_log)
    all_routes.append(context.dashboard.route())
    all_routes += [Route(path, _elsewhere(instead), methods=EVERY_METHOD) for path, instead in unbuilt.HTTP.items()]
    app = application(all_routes, "a cache server")

    def close() -> None:
        health.close()
        context.close()

    app.state.close = close
    app.state.context = context
    return app
