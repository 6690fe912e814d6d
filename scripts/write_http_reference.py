"""Writes docs/reference/http.md and coordinator.md from the tables of operations. --check: fails where one is not
current."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from lmcache.admin.app import operations
from lmcache.admin.requests import AdminContext
from lmcache.admin.server_routes import HealthCheck
from lmcache.admin.state import ServerState
from lmcache.config.struct_settings import keys_of
from lmcache.environment import SYSTEM
from lmcache.fleet import app as fleet_app
from lmcache.fleet.fleet import Fleet
from lmcache.fleet.routes.base import RouteContext
from lmcache.fleet.settings import CoordinatorSettings
from lmcache.http import openapi
from lmcache.http.operation import Operation
from reference_pages import key_table, write_or_check

BEGINNING = """# HTTP

Every operation of the listener at `--http-port`. Bodies and answers are JSON. `GET /openapi.json` gives the same to
programs.

An error is problem details (RFC 9457, `application/problem+json`): `detail` is one sentence, `error` repeats it.

Who may ask: *everybody*; *this host*, which is a client on loopback that is no proxy and no page of another site; and
whoever sends `Authorization: Bearer TOKEN` with the token in `--admin-token-file`. That file is read again when it is
replaced. For those who may not read salts, `/quota` and `/metrics` show digests of them.

This page is made from the sources by `scripts/write_http_reference.py`.
"""


COORDINATOR = """# HTTP of a coordinator

Every operation of `lmcache coordinator`, at `--port` and `--controller-port`. Bodies and answers are JSON.
`GET /openapi.json` gives the same to programs. [What servers tell](../formats/fleet-events.md) has the rules of
`POST /events`.

Errors, and who may ask, are as [a server](http.md) has them: *this host* is the coordinator's.

This page is made from the sources by `scripts/write_http_reference.py`.
"""


def page() -> str:
    state = cast(ServerState, SimpleNamespace(status=None, quotas=None, metrics=None))
    context, health = AdminContext(state, lambda: ""), HealthCheck(state)
    try:
        return "\n".join([BEGINNING, *map(section, operations(context, health))])
    finally:
        health.close()
        context.close()


def coordinator_page() -> str:
    fleet = Fleet(CoordinatorSettings(), lambda: "", SYSTEM)
    context = RouteContext(fleet)
    try:
        return "\n".join([COORDINATOR, *map(section, fleet_app.operations(context, None))])
    finally:
        context.close()
        fleet.stop()


def section(operation: Operation) -> str:
    end = "" if operation.summary.endswith("?") else "."
    parts = [
        f"## {operation.method} {operation.open_path}\n",
        f"{operation.summary}{end} For {operation.access.value}.\n",
    ]
    if operation.query is not None:
        parts.append(f"Query:\n\n{table(operation.query)}")
    if operation.body is not None:
        parts.append(f"Body, at most {operation.max_body_bytes} bytes:\n\n{table(operation.body)}")
    refusals = openapi.refusals_of(operation)
    parts.append(
        f"Answer {operation.status}: {answer(operation.answer)}. Refusals: "
        + ", ".join(f"{status} ({reason})" for status, reason in refusals.items())
        + ".\n"
    )
    return "\n".join(parts)


def answer(kind: Any) -> str:
    if kind is None:
        return "nothing"
    if isinstance(kind, str):
        return f"`{kind}`"
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return "{" + ", ".join(f"`{key.name}`" for key in keys_of(kind)) + "}"
    return "JSON"


def _unsaid(hint: Any) -> str:
    """Of a key whose refusals msgspec words."""
    kind = msgspec.inspect.type_info(hint)
    while isinstance(kind, msgspec.inspect.Metadata):
        kind = kind.type
    if isinstance(kind, msgspec.inspect.ListType) and isinstance(kind.item_type, msgspec.inspect.StructType):
        keys = ", ".join(f"`{field.encode_name}`" for field in kind.item_type.fields)
        return f"a list of at most {kind.max_length} objects with {keys}"
    assert isinstance(kind, msgspec.inspect.StrType), hint
    return "a string"


def table(kind: type[msgspec.Struct]) -> str:
    return key_table(
        (
            f"`{key.name}`",
            key.expected or _unsaid(key.hint),
            "required" if key.required else msgspec.json.encode(key.default).decode(),
            key.description,
        )
        for key in keys_of(kind)
    )


if __name__ == "__main__":
    sys.exit(write_or_check({"http.md": page(), "coordinator.md": coordinator_page()}))
