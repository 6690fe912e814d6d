"""A small client of the server's HTTP listener, from the standard library."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Iterator
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


@contextlib.contextmanager
def answer_of(url: str, server: str = "a cache server") -> Iterator[None]:
    """ServerUnavailable where what is read inside is not what such a server answers."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ServerUnavailable(f"{url} does not answer as {server} does.") from error


def request(
    url: str, method: str, path: str, body: Any = None, *, token: str | None = None, timeout_seconds: float = 10.0
) -> Any:
    """The decoded JSON answer (text where it is not JSON). ServerUnavailable without an answer that has ended in that
    time, HttpRefused for errors.

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
    if proof := _token(token):
        headers["Authorization"] = f"Bearer {proof}"
    try:
        connection.connect()
        with _ending_after(connection, timeout_seconds):
            connection.request(method, prefix + path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read(_MAX_ANSWER_BYTES).decode(errors="replace")
    except TimeoutError:
        raise ServerUnavailable(f"{url} did not answer {method} {path} within {timeout_seconds:g} s.") from None
    except ssl.SSLCertVerificationError as error:
        raise ServerUnavailable(
            f"{url} shows a certificate that is not trusted here ({error.verify_message}): name the file of its "
            "authority in SSL_CERT_FILE."
        ) from None
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ServerUnavailable(f"nothing answers at {url} ({reason}): is the server running there?") from None
    finally:
        connection.close()
    try:
        decoded = json.loads(text)
    except (ValueError, RecursionError):
        decoded = text
    if answer.status >= 400:
        reason = (decoded.get("error") or decoded.get("reason")) if isinstance(decoded, dict) else None
        reason = reason.get("message") if isinstance(reason, dict) else reason  # as the OpenAI API has it
        raise HttpRefused(
            answer.status, str(reason) if reason else f"{url} answered {method} {path} with {answer.status}."
        )
    return decoded


def _token(given: str | None) -> str:
    """ConfigError for one that no header can carry, which is not shown."""
    token = (os.environ.get(TOKEN_VARIABLE, "") if given is None else given).strip()
    if not (token.isascii() and token.isprintable()):
        variable = TOKEN_VARIABLE if given is None else ENGINE_KEY_VARIABLE
        raise ConfigError(f"What {variable} has must be one line of ASCII.")
    return token


@contextlib.contextmanager
def _ending_after(connection: http.client.HTTPConnection, seconds: float) -> Iterator[None]:
    """TimeoutError when what is done inside takes longer: the connection's own timeout bounds each read alone, and a
    server that sends a byte now and then is never over."""
    over = threading.Event()
    connected = connection.sock

    def end() -> None:
        over.set()
        with contextlib.suppress(OSError):
            socket.socket.shutdown(connected, socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, ValueError, http.client.HTTPException):
        if not over.is_set():
            raise
    finally:
        timer.cancel()
    if over.is_set():
        raise TimeoutError
