"""Names of partial chunks, by the formula of docs/formats/chunk_hash.md and another implementation of its parts."""

from __future__ import annotations

import hashlib
import struct
from itertools import product

import blake3
import cbor2
import pytest

from lmcache.core.chunking import ALGORITHMS, ChunkHasher

PARENT = bytes(range(32))
IMAGE = b"i" * 32


def pack(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def mark(count: int, extra: bytes) -> bytes:
    name = b"lmcache partial chunk 1" + struct.pack("<I", count) + (extra or bytes(32))
    return bytes(blake3.blake3(name).digest())


@pytest.mark.parametrize("extra", [b"", IMAGE])
@pytest.mark.parametrize("count", [1, 16, 255])
def test_the_formula(count: int, extra: bytes) -> None:
    tokens = list(range(7, 7 + count))
    by_blake3 = blake3.blake3(PARENT + blake3.blake3(pack(tokens)).digest() + mark(count, extra)).digest()
    assert ChunkHasher("blake3", 256).partial(PARENT, pack(tokens), extra) == by_blake3
    by_sha256 = hashlib.sha256(cbor2.dumps((PARENT, tokens, mark(count, extra)))).digest()
    assert ChunkHasher("sha256_cbor", 256).partial(PARENT, pack(tokens), extra) == by_sha256


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_two_things_have_one_name(algorithm: str) -> None:
    """Full chunks of all sizes, partial ones of all lengths, with and without content, behind two parents: also where
    the content of a full one is the mark of a partial one."""
    tokens, names = pack(list(range(12))), []
    for parent, extra in product((PARENT, bytes(32)), (b"", IMAGE)):
        partial = ChunkHasher(algorithm, 12)
        names += [partial.partial(parent, tokens[: 4 * count], extra) for count in range(1, 12)]
        for count in range(1, 13):
            full = ChunkHasher(algorithm, count)
            names.append(full.extend(parent, tokens[: 4 * count], {0: extra} if extra else {}))
            if count > 1:  # a content that is chosen to be the mark of one token less
                names.append(full.extend(parent, tokens[: 4 * count], {0: mark(count - 1, extra)}))
    assert {len(name) for name in names} == {32}
    assert len(set(names)) == len(names)


def test_golden_names() -> None:
    """Stored objects are found by these."""
    root = ChunkHasher("blake3", 256).root(b"golden")
    tokens = pack(list(range(48)))
    named = [
        ChunkHasher(algorithm, 256).partial(root, tokens, b"e" * 32).hex() for algorithm in ("blake3", "sha256_cbor")
    ]
    assert named == [
        "b70d41c4657c67ca7fa654d4be3cf17e893b74b5fca8d6164b53a81736045b93",
        "a2c1be55583a6ce005dfacfb977c9cd7c31f501ac7934bf2e4b44edb2ac11842",
    ]


@pytest.mark.parametrize("size_bytes", [0, 3, 6, 16, 20])
def test_what_is_no_part_of_a_chunk_is_refused(size_bytes: int) -> None:
    for algorithm in ALGORITHMS:
        with pytest.raises(ValueError, match="from 1 to 3"):
            ChunkHasher(algorithm, 4).partial(PARENT, bytes(size_bytes))
