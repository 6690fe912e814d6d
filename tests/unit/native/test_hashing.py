from __future__ import annotations

import array
from typing import Any

import blake3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache import _native


@given(st.binary(max_size=300), st.integers(min_value=0, max_value=60))
def test_blake3_is_blake3(part: bytes, repeats: int) -> None:
    data = part * repeats
    assert _native.blake3(data) == blake3.blake3(data).digest()


@pytest.mark.parametrize("chunks", [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 64, 100])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_blake3_of_long_inputs(chunks: int, beyond: int) -> None:
    data = bytes(at % 251 for at in range(1024 * chunks + beyond))
    assert _native.blake3(bytearray(data)) == blake3.blake3(data).digest()


@given(
    tokens=st.lists(st.integers(min_value=0, max_value=2**32 - 1), max_size=80),
    chunk_tokens=st.integers(min_value=1, max_value=20),
    parent=st.binary(min_size=32, max_size=32),
)
def test_chunk_hashes_follow_the_formula(tokens: list[int], chunk_tokens: int, parent: bytes) -> None:
    packed = array.array("I", tokens)
    count = len(tokens) // chunk_tokens
    extras = b"".join(bytes([i % 3] * 32) for i in range(count))
    expected = b""
    before = parent
    for i in range(count):
        digest = blake3.blake3(packed[i * chunk_tokens : (i + 1) * chunk_tokens].tobytes()).digest()
        extra = extras[32 * i : 32 * i + 32]
        before = blake3.blake3(before + digest + (extra if any(extra) else b"")).digest()
        expected += before
    assert _native.hash_chunks(packed, chunk_tokens, parent, extras) == expected


def test_what_is_refused() -> None:
    refused: list[tuple[tuple[Any, ...], str]] = [
        ((bytes(15), 4, bytes(32)), "tokens must hold a whole number"),
        ((bytes(16), 0, bytes(32)), "chunk_tokens"),
        ((bytes(16), 4, bytes(31)), "parent must be 32 bytes"),
        ((bytes(16), 4, bytes(32), bytes(31)), "extras"),
        ((bytes(16), 4, bytes(32), bytes(64)), "extras"),
    ]
    for arguments, part in refused:
        with pytest.raises(ValueError, match=part):
            _native.hash_chunks(*arguments)
