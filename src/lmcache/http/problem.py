"""Errors over HTTP: problem details (RFC 9457). `detail` is one sentence, and so is `error`, for clients that know no
problem details."""

from __future__ import annotations

import logging
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from lmcache.errors import ConfigError, LMCacheError, UnknownModel
from lmcache.http.client import HttpRefused

logger = logging.getLogger("lmcache.http")

_PASSED_ON = (400, 404, 409)  # what another server said of the request that was passed on to it
PROBLEM_TYPE = "application/problem+json"
GONE = "The client went away in the middle of its request."


class Problem(msgspec.Struct, frozen=True):
    """What went wrong: problem details, RFC 9457. `error` says the same as `detail`, for existing clients."""

    type: str
    title: str
    status: int
    detail: str
    error: str


def problem(status: int, sentence: str, headers: dict[str, str] | None = None) -> Response:
    details = Problem("about:blank", HTTPStatus(status).phrase, status, sentence, sentence)
    return Response(msgspec.json.encode(details), status, headers, PROBLEM_TYPE)


async def http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence = error.detail
    if sentence == "Not Found":
        sentence = f"There is nothing at {request.url.path} of {request.app.state.subject}; GET / lists what there is."
    elif sentence == "Method Not Allowed":
        sentence = f"{request.url.path} does not take {request.method}."
    return problem(error.status_code, sentence, dict(error.headers or {}))


async def known_fault(request: Request, error: Exception) -> Response:
    status = 400 if isinstance(error, ConfigError) else 409 if isinstance(error, UnknownModel) else 503
    if isinstance(error, HttpRefused) and error.status in _PASSED_ON:
        status = error.status
    return problem(status, str(error))


async def gone(request: Request, error: Exception) -> Response:
    """Nobody reads it. Clients may do this as often as they like, so it is not logged."""
    return problem(400, GONE)


async def unknown_fault(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem(500, f"The server failed to answer ({type(error).__name__}); its log says more.")


HANDLERS = {
    HTTPException: http_error,
    LMCacheError: known_fault,
    ClientDisconnect: gone,
    Exception: unknown_fault,
}
