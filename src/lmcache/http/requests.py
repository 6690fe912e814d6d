"""Lets a request through or refuses it: who may ask, and whether body and query are what the operation takes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request

from lmcache.config.struct_settings import keys_of, read
from lmcache.errors import ConfigError
from lmcache.http.access import why_reading_is_refused, why_refused
from lmcache.http.operation import Access, Call, Operation

BODY_DEADLINE_SECONDS = 10.0


async def admit(operation: Operation, request: Request, token: str) -> Call:
    """HTTPException: who asks may not, or what is asked for cannot be understood. The body of somebody who may not ask
    is not read. `token`: the admin token that counts now, "" when only this host may change state."""
    if operation.access is Access.CHANGE and (refusal := why_refused(request, token)):
        raise HTTPException(403, refusal)
    if operation.access is Access.READ and (refusal := why_reading_is_refused(request, token)):
        raise HTTPException(403, refusal)
    try:
        query = read(_numbers(request, operation.query), operation.query, "The query") if operation.query else None
        body = await _body(request, operation) if operation.body else None
    except ConfigError as error:
        raise HTTPException(400, " ".join(error.problems)) from None
    request.state.asked = (query, body)  # for the audit
    return Call(request, body, query, token)


def _numbers(request: Request, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The query as the Struct wants it: everything is text there."""
    wanted = {key.name for key in keys_of(kind) if key.expected.startswith("a whole number")}
    given: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name in given:
            raise ConfigError(f'The query: the key "{name}" is there twice.')
        given[name] = (
            int(value) if name in wanted and value.isascii() and value.isdigit() and len(value) < 19 else value
        )
    return given


async def _body(request: Request, operation: Operation) -> Any:
    assert operation.body is not None
    try:
        raw = await _in_time(_read(request, operation.max_body_bytes))
    except asyncio.TimeoutError:
        raise HTTPException(408, "The body did not arrive in time.") from None
    if operation.decode is not None:
        return operation.decode(raw)
    try:
        given = msgspec.json.decode(raw) if raw.strip() else {}
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        raise HTTPException(400, "The body is not JSON.") from None
    if not isinstance(given, dict):
        raise HTTPException(400, "The body must be a JSON object.")
    return read(given, operation.body, "The body")


async def _in_time(reading: Coroutine[Any, Any, bytes]) -> bytes:
    if sys.version_info < (3, 11):
        return await asyncio.wait_for(reading, BODY_DEADLINE_SECONDS)
    async with asyncio.timeout(BODY_DEADLINE_SECONDS):  # without a task, which costs as much as all the rest
        return await reading


async def _read(request: Request, most_bytes: int) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most_bytes:
            raise HTTPException(413, f"The body is larger than {most_bytes} bytes.")
    return bytes(body)
