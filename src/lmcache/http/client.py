"""A small client of HTTP interfaces, from the standard library."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any

from lmcache.core.limits import MAX_REASON_CHARACTERS
from lmcache.errors import ConfigError, LMCacheError, ServerUnavailable

JSON_TYPE = "application/json"

_EXAMPLE_URL = "http://HOST:PORT"
_MAX_ANSWER_BYTES = 64 << 20


class HttpRefused(LMCacheError):
    """The server answered with an error status."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def split_url(url: str, flag: str = "--url") -> tuple[str, str, int | None, str]:
    """(scheme, host, port where one is given, path without a slash at its end). ConfigError, which names the flag, for
    what is no address."""
    try:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError:
        raise ConfigError(f"{flag} must be like {_EXAMPLE_URL}, got {url!r}.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{flag} must be like {_EXAMPLE_URL}, got {url!r}.")
    return parts.scheme, parts.hostname, port, parts.path.rstrip("/")


@contextlib.contextmanager
def answer_of(url: str, server: str = "a cache server") -> Iterator[None]:
    """ServerUnavailable where what is read inside is not what such a server answers."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ServerUnavailable(f"{url} does not answer as {server} does.") from error


def request(
    url: str,
    method: str,
    path: str,
    body: Any = None,
    *,
    token: str = "",
    timeout_seconds: float = 10.0,
    most_answer_bytes: int = _MAX_ANSWER_BYTES,
    content_type: str = JSON_TYPE,
) -> Any:
    """The decoded JSON answer (text where it is not JSON). ServerUnavailable without an answer that has ended in that
    time, HttpRefused for errors. `body`: what becomes JSON, or bytes of that `content_type`. `token`: one line of ASCII
    that the request proves itself with. What goes beyond `most_answer_bytes` is cut off."""
    scheme, host, port, prefix = split_url(url)
    connection = (
        http.client.HTTPSConnection(host, port, timeout=timeout_seconds, context=ssl.create_default_context())
        if scheme == "https"
        else http.client.HTTPConnection(host, port, timeout=timeout_seconds)
    )
    headers = {"Accept": JSON_TYPE}
    if body is not None:
        headers["Content-Type"] = content_type
    if token:
        headers["Authorization"] = f"Bearer {token}"
    payload = body if body is None or isinstance(body, bytes) else json.dumps(body)
    try:
        connection.connect()
        with _ending_after(connection, timeout_seconds):
            connection.request(method, prefix + path, payload, headers)
            answer = connection.getresponse()
            text = answer.read(most_answer_bytes).decode(errors="replace")
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
        sentence = str(reason) if reason else f"{url} answered {method} {path} with {answer.status}."
        raise HttpRefused(answer.status, sentence[:MAX_REASON_CHARACTERS])
    return decoded


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
