"""What an adapter that keeps objects in slots of equal size knows of each of them."""

from __future__ import annotations

from lmcache.core.key import ObjectKey


class SlotObject:
    """Its slot is free again when it is gone and has no readers."""

    __slots__ = ("frame_bytes", "is_gone", "readers", "slot")

    def __init__(self, slot: int, frame_bytes: int) -> None:
        self.slot = slot
        self.frame_bytes = frame_bytes
        self.readers = 0
        self.is_gone = False


def object_name(key: ObjectKey) -> bytes:
    """The digest of its namespace and its chunk hash: what stands in an entry of the directory."""
    return key.namespace.digest + key.chunk_hash
