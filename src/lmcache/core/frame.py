"""The frame: 4096 bytes of header in front of a payload, the byte image of an object on every tier.

The format is in docs/formats/frame.md; the native core writes and verifies it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmcache import _native
from lmcache.core.key import MAX_NAMESPACE_BYTES, MAX_SERDE_MARK_BYTES, Namespace, ObjectKey
from lmcache.core.key_batch import pack_keys
from lmcache.core.limits import FRAME_ALIGN_BYTES, FRAME_HEADER_BYTES, MAX_OBJECT_BYTES
from lmcache.core.rounding import round_up
from lmcache.errors import LayoutRefused

# Where docs/formats/frame.md has them.
_PAYLOAD_BYTES, _CHUNK_HASH, _NAMESPACE_DIGEST = slice(16, 24), slice(40, 72), slice(72, 104)


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
    return round_up(FRAME_HEADER_BYTES + payload_bytes, align_bytes)


def header_template(namespace: Namespace, payload_bytes: int, serde: str = "", serde_params: bytes = b"") -> bytes:
    """A header for objects of this namespace, complete but for what differs from object to object.

    LayoutRefused when the namespace or the payload is beyond what a frame can say.
    """
    encoded = namespace.encode()
    largest_bytes = MAX_NAMESPACE_BYTES if serde else MAX_NAMESPACE_BYTES - MAX_SERDE_MARK_BYTES
    if len(encoded) > largest_bytes:
        raise LayoutRefused(
            f"Model name and cache salt make a namespace of {len(encoded)} bytes, more than the {largest_bytes} "
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


def verify_frames(keys: Sequence[ObjectKey], frames: Sequence[memoryview]) -> list[str]:
    """Why each frame is not the whole frame of its key, "" where it is. One native call without the GIL; a frame may be
    shorter than its buffer."""
    return _native.verify_frames(list(frames), *pack_keys(keys))


def holds_whole_frame(buffer: memoryview, size_bytes: int) -> bool:
    """Whether the first `size_bytes` of a buffer have room for what the header in them announces. A frame may be
    shorter or longer than a slot where a server with another --l1-align-bytes wrote it."""
    try:
        header = parse_header(buffer.cast("B")[:FRAME_HEADER_BYTES])
    except ValueError:
        return False
    return size_bytes > FRAME_HEADER_BYTES and FRAME_HEADER_BYTES + header.payload_bytes <= size_bytes


def may_be_frame_of(key: ObjectKey, buffer: memoryview) -> bool:
    """Whether the header names the key and a payload that there is room for. No checksum is compared: for memory that
    is verified later."""
    payload_bytes = int.from_bytes(buffer[_PAYLOAD_BYTES], "little")
    is_named = buffer[_CHUNK_HASH] == key.chunk_hash and buffer[_NAMESPACE_DIGEST] == key.namespace.digest
    return is_named and 0 < payload_bytes <= buffer.nbytes - FRAME_HEADER_BYTES
