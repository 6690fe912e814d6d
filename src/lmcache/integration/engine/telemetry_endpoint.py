"""Where a proxy between prefill and decode engines listens for what was stored, and one POST to it."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from lmcache.errors import ConfigError, ServerUnavailable

log = logging.getLogger("lmcache.engine")

TYPE_VARIABLE = "LMCACHE_REQUEST_TELEMETRY_TYPE"
ENDPOINT_VARIABLE = "LMCACHE_REQUEST_TELEMETRY_ENDPOINT"
DEFAULT_ENDPOINT = "http://localhost:5768/api/v1/telemetry"
_TYPES = ("fastapi", "noop")
_PORTS = {"http": 80, "https": 443}
_UNFIT = re.compile(r"[^!-~]|@")  # a name and a password in an address would be logged
_MAX_STATUS_LINE_BYTES = 4096
_MAX_ANSWER_BYTES = 64 << 10
_PAUSE_SECONDS = 0.25  # after a success: an endpoint that sends nothing for so long does not close the connection


@dataclass(frozen=True)
class TelemetryEndpoint:
    """An address of HTTP. Immutable; any thread."""

    url: str
    tls: bool
    host: str
    port: int
    authority: str  # of the header `Host`
    target: str  # path and query

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> TelemetryEndpoint | None:
        """What the environment asks for; None where it asks for nothing. ConfigError names the variable."""
        kind = environ.get(TYPE_VARIABLE) or "noop"
        if kind not in _TYPES:
            raise ConfigError(f"{TYPE_VARIABLE} is {kind!r}; it must be one of {', '.join(_TYPES)}.")
        if kind == "noop":
            if environ.get(ENDPOINT_VARIABLE) and not environ.get(TYPE_VARIABLE):
                log.warning("%s has no effect: %s is not fastapi", ENDPOINT_VARIABLE, TYPE_VARIABLE)
            return None
        return cls.of(environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT)

    @classmethod
    def of(cls, url: str) -> TelemetryEndpoint:
        """ConfigError, which names the variable, for what is no address."""
        parts = _split(url)
        if parts is None or parts.scheme not in _PORTS or not parts.hostname or _UNFIT.search(url):
            raise ConfigError(f"{ENDPOINT_VARIABLE} is {url!r}; it must be an address such as {DEFAULT_ENDPOINT}.")
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        port = parts.port or _PORTS[parts.scheme]
        return cls(url, parts.scheme == "https", parts.hostname, port, parts.netloc, target)

    def post(self, body: bytes, seconds: float, now: Callable[[], float]) -> None:
        """Returns when the endpoint has answered with success. ServerUnavailable otherwise, and past that time: it
        counts for all of the exchange, but not for the search for the host's name."""
        try:
            self._exchange(body, seconds, now)
        except TimeoutError:
            raise ServerUnavailable(f"{self.url} did not answer within {seconds:g} s.") from None
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ServerUnavailable(f"nothing answers at {self.url} ({reason}).") from None

    def _exchange(self, body: bytes, seconds: float, now: Callable[[], float]) -> None:
        addresses = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        until = now() + seconds

        def left() -> float:
            remaining = until - now()
            if remaining <= 0:
                raise TimeoutError
            return remaining

        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(_connect(addresses, left))
            if self.tls:
                connection.settimeout(left())
                context = ssl.create_default_context()
                connection = stack.enter_context(context.wrap_socket(connection, server_hostname=self.host))
            connection.settimeout(left())
            connection.sendall(self._head(len(body)) + body)
            self._take_answer(connection, left)

    def _head(self, body_bytes: int) -> bytes:
        lines = (
            f"POST {self.target} HTTP/1.1",
            f"Host: {self.authority}",
            "Content-Type: application/json",
            f"Content-Length: {body_bytes}",
            "Connection: close",
        )
        return "".join(f"{line}\r\n" for line in (*lines, "")).encode()

    def _take_answer(self, connection: socket.socket, left: Callable[[], float]) -> None:
        """The status decides; the rest is read as far as it comes, so that the endpoint can end in order."""
        answer = b""
        while b"\n" not in answer and len(answer) < _MAX_STATUS_LINE_BYTES:
            connection.settimeout(left())
            part = connection.recv(_MAX_STATUS_LINE_BYTES)
            if not part:
                break
            answer += part
        words = answer.partition(b"\n")[0].split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
            raise ServerUnavailable(f"{self.url} does not answer as HTTP does.")
        if words[1][:1] != b"2":
            raise ServerUnavailable(f"{self.url} answered with {words[1].decode()[:3]}.")
        read_bytes = len(answer)
        with contextlib.suppress(OSError):
            while read_bytes < _MAX_ANSWER_BYTES:
                connection.settimeout(min(left(), _PAUSE_SECONDS))
                part = connection.recv(_MAX_STATUS_LINE_BYTES)
                if not part:
                    return
                read_bytes += len(part)


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  # raises for what is no port
    except ValueError:
        return None
    return parts


def _connect(addresses: Sequence[Any], left: Callable[[], float]) -> socket.socket:
    """To the first of the addresses, as `getaddrinfo` gives them, that answers. OSError where none does."""
    failure = OSError("its name has no address")
    for family, kind, protocol, _, address in addresses:
        try:
            connection = socket.socket(family, kind, protocol)
        except OSError as error:  # this machine has no such family
            failure = error
            continue
        try:
            connection.settimeout(left())
            connection.connect(address)
            return connection
        except OSError as error:
            connection.close()
            failure = error
    raise failure
