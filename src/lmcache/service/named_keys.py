"""The objects that a lookup or a probe names by hashes of the engine's own, in place of a request's tokens."""

from __future__ import annotations

from lmcache.core import limits
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.errors import RemoteError
from lmcache.protocol.messages import ErrorCode
from lmcache.service.extras import Extras
from lmcache.service.token_chain import Growth


def count_hashes(hashes: bytes) -> int:
    """How many there are. RemoteError unless they are whole, some, and not too many."""
    chunks, rest = divmod(len(hashes), CHUNK_HASH_BYTES)
    if rest or not chunks:
        raise RemoteError(ErrorCode.BAD_REQUEST, f"{len(hashes)} bytes are not hashes of 32 bytes each.")
    if chunks > limits.MAX_CHUNKS_PER_CALL:
        raise RemoteError(ErrorCode.TOO_LARGE, f"A call covers at most {limits.MAX_CHUNKS_PER_CALL} chunks.")
    return chunks


class NamedKeys:
    """Stands in a session where a `TokenChain` does for tokens; it never grows."""

    __slots__ = ("cache_salt", "growth", "hashes")

    def __init__(self, cache_salt: str, hashes: bytes) -> None:
        """RemoteError as `count_hashes`."""
        self.cache_salt = cache_salt
        self.hashes = hashes
        self.growth = Growth(0, count_hashes(hashes), 0, b"", Extras(), len(hashes))

    @property
    def chunks(self) -> int:
        return self.growth.chunks

    @property
    def size_bytes(self) -> int:
        return self.growth.size_bytes

    def grow(self, growth: Growth) -> None:
        assert growth is self.growth
