"""Messages between a process and its children: a length (LENGTH_BYTES, little-endian), then msgpack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

import msgspec

LENGTH_BYTES = 4


def framed(message: Any) -> bytes:
    """`message`: what msgspec can encode."""
    payload = msgspec.msgpack.encode(message)
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


def read_payloads(stream: IO[bytes]) -> Iterator[bytes]:
    """What stands behind each length. Until the stream ends, also in the middle of a message."""
    while True:
        length = stream.read(LENGTH_BYTES)
        payload = stream.read(int.from_bytes(length, "little"))
        if len(length) < LENGTH_BYTES or len(payload) < int.from_bytes(length, "little"):
            return
        yield payload
