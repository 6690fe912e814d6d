"""A small client of the server's HTTP listener, from the standard library."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import urllib.parse
from typing import Any

from lmcache.errors import ConfigError, LMCacheError, ServerUnavailable

DEFAULT_URL = "http://localhost:8080"
ENGINE_URL = "http://localhost:8000"
TOKEN_VARIABLE = "LMCACHE_ADMIN_TOKEN"
ENGINE_KEY_VARIABLE = "OPENAI_API_KEY"
_MAX_ANSWER_BYTES = 64 << 20


class HttpRefused(LMCacheError):
    """The server answered with an error status."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def split_url(url: str) -> tuple[str, str, int | None, str]:
    """(scheme, host, port where one is given, path without a slash at its end). ConfigError for what is no address."""
    try:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError:
        raise ConfigError(f"--url must be like {DEFAULT_URL}, got {url!r}.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url must be like {DEFAULT_URL}, got {url!r}.")
    return parts.scheme, parts.hostname, port, parts.path.rstrip("/")


def request(
    url: str, method: str, path: str, body: Any = None, *, token: str | None = None, timeout_seconds: float = 10.0
) -> Any:
    """The decoded JSON answer (text where it is not JSON). ServerUnavailable without an answer, HttpRefused for errors.

    `token`: what the request proves itself with; unless given, the admin token in LMCACHE_ADMIN_TOKEN, for a cache
    server alone."""
    scheme, host, port, prefix = split_url(url)
    connection = (
        http.client.HTTPSConnection(host, port, timeout=timeout_seconds, context=ssl.create_default_context())
        if scheme == "https"
        else http.client.HTTPConnection(host, port, timeout=timeout_seconds)
    )
    headers = {"Accept": "application/json"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    if token is None:
        token = os.environ.get(TOKEN_VARIABLE, "")
    if token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        connection.request(method, prefix + path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read(_MAX_ANSWER_BYTES).decode(errors="replace")
    except TimeoutError:
        raise ServerUnavailable(f"{url} did not answer {method} {path} within {timeout_seconds:g} s.") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ServerUnavailable(f"nothing answers at {url} ({reason}): is the server running there?") from None
    finally:
        connection.close()
    try:
        decoded = json.loads(text)
    except ValueError:
        decoded = text
    if answer.status >= 400:
        reason = (decoded.get("error") or decoded.get("reason")) if isinstance(decoded, dict) else None
        reason = reason.get("message") if isinstance(reason, dict) else reason  # as the OpenAI API has it
        raise HttpRefused(
            answer.status, str(reason) if reason else f"{url} answered {method} {path} with {answer.status}."
        )
    return decoded
