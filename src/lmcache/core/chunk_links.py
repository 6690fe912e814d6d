"""Links of the chain of chunk hashes that Python computes (docs/formats/chunk_hash.md). Needs nothing but Python."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable

_BUILTIN_PARTS = (b"\0", b"\1", b"\2", b"\3")
_pack_parts = struct.Struct("<4q").pack

# parent hash, packed tokens of one chunk, extra identity of that chunk or b"" -> hash, 32 bytes
Link = Callable[[bytes, bytes, bytes], bytes]


def sha256_cbor(parent: bytes, tokens: bytes, extra: bytes) -> bytes:
    import cbor2  # only where this algorithm is configured

    numbers = struct.unpack(f"<{len(tokens) // 4}I", tokens)
    return hashlib.sha256(cbor2.dumps((parent, numbers, extra or None))).digest()


def builtin(parent: bytes, tokens: bytes, extra: bytes) -> bytes:
    """Four of the interpreter's 64-bit hashes, told apart by the first byte, because one alone collides too easily.

    Bytes alone are hashed. In tuples one 64-bit hash of the tokens would be part of all four, and what has no hash of
    its own (None before Python 3.12) is hashed by its address, another one in every process."""
    content = parent + extra + tokens
    return _pack_parts(*[hash(part + content) for part in _BUILTIN_PARTS])


LINKS: dict[str, Link] = {"builtin": builtin, "sha256_cbor": sha256_cbor}
