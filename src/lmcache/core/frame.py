"""The frame: 4096 bytes of header in front of a payload, the byte image of an object on every tier.

The format is in docs/formats/frame.md; the native core writes and verifies it.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmcache import _native
from lmcache.core.key import MAX_NAMESPACE_BYTES, Namespace
from lmcache.core.limits import FRAME_ALIGN_BYTES, FRAME_HEADER_BYTES, MAX_OBJECT_BYTES
from lmcache.errors import LayoutRefused


@dataclass(frozen=True)
class FrameHeader:
    """The fields of a header whose own checksum holds. `serde` is "" for a raw payload."""

    version: int
    payload_bytes: int
    namespace: bytes  # Namespace.encode()
    namespace_digest: bytes  # 32
    chunk_hash: bytes  # 32
    serde: str
    serde_params: bytes
    payload_checksum: bytes  # 16


def frame_bytes(payload_bytes: int, align_bytes: int = FRAME_ALIGN_BYTES) -> int:
    """Bytes of a whole frame: header and payload, rounded up to `align_bytes`."""
    return -(-(FRAME_HEADER_BYTES + payload_bytes) // align_bytes) * align_bytes


def header_template(namespace: Namespace, payload_bytes: int, serde: str = "", serde_params: bytes = b"") -> bytes:
    """A header for objects of this namespace, complete but for what differs from object to object.

    LayoutRefused when the namespace or the payload is beyond what a frame can say.
    """
    encoded = namespace.encode()
    if len(encoded) > MAX_NAMESPACE_BYTES:
        raise LayoutRefused(
            f"Model name and cache salt make a namespace of {len(encoded)} bytes, more than the {MAX_NAMESPACE_BYTES} "
            "of a frame header: use a shorter served model name."
        )
    if not 0 < payload_bytes <= MAX_OBJECT_BYTES:
        raise LayoutRefused(
            f"An object of this layout has {payload_bytes} bytes, outside 1 to {MAX_OBJECT_BYTES}: "
            "use a smaller chunk size."
        )
    return _native.frame_template(encoded, namespace.digest, payload_bytes, serde, serde_params)


def parse_header(header: bytes | bytearray | memoryview) -> FrameHeader:
    """Reads a header; ValueError says what is wrong with it. Says nothing about the payload."""
    return FrameHeader(**_native.frame_parse(header))  # type: ignore[arg-type]


def holds_whole_frame(buffer: memoryview, size_bytes: int) -> bool:
    """Whether the first `size_bytes` of a buffer have room for what the header in them announces. A frame may be
    shorter or longer than a slot where a server with another --l1-align-bytes wrote it."""
    try:
        header = parse_header(buffer.cast("B")[:FRAME_HEADER_BYTES])
    except ValueError:
        return False
    return size_bytes > FRAME_HEADER_BYTES and FRAME_HEADER_BYTES + header.payload_bytes <= size_bytes
