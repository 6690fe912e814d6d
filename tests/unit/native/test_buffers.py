"""Packed buffers as arguments: what is taken, what is refused, and that nothing is kept."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from mmap import mmap

import pytest

from lmcache import _native

TOKENS = array("I", range(8))
HASHES = _native.hash_chunks(TOKENS, 4, bytes(32))


def shifted(content: bytes, by: int) -> memoryview:
    """The same bytes, `by` bytes behind an aligned address."""
    return memoryview(bytearray(by) + bytearray(content))[by:]


@pytest.mark.parametrize("by", [0, 1, 2, 3])
def test_a_slice_need_not_be_aligned_to_its_elements(by: int) -> None:
    assert _native.hash_chunks(shifted(TOKENS.tobytes(), by), 4, bytes(32)) == HASHES
    times = array("q", [5, 1 << 40, -7])
    assert memoryview(_native.youngest_first(shifted(times.tobytes(), by))).cast("I").tolist() == [1, 0, 2]


def test_whatever_is_contiguous_is_a_buffer() -> None:
    content = TOKENS.tobytes()
    mapped = mmap(-1, 4096)
    mapped[:32] = content
    for tokens in (TOKENS, content, bytearray(content), memoryview(TOKENS), memoryview(mapped)[:32]):
        assert _native.hash_chunks(tokens, 4, bytes(32)) == HASHES


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: _native.blake3("text"), "data must be a contiguous bytes-like object"),  # type: ignore[arg-type]
        (lambda: _native.blake3(memoryview(bytes(8))[::2]), "data must be a contiguous bytes-like object"),
        (lambda: _native.cbor_numbers(bytes(7)), "numbers must hold a whole number of 4-byte elements"),
        (
            lambda: _native.frame_read_part(0, 0, 0, bytes(8), bytes(32), bytes(32)),
            "part must be a writable contiguous",
        ),
        (lambda: _native.frame_read_part(0, 0, 0, bytearray(8), bytes(31), bytes(32)), "namespace_digest must be 32"),
        (lambda: _native.make_dax_entries(bytes(15), b"", b"", b"", 0), "device must be 16 bytes"),
        (lambda: _native.verify_frames([memoryview(bytes(8))[::2]], bytes(32), bytes(32)), "a buffer must be a contig"),
    ],
)
def test_a_wrong_buffer_is_named(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()


def test_no_buffer_is_held_after_a_call() -> None:
    tokens, parent = bytearray(TOKENS.tobytes()), bytearray(32)
    _native.hash_chunks(tokens, 4, parent)
    with pytest.raises(ValueError, match="extras"):
        _native.hash_chunks(tokens, 4, parent, "text")  # type: ignore[arg-type]
    tokens.append(0)  # BufferError if somebody held it
    parent.append(0)
