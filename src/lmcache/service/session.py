"""One request: its tokens, hashed once as they grow, and what it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from lmcache.core.chunking import ChunkHasher
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.core.limits import MAX_TOKENS_PER_SESSION
from lmcache.errors import RemoteError
from lmcache.protocol.messages import ErrorCode
from lmcache.protocol.tokens import TOKEN_BYTES
from lmcache.service.keyspace import Keyspace

MAX_IDENTITY_BYTES = 4096
MAX_EXTRAS_PER_SESSION = 16_384


class TokenMessage(Protocol):
    """What Lookup and Append have in common."""

    @property
    def cache_salt(self) -> str: ...
    @property
    def first_token(self) -> int: ...
    @property
    def tokens(self) -> bytes: ...
    @property
    def identity(self) -> bytes: ...
    @property
    def extras(self) -> list[tuple[int, bytes]]: ...


class TokenChain:
    """Invariant: `hashes` has one hash for each full chunk of the tokens seen, `_tail` the tokens behind the last one.

    Tokens of full chunks are not kept.
    """

    def __init__(self, hasher: ChunkHasher, cache_salt: str, identity: bytes) -> None:
        if len(identity) > MAX_IDENTITY_BYTES:
            raise RemoteError(ErrorCode.TOO_LARGE, f"An identity has at most {MAX_IDENTITY_BYTES} bytes.")
        self.cache_salt = cache_salt
        self.identity = identity
        self.hashes = bytearray()
        self._hasher = hasher
        self._root = hasher.root(identity)
        self._tail = b""
        self._extras: dict[int, bytes] = {}

    @property
    def chunks(self) -> int:
        return len(self.hashes) // CHUNK_HASH_BYTES

    @property
    def tokens(self) -> int:
        return self.chunks * self._hasher.chunk_tokens + len(self._tail) // TOKEN_BYTES

    @property
    def size_bytes(self) -> int:
        return len(self.hashes) + len(self._tail) + len(self._extras) * CHUNK_HASH_BYTES

    def continues(self, message: TokenMessage) -> bool:
        """False when the message starts the request anew. RemoteError when it fits neither way."""
        if message.first_token == 0:
            return False
        if (message.cache_salt, message.identity) != (self.cache_salt, self.identity):
            raise RemoteError(
                ErrorCode.BAD_REQUEST, "Cache salt and identity of a session cannot change; send its tokens from 0."
            )
        return True

    def extend(self, first_token: int, tokens: bytes, extras: Iterable[tuple[int, bytes]]) -> int:
        """Adds tokens from position `first_token` on, replacing what was there; the first chunk whose hash is new."""
        if len(tokens) % TOKEN_BYTES:
            raise RemoteError(ErrorCode.BAD_REQUEST, f"{len(tokens)} bytes of tokens are not whole uint32 values.")
        if first_token + len(tokens) // TOKEN_BYTES > MAX_TOKENS_PER_SESSION:
            raise RemoteError(ErrorCode.TOO_LARGE, f"A session has at most {MAX_TOKENS_PER_SESSION} tokens.")
        self._go_back_to(first_token)
        self._add_extras(extras)
        first_chunk = self.chunks
        chunk_bytes = self._hasher.chunk_tokens * TOKEN_BYTES
        unhashed = self._tail + tokens if self._tail else tokens
        new_chunks = len(unhashed) // chunk_bytes
        if new_chunks:
            parent = bytes(self.hashes[-CHUNK_HASH_BYTES:]) or self._root
            relative = {
                chunk - first_chunk: extra
                for chunk, extra in self._extras.items()
                if first_chunk <= chunk < first_chunk + new_chunks
            }
            self.hashes += self._hasher.extend(parent, memoryview(unhashed)[: new_chunks * chunk_bytes], relative)
        self._tail = unhashed[new_chunks * chunk_bytes :]
        return first_chunk

    def _go_back_to(self, first_token: int) -> None:
        tokens, chunk_tokens = self.tokens, self._hasher.chunk_tokens
        if first_token == tokens:
            return
        chunk, into_chunk = divmod(first_token, chunk_tokens)
        if not 0 <= first_token < tokens or (into_chunk and chunk != self.chunks):
            raise RemoteError(
                ErrorCode.UNKNOWN_SESSION,
                f"The session has {tokens} tokens and cannot go on from {first_token}; send its tokens from 0.",
            )
        if chunk < self.chunks:
            del self.hashes[chunk * CHUNK_HASH_BYTES :]
            self._tail = b""
        self._tail = self._tail[: into_chunk * TOKEN_BYTES]
        kept = chunk + 1 if into_chunk else chunk  # what the partial chunk contains may lie in its kept part
        self._extras = {index: extra for index, extra in self._extras.items() if index < kept}

    def _add_extras(self, extras: Iterable[tuple[int, bytes]]) -> None:
        hashed = self.chunks
        for chunk, extra in extras:
            if chunk < 0 or len(extra) != CHUNK_HASH_BYTES:
                raise RemoteError(
                    ErrorCode.BAD_REQUEST, f"The extra of chunk {chunk} must be {CHUNK_HASH_BYTES} bytes."
                )
            if chunk < hashed and self._extras.get(chunk) != extra:
                raise RemoteError(
                    ErrorCode.BAD_REQUEST,
                    f"Chunk {chunk} was hashed without this extra; send the session's tokens from 0.",
                )
            self._extras[chunk] = extra
        if len(self._extras) > MAX_EXTRAS_PER_SESSION:
            raise RemoteError(ErrorCode.TOO_MANY, f"A session has at most {MAX_EXTRAS_PER_SESSION} extras.")


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

    def __init__(self, request_id: str, chain: TokenChain) -> None:
        self.request_id = request_id
        self.chain = chain
        self.lease: Lease | None = None
        self.cancel_lookup: Callable[[], None] | None = None  # while a lookup waits for L2

    @property
    def idle(self) -> bool:
        """Whether nothing but its hashes would be lost with it."""
        return self.lease is None and self.cancel_lookup is None
