"""What a chunk's tokens do not say: the images, audio ... that placeholder tokens stand for. It is hashed with them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec


class ContentSpan(NamedTuple):
    """`length` placeholder tokens from token `offset` on stand for the content that `identifier` names."""

    identifier: str
    offset: int
    length: int


def content_extras(spans: Sequence[ContentSpan], chunk_tokens: int, first_token: int = 0) -> list[tuple[int, bytes]]:
    """(chunk, 32 bytes) for the chunks that hold placeholders: SHA-256 of what they stand for, and where.

    From the chunk on that `first_token` is in: of that one, what lies before the token too.
    """
    touching: dict[int, list[tuple[str, int]]] = {}
    for identifier, first, length in spans:
        first_chunk = max(first, first_token) // chunk_tokens
        for chunk in range(first_chunk, (first + max(length, 1) - 1) // chunk_tokens + 1):
            touching.setdefault(chunk, []).append((identifier, first - chunk * chunk_tokens))
    return [
        (chunk, hashlib.sha256(msgspec.msgpack.encode(sorted(contents, key=lambda content: content[1]))).digest())
        for chunk, contents in sorted(touching.items())
    ]
