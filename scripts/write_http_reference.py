"""Writes docs/reference/http.md from the table of operations over HTTP. --check: fails where it is not current."""

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


def page() -> str:
    state = cast(ServerState, SimpleNamespace(status=None, quotas=None, metrics=None))
    context, health = AdminContext(state, lambda: ""), HealthCheck(state)
    try:
        return "\n".join([BEGINNING, *map(section, operations(context, health))])
    finally:
        health.close()
        context.close()


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
    if isinstance(kind, str):
        return f"`{kind}`"
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return "{" + ", ".join(f"`{key.name}`" for key in keys_of(kind)) + "}"
    return "JSON"


def table(kind: type[msgspec.Struct]) -> str:
    return key_table(
        (
            f"`{key.name}`",
            key.expected or "a string",
            "required" if key.required else msgspec.json.encode(key.default).decode(),
            key.description,
        )
        for key in keys_of(kind)
    )


if __name__ == "__main__":
    sys.exit(write_or_check({"http.md": page()}))
