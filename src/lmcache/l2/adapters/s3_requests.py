"""HTTP requests to a bucket: where their bodies come from and go to.

Callbacks of awscrt run on its threads. Invariant: lent memory is touched while the request's gate is held, and never
after `close`, however many callbacks still come.
"""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from lmcache import _native
from lmcache.errors import AdapterError
from lmcache.l2.adapters.s3_xml import error_code

Headers: TypeAlias = Sequence[tuple[str, str]]

# A page of 1,000 names of 1,024 bytes each, escaped. awscrt hands such an answer over when it has all of it: one
# without end takes memory until the request's deadline.
MAX_ANSWER_BYTES = 8 << 20

_RANGE = re.compile(r"bytes 0-\d+/(\d{1,18})")
_RETRYABLE = frozenset((408, 409, 429, 500, 502, 503, 504))
_THROTTLED = frozenset((429, 503))
# What awscrt recognises in an answer and tells by a name of its own.
_OF_AWSCRT = {
    "AWS_ERROR_S3_SLOW_DOWN": (503, "SlowDown"),
    "AWS_ERROR_S3_INTERNAL_ERROR": (500, "InternalError"),
    "AWS_ERROR_S3_REQUEST_TIME_TOO_SKEWED": (403, "RequestTimeTooSkewed"),
}


class TooLongError(AdapterError):
    """An answer is longer than the memory for it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a request failed. `status` is 0 where no answer came; `code` is S3's word for it, else awscrt's."""

    status: int
    code: str
    headers: Headers = ()
    too_long: bool = False

    @property
    def retryable(self) -> bool:
        return not self.too_long and (not self.status or self.status in _RETRYABLE)

    @property
    def throttled(self) -> bool:
        return self.status in _THROTTLED

    def header(self, name: str) -> str:
        return _header(self.headers, name)

    def __str__(self) -> str:
        return f"{self.code} ({self.status})" if self.status else self.code


class Body(Protocol):
    """What awscrt reads of a request's body."""

    def readinto(self, memory: memoryview) -> int: ...

    def read(self, size_bytes: int = -1) -> bytes: ...

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int: ...


class Request:
    """One operation, with a small body in either direction. When it has ended it has a `fault` or an answer."""

    kind = 0  # as in awscrt.s3.S3RequestType: no ranges, no parts

    def __init__(self, operation: str, method: str, path: str, headers: Headers = (), body: bytes = b"") -> None:
        """`operation`: its name in the S3 API. `path`: with the query, escaped."""
        self.operation = operation
        self.method = method
        self.path = path
        self.headers = headers
        self.body_bytes = len(body)
        self.fault: Fault | None = None
        self._sent = body
        self._received = bytearray()
        self._answer_headers: Headers = ()

    def body(self) -> Body | None:
        return io.BytesIO(self._sent) if self._sent else None

    @property
    def answer(self) -> bytes:
        return bytes(self._received)

    def header(self, name: str) -> str:
        """A header of the answer, by its name in lower case; "" where there is none."""
        return _header(self._answer_headers, name)

    # ---- callbacks ---------------------------------------------------------------------------------------------------
    def on_headers(self, status_code: int, headers: Headers, **_: Any) -> None:
        self._answer_headers = headers

    def on_body(self, chunk: bytes, offset: int, **_: Any) -> None:
        """An exception ends the request and becomes its error."""
        if offset != len(self._received) or offset + len(chunk) > MAX_ANSWER_BYTES:
            raise TooLongError(f"{self.operation}: the answer is longer than {MAX_ANSWER_BYTES} bytes")
        self._received += chunk

    def ended(self, error: BaseException | None, status: int, headers: Headers, body: bytes) -> None:
        """Nothing more is called afterwards."""
        self.close()
        if error is not None:
            name = getattr(error, "name", type(error).__name__)
            known_status, code = _OF_AWSCRT.get(name, (0, error_code(body) or name))
            self.fault = Fault(status or known_status, code, headers, isinstance(error, TooLongError))

    def close(self) -> None:
        """Takes back what was lent. Idempotent, on any thread."""


class Download(Request):
    """Fills a buffer from the beginning of an object. What does not fit is not written."""

    kind = 1

    def __init__(self, path: str, buffer: memoryview) -> None:
        super().__init__("GetObject", "GET", path, [("Range", f"bytes=0-{buffer.nbytes - 1}")])
        self.received_bytes = 0
        self._capacity_bytes = buffer.nbytes
        self._address = _native.buffer_address(buffer)
        self._buffer: memoryview | None = buffer  # its memory stays while this does
        self._gate = threading.Lock()

    @property
    def object_bytes(self) -> int:
        """Size of the whole object as the server tells; what was received where it does not."""
        match = _RANGE.fullmatch(self.header("content-range"))
        return int(match[1]) if match else self.received_bytes

    def on_body(self, chunk: bytes, offset: int, **_: Any) -> None:
        with self._gate:
            if self._buffer is None:
                raise AdapterError("nobody waits for the answer any more")
            if offset != self.received_bytes:
                raise AdapterError("awscrt gave the parts of an object in another order")
            if offset + len(chunk) > self._capacity_bytes:
                raise TooLongError(f"the server sent more than the {self._capacity_bytes} bytes that were asked for")
            _native.copy_plain(self._address + offset, _native.buffer_address(chunk), len(chunk))
            self.received_bytes += len(chunk)

    def close(self) -> None:
        with self._gate:
            self._buffer = None


class Upload(Request):
    """Stores a buffer as a new object, in parts where it is large."""

    kind = 2

    def __init__(self, path: str, buffer: memoryview, headers: Headers) -> None:
        super().__init__("PutObject", "PUT", path, headers)
        self.body_bytes = buffer.nbytes
        self._reader = BufferReader(buffer)

    def body(self) -> Body:
        return self._reader

    def close(self) -> None:
        self._reader.close()


class BufferReader:
    """Copies memory without the GIL. After `close` it has no more bytes, so that what is sent is too short and
    refused."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer: memoryview | None = buffer
        self._address = _native.buffer_address(buffer)
        self._size_bytes = buffer.nbytes
        self._position = 0
        self._gate = threading.Lock()

    def readinto(self, memory: memoryview) -> int:
        with self._gate:
            if self._buffer is None:
                return 0
            count = min(memory.nbytes, self._size_bytes - self._position)
            if count:
                _native.copy_plain(_native.buffer_address(memory), self._address + self._position, count)
            self._position += count
            return count

    def read(self, size_bytes: int = -1) -> bytes:
        with self._gate:
            if self._buffer is None:
                return b""
            end = self._size_bytes if size_bytes < 0 else min(self._size_bytes, self._position + size_bytes)
            found = bytes(self._buffer[self._position : end])
            self._position = end
            return found

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        self._position = min(max(0, base + offset), self._size_bytes)
        return self._position

    def close(self) -> None:
        with self._gate:
            self._buffer = None


def _header(headers: Headers, name: str) -> str:
    return next((value for key, value in headers if key.lower() == name), "")
