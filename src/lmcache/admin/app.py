"""The HTTP interface of a server: the table of its operations, and the application that serves them.

Answers are JSON. Errors are problem details (RFC 9457): `detail` is one sentence, and so is `error`, for clients that
know no problem details.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from lmcache import __version__
from lmcache.admin import messages as m
from lmcache.admin import openapi
from lmcache.admin.access import caller_of
from lmcache.admin.history_routes import HistoryRoutes
from lmcache.admin.object_routes import ObjectRoutes
from lmcache.admin.operation import Access, Call, Operation
from lmcache.admin.pin_routes import PinRoutes
from lmcache.admin.quota_routes import QuotaRoutes
from lmcache.admin.requests import AdminContext
from lmcache.admin.server_routes import HealthCheck, ServerRoutes
from lmcache.admin.state import ServerState
from lmcache.config import unbuilt
from lmcache.errors import ConfigError, LMCacheError, UnknownModel

logger = logging.getLogger("lmcache.admin")

GONE = "The client went away in the middle of its request."
_AUDITED_ITEMS = 600  # of a list, or characters


def operations(context: AdminContext, health: HealthCheck) -> list[Operation]:
    """All of them."""
    server = ServerRoutes(context, health)
    table = server.operations() + HistoryRoutes(context).operations() + ObjectRoutes(context).operations()
    table += PinRoutes(context).operations() + QuotaRoutes(context).operations()
    described: list[dict[str, Any]] = []  # made when it is first asked for

    async def describe(call: Call) -> Any:
        if not described:
            described.append(openapi.document(table, __version__))
        return described[0]

    table.append(
        Operation("GET", "/openapi.json", "All of this as OpenAPI", Access.PUBLIC, describe, m.JsonObject),
    )
    server.index_text = index_text(table)
    return table


def index_text(table: Sequence[Operation]) -> str:
    """The list for `/`."""
    asked = [f"{operation.method} {operation.open_path}" for operation in table]
    width = max(map(len, asked))
    lines = [f"{ask:<{width}}  {operation.summary}" for ask, operation in zip(asked, table, strict=True)]
    return "\n".join([f"LMCache server {__version__}\n", *lines, ""])


# ---- answers --------------------------------------------------------------------------------------------------------
def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def problem(status: int, sentence: str, headers: dict[str, str] | None = None) -> Response:
    details = m.Problem("about:blank", HTTPStatus(status).phrase, status, sentence, sentence)
    return Response(msgspec.json.encode(details), status, headers, openapi.PROBLEM_TYPE)


def _endpoint(operation: Operation, context: AdminContext) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        value = await operation.handler(await context.admit(operation, request))
        if isinstance(value, Response):
            return value
        return _json(value[1], value[0]) if isinstance(value, tuple) else _json(value, operation.status)

    async def audited(request: Request) -> Response:
        outcome, record = "a fault of the server", context.state.audit_log.audit
        try:
            response = await answer(request)
            outcome = "ok"
            return response
        except HTTPException as refusal:
            outcome = refusal.detail
            if refusal.status_code == HTTPStatus.FORBIDDEN:
                record = context.state.audit_log.audit_refused
            raise
        except LMCacheError as fault:
            outcome = str(fault)
            raise
        except ClientDisconnect:
            outcome = GONE
            raise
        finally:
            detail = {**request.path_params, **_summary(*getattr(request.state, "asked", ()))}
            record(operation.action, caller_of(request), detail, outcome)

    return audited if operation.access is Access.CHANGE else answer


def _summary(query: msgspec.Struct | None = None, body: msgspec.Struct | None = None) -> dict[str, Any]:
    """What was asked for, without long lists. Of what both may say, the body counts where it says something."""
    given: dict[str, Any] = {}
    for part in (query, body):
        named = msgspec.structs.asdict(part) if part is not None else {}
        given.update({name: value for name, value in named.items() if value or name not in given})
    return {
        name: f"{len(value)} of them" if isinstance(value, (list, str)) and len(value) > _AUDITED_ITEMS else value
        for name, value in given.items()
    }


def _unbuilt(subject: str, instead: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return problem(501, f"{subject} is not built yet: {instead}.")

    return answer


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence = error.detail
    if sentence == "Not Found":
        sentence = f"There is nothing at {request.url.path}; GET / lists what there is."
    elif sentence == "Method Not Allowed":
        sentence = f"{request.url.path} does not take {request.method}."
    return problem(error.status_code, sentence, dict(error.headers or {}))


async def _known_fault(request: Request, error: Exception) -> Response:
    status = 400 if isinstance(error, ConfigError) else 409 if isinstance(error, UnknownModel) else 503
    return problem(status, str(error))


async def _gone(request: Request, error: Exception) -> Response:
    """Nobody reads it. Clients may do this as often as they like, so it is not logged."""
    return problem(400, GONE)


async def _unknown_fault(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem(500, f"The server failed to answer ({type(error).__name__}); its log says more.")


def build_app(state: ServerState, token: Callable[[], str] = lambda: "") -> Starlette:
    """`token` gives the admin token that counts now, "" when only this host may change state. `state.context` of the
    application has what all operations share; at the end comes `state.close()`."""
    context, health = AdminContext(state, token), HealthCheck(state)
    by_path: dict[str, dict[str, Callable[[Request], Awaitable[Response]]]] = {}
    for operation in operations(context, health):
        by_path.setdefault(operation.path, {})[operation.method] = _endpoint(operation, context)
    every_method = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    routes = [Route(path, _by_method(methods), methods=list(methods)) for path, methods in by_path.items()]
    routes.append(context.dashboard.route())
    routes += [Route(path, _unbuilt(*texts), methods=every_method) for path, texts in unbuilt.HTTP.items()]
    app = Starlette(
        routes=routes,
        exception_handlers={
            HTTPException: _http_error,
            LMCacheError: _known_fault,
            ClientDisconnect: _gone,
            Exception: _unknown_fault,
        },
    )

    def close() -> None:
        health.close()
        context.close()

    app.state.close = close
    app.state.context = context
    return app


def _by_method(
    methods: dict[str, Callable[[Request], Awaitable[Response]]],
) -> Callable[[Request], Awaitable[Response]]:
    """One route a path: of two, the first would refuse the methods of the second."""

    async def answer(request: Request) -> Response:
        return await methods["GET" if request.method == "HEAD" else request.method](request)

    return answer
