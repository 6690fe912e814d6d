"""Chunk hashes: each names a chunk of tokens and all before it. Formulas are in docs/formats/chunk_hash.md."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping

from lmcache import _native
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.errors import ConfigError

_TOKEN_BYTES = 4
_NO_EXTRA = bytes(CHUNK_HASH_BYTES)

# parent hash, tokens of one chunk, extra identity of that chunk or None -> hash, 32 bytes
_Link = Callable[[bytes, tuple[int, ...], "bytes | None"], bytes]


def _sha256_cbor_link(parent: bytes, tokens: tuple[int, ...], extra: bytes | None) -> bytes:
    import cbor2  # only where this algorithm is configured

    return hashlib.sha256(cbor2.dumps((parent, tokens, extra))).digest()


def _builtin_link(parent: bytes, tokens: tuple[int, ...], extra: bytes | None) -> bytes:
    """Four of the interpreter's 64-bit hashes, told apart by a number, because one alone collides too easily."""
    return struct.pack("<4q", *(hash((part, parent, tokens, extra)) for part in range(4)))


_LINKS: dict[str, _Link] = {"builtin": _builtin_link, "sha256_cbor": _sha256_cbor_link}
ALGORITHMS = ("blake3", *sorted(_LINKS))


class ChunkHasher:
    """Turns runs of tokens into chunk hashes. Thread-safe; keeps nothing between calls."""

    def __init__(self, algorithm: str, chunk_tokens: int) -> None:
        if algorithm not in ALGORITHMS:
            raise ConfigError(f"Hash algorithm {algorithm!r} is unknown: use one of {', '.join(ALGORITHMS)}.")
        if chunk_tokens < 1:
            raise ConfigError(f"A chunk of {chunk_tokens} tokens is not possible: use at least 1.")
        self.algorithm = algorithm
        self.chunk_tokens = chunk_tokens
        self._link = _LINKS.get(algorithm)

    def root(self, identity: bytes) -> bytes:
        """The parent of a first chunk. `identity` is what must match for a whole request beside its tokens."""
        name = self.algorithm.encode()
        prefix = b"lmcache chunk chain 1" + bytes([len(name)]) + name + struct.pack("<I", self.chunk_tokens)
        return _native.blake3(prefix + identity)

    def sample(self) -> bytes:
        """The hash of a fixed chunk, 32 bytes: the same wherever chunks are named the same way."""
        return self.extend(self.root(b""), bytes(self.chunk_tokens * _TOKEN_BYTES))

    def extend(self, parent: bytes, tokens: bytes | memoryview, extras: Mapping[int, bytes] | None = None) -> bytes:
        """Hashes of every full chunk in `tokens` (packed little-endian u32), 32 bytes each; a short tail is ignored.

        `parent` is the hash of the chunk before, or `root`. `extras` maps the number of a chunk in this call to 32
        bytes of further identity (an image, an adapter); chunks not named have none.
        """
        chunk_bytes = self.chunk_tokens * _TOKEN_BYTES
        count = memoryview(tokens).nbytes // chunk_bytes
        by_chunk = {chunk: extra for chunk, extra in (extras or {}).items() if extra != _NO_EXTRA}
        for chunk, extra in by_chunk.items():
            if not 0 <= chunk < count or len(extra) != CHUNK_HASH_BYTES:
                raise ValueError(f"the extra of chunk {chunk} must be 32 bytes for a chunk from 0 to {count - 1}")
        if self._link is None:
            packed = b"".join(by_chunk.get(chunk, _NO_EXTRA) for chunk in range(count)) if by_chunk else b""
            return _native.hash_chunks(tokens, self.chunk_tokens, parent, packed)
        if len(parent) != CHUNK_HASH_BYTES:
            raise ValueError("parent must be 32 bytes")
        hashes = []
        raw = memoryview(tokens).cast("B")
        for chunk in range(count):
            chunk_tokens = struct.unpack_from(f"<{self.chunk_tokens}I", raw, chunk * chunk_bytes)
            parent = self._link(parent, chunk_tokens, by_chunk.get(chunk))
            hashes.append(parent)
        return b"".join(hashes)
