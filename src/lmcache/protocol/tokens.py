"""Token ids as the wire carries them: packed little-endian uint32."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

from lmcache.core.chunking import TOKEN_BYTES

_TYPE_CODE = next(code for code in "IL" if array(code).itemsize == TOKEN_BYTES)


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Packs token ids. OverflowError or TypeError for what is not an integer in [0, 2**32)."""
    tokens = array(_TYPE_CODE, tokens)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def beginning_identity(first_tokens: bytes) -> tuple[str, bytes]:
    """What the identity of a request ends with whose engine registered `lookahead_tokens`: its first tokens, packed.
    The tokens that are hashed begin behind them."""
    return "beginning", first_tokens
