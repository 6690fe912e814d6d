"""The log as a stream of Valkey or Redis: XADD, XREAD, and XINFO to see whether it began anew."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.retry import Retry

from lmcache.core.limits import MAX_LOGGED_EVENT_REQUESTS
from lmcache.core.secret_file import read_secret
from lmcache.errors import ConfigError, LMCacheError, ServerUnavailable
from lmcache.fleet.event_log import ValkeySettings

_FIELD = b"batches"
_AUTHORITY = "ssl_ca_certs"
_BEGINNING = "0-0"
_ASK_SECONDS = 5.0
_BODIES_AT_ONCE = 8
_LEAST_CHARACTERS = 1  # the service decides how long a password must be


class _Credentials(CredentialProvider):
    """Reads the file for each connection."""

    def __init__(self, username: str, password_file: str, flag: str) -> None:
        self._username, self._file, self._flag = username, password_file, flag

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = read_secret(self._file, self._flag, _LEAST_CHARACTERS)
        return (self._username, password) if self._username else (password,)


class ValkeyLog:
    def __init__(self, settings: ValkeySettings) -> None:
        flag, file_flag = f"{settings.option}url", f"{settings.option}password-file"
        parts = urlsplit(settings.url)
        if parts.password is not None:
            raise ConfigError(f"{flag} must not hold a password, which others could read: give {file_flag}.")
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        authority = query.pop(_AUTHORITY, None) if parts.scheme == "rediss" else None
        if query:
            raise ConfigError(
                f"{flag} must have nothing behind the ? but {_AUTHORITY}=FILE, the authority of rediss://, got "
                f"{next(iter(query))!r}."
            )
        if authority is not None and not os.path.isfile(authority):
            raise ConfigError(f"{flag} names the authority {authority!r}, which is no file.")
        if parts.username and not settings.password_file:
            raise ConfigError(f"{flag} names a user: {file_flag} must have its password.")
        read_secret(settings.password_file, file_flag, _LEAST_CHARACTERS)
        credentials = None
        if settings.password_file:
            credentials = _Credentials(parts.username or "", settings.password_file, file_flag)
        try:
            self._client = redis.Redis.from_url(
                settings.url.replace(f"{parts.username}@", "", 1),
                credential_provider=credentials,
                socket_timeout=_ASK_SECONDS,
                socket_connect_timeout=_ASK_SECONDS,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
        except ValueError:
            raise ConfigError(
                f"{flag} must be redis://HOST:PORT[/DATABASE], rediss:// for TLS or unix:///PATH, got {settings.url!r}."
            ) from None
        self._url, self._stream = settings.url, settings.stream

    def append(self, body: bytes) -> None:
        with self._faults():
            self._client.xadd(self._stream, {_FIELD: body}, maxlen=MAX_LOGGED_EVENT_REQUESTS, approximate=True)

    def read(self, position: str, wait_seconds: float) -> Sequence[tuple[str, bytes]]:
        wait_milliseconds = round(wait_seconds * 1000)
        with self._faults():
            answer: Any = self._client.xread({self._stream: position}, count=_BODIES_AT_ONCE, block=wait_milliseconds)
            return [(name.decode(), fields.get(_FIELD, b"")) for _, entries in answer or () for name, fields in entries]

    def retained(self, position: str) -> str:
        """A stream that ends before the position began anew. One that begins behind it goes on there."""
        with self._faults():
            return position if position and _order(position) <= _order(self._last()) else _BEGINNING

    def _last(self) -> str:
        try:
            last: bytes = self._client.xinfo_stream(self._stream)["last-generated-id"]
        except redis.ResponseError as error:
            if "no such key" not in str(error):
                raise
            return _BEGINNING
        return last.decode()

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except redis.RedisError as error:
            raise ServerUnavailable(f"The events at {self._url} cannot be reached: {str(error).rstrip('.')}.") from None
        except (LookupError, TypeError, ValueError, AttributeError) as error:  # of another service at that address
            raise LMCacheError(f"{self._url} does not answer as Valkey does ({error}).") from None

    def close(self) -> None:
        self._client.close()


def _order(name: str) -> tuple[int, int]:
    milliseconds, _, number = name.partition("-")
    return int(milliseconds), int(number or 0)
