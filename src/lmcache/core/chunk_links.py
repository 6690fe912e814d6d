"""Chunk hash algorithms that are computed in Python, a chunk at a time (docs/formats/chunk_hash.md)."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable

_BUILTIN_PARTS = (b"\0", b"\1", b"\2", b"\3")
_CBOR_BYTES, _CBOR_ARRAY = 0x40, 0x80  # kinds, to which the count is added
_CBOR_TRIPLE, _CBOR_NULL = b"\x83", b"\xf6"
_pack_parts = struct.Struct("<4q").pack

# parent hash, packed tokens of one chunk, extra identity of that chunk or b"" -> hash, 32 bytes
Link = Callable[[bytes, bytes, bytes], bytes]


def sha256_cbor(parent: bytes, tokens: bytes, extra: bytes) -> bytes:
    """CBOR of (parent, numbers, extra or null)."""
    from lmcache._native import cbor_numbers  # here, so that nothing but Python is needed for the other one

    numbers = _cbor_head(_CBOR_ARRAY, len(tokens) // 4) + cbor_numbers(tokens)
    content = _cbor_bytes(extra) if extra else _CBOR_NULL
    return hashlib.sha256(_CBOR_TRIPLE + _cbor_bytes(parent) + numbers + content).digest()


def _cbor_bytes(content: bytes) -> bytes:
    return _cbor_head(_CBOR_BYTES, len(content)) + content


def _cbor_head(kind: int, count: int) -> bytes:
    if count < 24:
        return bytes([kind + count])
    size_bytes = 1 if count < 1 << 8 else 2 if count < 1 << 16 else 4
    return bytes([kind + 24 + size_bytes.bit_length() - 1]) + count.to_bytes(size_bytes, "big")


def builtin(parent: bytes, tokens: bytes, extra: bytes) -> bytes:
    """Four of the interpreter's 64-bit hashes, distinguished by the first byte, because one alone collides too easily.

    Bytes alone are hashed. In tuples one 64-bit hash of the tokens would be part of all four, and what has no hash of
    its own (None before Python 3.12) is hashed by its address, another one in every process."""
    content = parent + extra + tokens
    return _pack_parts(*[hash(part + content) for part in _BUILTIN_PARTS])


LINKS: dict[str, Link] = {"builtin": builtin, "sha256_cbor": sha256_cbor}
