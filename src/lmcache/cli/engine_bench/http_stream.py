"""A streaming HTTP/1.1 client on asyncio: a connection for each request, nothing waited for without a bound."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from lmcache.cli.http import split_url
from lmcache.core.limits import MIB
from lmcache.errors import LMCacheError

_MAX_LINE_BYTES = 4 * MIB
_MAX_HEADERS = 256
_MAX_ANSWER_BYTES = 64 * MIB
_CLOSE_SECONDS = 1.0
_READ_BYTES = 65_536

T = TypeVar("T")


class RequestFailed(LMCacheError):
    """The request got no usable answer. `kind` is the same for failures that have one cause."""

    def __init__(self, kind: str, status: int = 0) -> None:
        """`status`: of the answer, 0 where none came."""
        super().__init__(kind)
        self.kind = kind
        self.status = status


@dataclass(frozen=True)
class Endpoint:
    """A server. `silence_seconds`: how long may pass until a connection stands, or the next bytes come."""

    url: str
    silence_seconds: float
    headers: Mapping[str, str]

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[Connection]:
        """RequestFailed where there is no connection."""
        scheme, host, port, path = split_url(self.url)
        secure = ssl.create_default_context() if scheme == "https" else None
        opening = asyncio.open_connection(host, port or (443 if secure else 80), ssl=secure, limit=_MAX_LINE_BYTES)
        try:
            reader, writer = await asyncio.wait_for(opening, self.silence_seconds)
        except asyncio.TimeoutError:
            raise RequestFailed(f"no connection within {self.silence_seconds:g} s") from None
        except OSError as error:
            raise RequestFailed(f"no connection: {_reason(error)}") from None
        shown_host = f"[{host}]" if ":" in host else host
        connection = Connection(
            reader, writer, self, f"{shown_host}:{port}" if port else shown_host, path.removesuffix("/v1")
        )
        try:
            yield connection
        except (OSError, EOFError, ValueError) as error:  # ValueError: a line without end, a size that is none
            raise RequestFailed(f"the connection broke: {_reason(error)}") from None
        finally:
            writer.transport.abort()
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(writer.wait_closed(), _CLOSE_SECONDS)


class Connection:
    """Carries one request."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, endpoint: Endpoint, host: str, prefix: str
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._endpoint = endpoint
        self._host = host
        self._prefix = prefix
        self._headers: dict[str, str] = {}

    async def send(self, method: str, path: str, body: bytes = b"") -> int:
        """The status of the answer."""
        headers = {
            "Host": self._host,
            "Connection": "close",
            "Accept": "application/json, text/event-stream",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **self._endpoint.headers,
        }
        lines = [f"{method} {self._prefix}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        self._writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        await self._within(self._writer.drain())
        words = (await self._line()).split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            raise RequestFailed("the answer is not HTTP/1.1")
        for _ in range(_MAX_HEADERS):
            if not (line := await self._line()):
                return int(words[1])
            name, _, value = line.decode("latin-1").partition(":")
            self._headers[name.strip().lower()] = value.strip()
        raise RequestFailed("the answer has too many headers")

    async def whole(self) -> bytes:
        """The body."""
        return b"".join([piece async for piece in self._pieces()])

    async def events(self) -> AsyncIterator[bytes]:
        """The data of each server-sent event."""
        rest, data = b"", []
        async for piece in self._pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                line = line.removesuffix(b"\r")
                if line.startswith(b"data:"):
                    data.append(line[5:].strip())
                elif not line and data:
                    yield b"\n".join(data)
                    data = []
            if len(rest) > _MAX_LINE_BYTES:
                raise RequestFailed("an event of the answer is too large")
        if data:
            yield b"\n".join(data)

    async def _pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. RequestFailed for one without end."""
        taken_bytes = 0
        async for piece in self._chunks() if self._is_chunked else self._part(self._content_bytes):
            taken_bytes += len(piece)
            if taken_bytes > _MAX_ANSWER_BYTES:
                raise RequestFailed("the answer is too large")
            yield piece

    @property
    def _is_chunked(self) -> bool:
        return self._headers.get("transfer-encoding", "").lower() == "chunked"

    @property
    def _content_bytes(self) -> int | None:
        return int(self._headers["content-length"]) if "content-length" in self._headers else None

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := int((await self._line()).partition(b";")[0], 16):
            async for piece in self._part(size):
                yield piece
            await self._line()

    async def _part(self, size_bytes: int | None) -> AsyncIterator[bytes]:
        """So many bytes of the connection, None for all."""
        left = size_bytes
        while left is None or left > 0:
            piece = await self._within(self._reader.read(_READ_BYTES if left is None else min(left, _READ_BYTES)))
            if not piece:
                if left is not None:
                    raise EOFError
                return
            left = None if left is None else left - len(piece)
            yield piece

    async def _line(self) -> bytes:
        line = await self._within(self._reader.readline())
        if not line.endswith(b"\n"):
            raise EOFError
        return line.rstrip(b"\r\n")

    async def _within(self, awaited: Awaitable[T]) -> T:
        try:
            return await asyncio.wait_for(awaited, self._endpoint.silence_seconds)
        except asyncio.TimeoutError:
            raise RequestFailed(f"nothing came for {self._endpoint.silence_seconds:g} s") from None


def _reason(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "the server closed it"
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(reason)
