"""A serde written in Python, for tests."""

from __future__ import annotations

import threading

from lmcache.core.key import ObjectKey


class Scrambled:
    """Every byte turned over, the chunk's hash in front."""

    fails = False
    gate: threading.Event | None = None

    def __init__(self, name: str = "scrambled", lossy: bool = False, more_bytes: int = 32) -> None:
        self.name = name
        self.lossy = lossy
        self._more_bytes = more_bytes

    def max_encoded_bytes(self, source_bytes: int) -> int:
        return source_bytes + self._more_bytes

    def encode(self, source: memoryview, destination: memoryview, key: ObjectKey) -> int:
        if self.fails:
            raise RuntimeError("out of order")
        if self.gate is not None:
            assert self.gate.wait(60)
        destination[:32] = key.chunk_hash
        destination[32 : 32 + source.nbytes] = bytes(source).translate(_TURNED)
        return 32 + source.nbytes

    def decode(self, source: memoryview, destination: memoryview, key: ObjectKey) -> None:
        if self.fails:
            raise RuntimeError("out of order")
        if source[:32] != key.chunk_hash or source.nbytes != 32 + destination.nbytes:
            raise ValueError("not of this key")
        destination[:] = bytes(source[32:]).translate(_TURNED)


class Greedy(Scrambled):
    """Keeps a part of what it gets."""

    def __init__(self) -> None:
        super().__init__("greedy")
        self.parts: list[memoryview] = []

    def encode(self, source: memoryview, destination: memoryview, key: ObjectKey) -> int:
        self.parts.append(source[8:16])
        return super().encode(source, destination, key)


class Rounded:
    """The upper half of every 16 bits, so that what comes back is not what was stored."""

    name = "rounded"
    lossy = True

    def __init__(self, fill: int = 0) -> None:
        self._fill = fill

    def max_encoded_bytes(self, source_bytes: int) -> int:
        return source_bytes // 2

    def encode(self, source: memoryview, destination: memoryview, key: ObjectKey) -> int:
        destination[: source.nbytes // 2] = bytes(source)[1::2]
        return source.nbytes // 2

    def decode(self, source: memoryview, destination: memoryview, key: ObjectKey) -> None:
        rounded = bytearray([self._fill]) * destination.nbytes
        rounded[1::2] = source
        destination[:] = rounded


_TURNED = bytes(255 - value for value in range(256))
