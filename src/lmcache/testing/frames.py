"""Memory with whole frames in it, as L1 has them."""

from __future__ import annotations

import hashlib
import mmap
import random
from collections.abc import Sequence

from lmcache import _native
from lmcache.core.frame import frame_bytes, header_template, verify_frames
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.key_batch import ChunkHashes, KeyBatch, NamespaceSet
from lmcache.core.limits import FRAME_HEADER_BYTES

PAYLOAD_BYTES = 12_288


def namespace(name: str = "model", rank: int = 0, salt: str = "") -> Namespace:
    return Namespace(name, 2, rank, 0, hashlib.sha256(name.encode()).hexdigest()[:32], salt)


def keys(count: int, seed: int = 0, of: Namespace | None = None) -> list[ObjectKey]:
    of = of or namespace()
    return [ObjectKey(of, hashlib.sha256(f"{seed}/{index}".encode()).digest()) for index in range(count)]


def batch_of(keys: Sequence[ObjectKey], frame_bytes: int) -> KeyBatch:
    """Keys of one namespace as a batch."""
    hashes = ChunkHashes(b"".join(key.chunk_hash for key in keys))
    return KeyBatch(NamespaceSet((keys[0].namespace,), (frame_bytes,)), hashes)


class FrameMemory:
    """Slots of equal size in page-aligned memory."""

    def __init__(
        self,
        slots: int,
        payload_bytes: int = PAYLOAD_BYTES,
        align_bytes: int = 4096,
        within: memoryview | None = None,
    ) -> None:
        """In `within`, if it is given, else in memory of its own."""
        self.payload_bytes = payload_bytes
        self.slot_bytes = frame_bytes(payload_bytes, align_bytes)
        view = memoryview(mmap.mmap(-1, max(1, slots) * self.slot_bytes)) if within is None else within
        self.buffers = [view[i * self.slot_bytes : (i + 1) * self.slot_bytes] for i in range(slots)]

    def address(self, slot: int) -> int:
        return _native.buffer_address(self.buffers[slot])

    @staticmethod
    def of(frame: bytes) -> memoryview:
        """A copy of a whole frame in page-aligned memory."""
        memory = mmap.mmap(-1, len(frame))
        memory[:] = frame
        return memoryview(memory)

    def fill(self, slot: int, key: ObjectKey, payload: bytes | None = None) -> memoryview:
        """Writes the frame of a key, whose payload depends on the key alone unless it is given."""
        buffer = self.buffers[slot]
        payload = self.payload_of(key) if payload is None else payload
        buffer[FRAME_HEADER_BYTES : FRAME_HEADER_BYTES + self.payload_bytes] = payload
        template = header_template(key.namespace, self.payload_bytes)
        _native.frame_seal(self.address(slot), template, key.chunk_hash)
        return buffer

    def payload_of(self, key: ObjectKey) -> bytes:
        return random.Random(key.namespace.digest + key.chunk_hash).randbytes(self.payload_bytes)

    def holds(self, slot: int, key: ObjectKey) -> bool:
        """Whether the slot has exactly what `fill` writes for that key."""
        payload = self.buffers[slot][FRAME_HEADER_BYTES : FRAME_HEADER_BYTES + self.payload_bytes]
        return self.verify(slot, key) == "" and payload == self.payload_of(key)

    def verify(self, slot: int, key: ObjectKey) -> str:
        return verify_frames([key], [self.buffers[slot]])[0]
