"""One request: its tokens and what it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lmcache.core import limits
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.service.keyspace import Keyspace
from lmcache.service.token_chain import TokenChain


class Lease(NamedTuple):
    """What one lookup leased, as one: its prefix in L1 and what was loaded behind it."""

    number: int  # the engine's name for it: that of its first part
    parts: tuple[int, ...]  # numbers in the native core
    keyspace: Keyspace
    hashes: bytes  # of the leased chunks
    offsets: bytes  # u64 [namespace][chunk]

    @property
    def chunks(self) -> int:
        return len(self.hashes) // CHUNK_HASH_BYTES


class Session:
    """A request of one instance, from its first tokens to EndSession."""

    __slots__ = ("cancel_lookup", "chain", "counted_bytes", "held_bytes", "lease", "request_id")

    def __init__(self, request_id: str, chain: TokenChain) -> None:
        self.request_id = request_id
        self.chain = chain
        self.lease: Lease | None = None
        self.cancel_lookup: Callable[[], None] | None = None  # while a lookup waits for L2
        self.held_bytes = 0  # that the lookup or the lease takes beyond the chain, at most
        self.counted_bytes = 0  # that `Sessions` has counted for it

    @property
    def size_bytes(self) -> int:
        return session_bytes(self.request_id, self.chain.size_bytes, self.held_bytes)

    @property
    def idle(self) -> bool:
        """Whether nothing but its hashes would be lost with it."""
        return self.lease is None and self.cancel_lookup is None


def session_bytes(request_id: str, chain_bytes: int, held_bytes: int) -> int:
    return limits.SESSION_BASE_BYTES + len(request_id.encode()) + chain_bytes + held_bytes
