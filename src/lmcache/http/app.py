"""An application from a table of operations. Answers are JSON, errors are problem details (problem.py)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from lmcache.errors import LMCacheError
from lmcache.http.access import caller_of
from lmcache.http.operation import Access, Call, Operation
from lmcache.http.problem import GONE, HANDLERS

EVERY_METHOD = ("GET", "POST", "PUT", "PATCH", "DELETE")
_AUDITED_ITEMS = 600  # of a list, or characters

Endpoint = Callable[[Request], Awaitable[Response]]
Admit = Callable[[Operation, Request], Awaitable[Call]]


class Audit(Protocol):
    """Where changes are recorded, and refused ones."""

    def audit(self, action: str, caller: str, detail: Mapping[str, Any], outcome: str) -> None: ...

    def audit_refused(self, action: str, caller: str, detail: Mapping[str, Any], outcome: str) -> None: ...


def routes(table: Sequence[Operation], admit: Admit, audit: Audit | None = None) -> list[Route]:
    """One a path: of two, the first would refuse the methods of the second."""
    by_path: dict[str, dict[str, Endpoint]] = {}
    for operation in table:
        by_path.setdefault(operation.path, {})[operation.method] = _endpoint(operation, admit, audit)
    return [Route(path, _by_method(methods), methods=list(methods)) for path, methods in by_path.items()]


def application(all_routes: Sequence[Route], subject: str) -> Starlette:
    """`subject`: what answers, as a refusal names it."""
    app = Starlette(routes=list(all_routes), exception_handlers=HANDLERS)
    app.state.subject = subject
    return app


def index_text(title: str, table: Sequence[Operation]) -> str:
    """The list for `/`."""
    asked = [f"{operation.method} {operation.open_path}" for operation in table]
    width = max(map(len, asked))
    lines = [f"{ask:<{width}}  {operation.summary}" for ask, operation in zip(asked, table, strict=True)]
    return "\n".join([f"{title}\n", *lines, ""])


def _endpoint(operation: Operation, admit: Admit, audit: Audit | None) -> Endpoint:
    async def answer(request: Request) -> Response:
        value = await operation.handler(await admit(operation, request))
        if isinstance(value, Response):
            return value
        return _json(value[1], value[0]) if isinstance(value, tuple) else _json(value, operation.status)

    if operation.access is not Access.CHANGE or audit is None:
        return answer
    return _audited(operation, answer, audit)


def _audited(operation: Operation, answer: Endpoint, audit: Audit) -> Endpoint:
    async def audited(request: Request) -> Response:
        outcome, record = "a fault of the server", audit.audit
        try:
            response = await answer(request)
            outcome = "ok"
            return response
        except HTTPException as refusal:
            outcome = refusal.detail
            if refusal.status_code == HTTPStatus.FORBIDDEN:
                record = audit.audit_refused
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

    return audited


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _summary(query: msgspec.Struct | None = None, body: msgspec.Struct | None = None) -> dict[str, Any]:
    """What was asked for, without long lists. Of what both may say, the body counts where it says something."""
    given: dict[str, Any] = {}
    for part in (query, body):
        fields = msgspec.structs.asdict(part) if part is not None else {}
        given.update({name: value for name, value in fields.items() if value or name not in given})
    return {
        name: f"{len(value)} of them" if isinstance(value, (list, str)) and len(value) > _AUDITED_ITEMS else value
        for name, value in given.items()
    }


def _by_method(methods: Mapping[str, Endpoint]) -> Endpoint:
    async def answer(request: Request) -> Response:
        return await methods["GET" if request.method == "HEAD" else request.method](request)

    return answer
