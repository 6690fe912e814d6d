"""Chunk hashes: each names a chunk of tokens and all before it. Formulas are in docs/formats/chunk_hash.md."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from lmcache import _native
from lmcache.core import limits
from lmcache.core.chunk_links import LINKS
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.errors import ConfigError

TOKEN_BYTES = 4  # packed as u32
_PARTIAL_MARK = b"lmcache partial chunk 1"
_NO_EXTRA = bytes(CHUNK_HASH_BYTES)

ALGORITHMS = ("blake3", *sorted(LINKS))


class ChunkHasher:
    """Turns runs of tokens into chunk hashes. Thread-safe; keeps nothing between calls."""

    def __init__(self, algorithm: str, chunk_tokens: int) -> None:
        if algorithm not in ALGORITHMS:
            raise ConfigError(f"Hash algorithm {algorithm!r} is unknown: use one of {', '.join(ALGORITHMS)}.")
        if chunk_tokens < 1:
            raise ConfigError(f"A chunk of {chunk_tokens} tokens is not possible: use at least 1.")
        self.algorithm = algorithm
        self.chunk_tokens = chunk_tokens
        self._link = LINKS.get(algorithm)

    def root(self, identity: bytes) -> bytes:
        """The parent of a first chunk. `identity` is what must match for a whole request beside its tokens."""
        name = self.algorithm.encode()
        prefix = b"lmcache chunk chain 1" + bytes([len(name)]) + name + struct.pack("<I", self.chunk_tokens)
        return _native.blake3(prefix + identity)

    def sample(self) -> bytes:
        """The hash of a fixed chunk, 32 bytes: the same wherever chunks are named the same way."""
        return self.extend(self.root(b""), bytes(self.chunk_tokens * TOKEN_BYTES))

    def extend(self, parent: bytes, tokens: bytes | memoryview, extras: Mapping[int, bytes] | None = None) -> bytes:
        """Hashes of every full chunk in `tokens` (packed little-endian u32), 32 bytes each; a short tail is ignored.

        `parent` is the hash of the chunk before, or `root`. `extras` maps the number of a chunk in this call to 32
        bytes of further identity (an image, an adapter); chunks not named have none.
        """
        chunk_bytes = self.chunk_tokens * TOKEN_BYTES
        count = memoryview(tokens).nbytes // chunk_bytes
        packed_extras = bytearray(count * CHUNK_HASH_BYTES) if extras else bytearray()
        for chunk, extra in (extras or {}).items():
            if not 0 <= chunk < count or len(extra) != CHUNK_HASH_BYTES:
                raise ValueError(f"the extra of chunk {chunk} must be 32 bytes for a chunk from 0 to {count - 1}")
            packed_extras[chunk * CHUNK_HASH_BYTES : (chunk + 1) * CHUNK_HASH_BYTES] = extra
        if self._link is None:
            return _native.hash_chunks(tokens, self.chunk_tokens, parent, packed_extras)
        if len(parent) != CHUNK_HASH_BYTES:
            raise ValueError("parent must be 32 bytes")
        hashes = []
        tokens = bytes(tokens)
        for chunk in range(count):
            chunk_tokens = tokens[chunk * chunk_bytes : (chunk + 1) * chunk_bytes]
            extra = bytes(packed_extras[chunk * CHUNK_HASH_BYTES : (chunk + 1) * CHUNK_HASH_BYTES])
            parent = self._link(parent, chunk_tokens, b"" if extra == _NO_EXTRA else extra)
            hashes.append(parent)
        return b"".join(hashes)

    def partial(self, parent: bytes, tokens: bytes | memoryview, extra: bytes = b"") -> bytes:
        """The hash of a partial chunk, 32 bytes: all of `tokens`, at least one and fewer than a chunk has.

        It names these tokens and those before them, and enters no other hash. How many they are is a part of it, so it
        is that of no full chunk, nor of a partial chunk of another length. `parent` and `extra` as in `extend`.
        """
        count, rest = divmod(memoryview(tokens).nbytes, TOKEN_BYTES)
        if rest or not 0 < count < self.chunk_tokens:
            raise ValueError(f"a partial chunk has whole tokens, from 1 to {self.chunk_tokens - 1} of them")
        mark = _native.blake3(_PARTIAL_MARK + struct.pack("<I", count) + (extra or _NO_EXTRA))
        if self._link is None:
            return _native.hash_chunks(tokens, count, parent, mark)
        return self._link(parent, bytes(tokens), mark)

    def partials(self, root: bytes, hashes: bytes, tokens: bytes) -> list[bytes]:
        """The hash of every partial chunk that may be behind the full chunks of `tokens`, whose hashes from `root` on
        are given: of all tokens there, of one fewer, and so on to the first alone. None where they would be more than
        MAX_NAMED_PARTIALS: what they cost grows with the square of their number."""
        rest = tokens[len(hashes) // CHUNK_HASH_BYTES * self.chunk_tokens * TOKEN_BYTES :]
        if len(rest) > limits.MAX_NAMED_PARTIALS * TOKEN_BYTES:
            return []
        parent = hashes[-CHUNK_HASH_BYTES:] or root
        return [self.partial(parent, rest[:end]) for end in range(len(rest), 0, -TOKEN_BYTES)]
