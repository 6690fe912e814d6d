"""The tokens of one request; each full chunk is hashed once."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from lmcache.core import limits
from lmcache.core.chunking import TOKEN_BYTES, ChunkHasher
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.errors import RemoteError
from lmcache.protocol.messages import ErrorCode
from lmcache.service.extras import Extras

_NO_EXTRAS = Extras()


class TokenMessage(Protocol):
    """The fields that Lookup and Append share."""

    @property
    def request_id(self) -> str: ...
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
    @property
    def partial_tokens(self) -> int: ...


class PromptNotes(Protocol):
    """Is told of chunks when their tokens come; takes no time."""

    def note(self, parent: bytes, hashes: bytes, tokens: bytes) -> object: ...


class Growth(NamedTuple):
    """A planned state of a chain. Valid until the chain changes."""

    first_chunk: int  # the chunks before it are kept
    new_chunks: int
    token_count: int  # of the whole chain
    tokens: bytes  # u32, those behind the kept chunks
    extras: Extras
    size_bytes: int  # of the whole chain

    @property
    def chunks(self) -> int:
        return self.first_chunk + self.new_chunks


class TokenChain:
    """Invariant: `hashes` has one hash for each full chunk of the tokens seen, `_partial_chunk` the tokens behind them.

    Tokens of full chunks are not kept. `plan` checks a message and changes nothing; `grow` applies the plan."""

    __slots__ = ("_extras", "_hasher", "_partial_chunk", "_root", "cache_salt", "hashes", "identity")

    def __init__(self, hasher: ChunkHasher, cache_salt: str, identity: bytes) -> None:
        if len(identity) > limits.MAX_IDENTITY_BYTES:
            raise RemoteError(ErrorCode.TOO_LARGE, f"An identity has at most {limits.MAX_IDENTITY_BYTES} bytes.")
        self.cache_salt = cache_salt
        self.identity = identity
        self.hashes = b""
        self._hasher = hasher
        self._root = hasher.root(identity)
        self._partial_chunk = b""
        self._extras = _NO_EXTRAS

    @property
    def chunks(self) -> int:
        return len(self.hashes) // CHUNK_HASH_BYTES

    @property
    def token_count(self) -> int:
        return self.chunks * self._hasher.chunk_tokens + len(self._partial_chunk) // TOKEN_BYTES

    @property
    def size_bytes(self) -> int:
        return self._size_bytes(self.chunks, len(self._partial_chunk), self._extras)

    def continues(self, message: TokenMessage) -> bool:
        """False when the message begins the request anew. RemoteError when it does neither."""
        if message.first_token == 0:
            return False
        if (message.cache_salt, message.identity) != (self.cache_salt, self.identity):
            raise RemoteError(
                ErrorCode.BAD_REQUEST, "Cache salt and identity of a session cannot change; send its tokens from 0."
            )
        return True

    def plan(self, first_token: int, tokens: bytes, extras: list[tuple[int, bytes]], partial_tokens: int = 0) -> Growth:
        """The chain with these tokens from position `first_token` on. RemoteError when they do not fit, or when there
        are not `partial_tokens` tokens behind its last full chunk."""
        if len(tokens) % TOKEN_BYTES:
            raise RemoteError(ErrorCode.BAD_REQUEST, f"{len(tokens)} bytes of tokens are not whole uint32 values.")
        token_count = first_token + len(tokens) // TOKEN_BYTES
        if token_count > limits.MAX_TOKENS_PER_SESSION:
            raise RemoteError(ErrorCode.TOO_LARGE, f"A session has at most {limits.MAX_TOKENS_PER_SESSION} tokens.")
        first_chunk, partial_chunk, extra_chunks = self._kept(first_token)
        tokens = partial_chunk + tokens if partial_chunk else tokens
        new_chunks, partial_bytes = divmod(len(tokens), self._hasher.chunk_tokens * TOKEN_BYTES)
        rest_tokens = partial_bytes // TOKEN_BYTES
        if not 0 <= partial_tokens <= rest_tokens:
            raise RemoteError(
                ErrorCode.BAD_REQUEST,
                f"A partial chunk cannot have {partial_tokens} tokens: {rest_tokens} follow the last full chunk.",
            )
        all_extras = self._with_extras(first_chunk, extra_chunks, extras)
        size_bytes = self._size_bytes(first_chunk + new_chunks, partial_bytes, all_extras)
        return Growth(first_chunk, new_chunks, token_count, tokens, all_extras, size_bytes)

    def grow(self, growth: Growth) -> None:
        hashes = self.hashes[: growth.first_chunk * CHUNK_HASH_BYTES]
        hashed_bytes = growth.new_chunks * self._hasher.chunk_tokens * TOKEN_BYTES
        if growth.new_chunks:
            extras = growth.extras.between(growth.first_chunk, growth.chunks)
            parent = hashes[-CHUNK_HASH_BYTES:] or self._root
            hashes += self._hasher.extend(parent, memoryview(growth.tokens)[:hashed_bytes], extras)
        self.hashes, self._partial_chunk, self._extras = hashes, growth.tokens[hashed_bytes:], growth.extras

    @property
    def is_plain(self) -> bool:
        """Whether its tokens alone name its chunks."""
        return not self.identity and not len(self._extras)

    def new_chunks(self, growth: Growth) -> tuple[bytes, bytes, bytes]:
        """What `grow` has just added: the chunk before (b"" for none), the hashes, and the tokens from there on."""
        start = growth.first_chunk * CHUNK_HASH_BYTES
        return self.hashes[max(0, start - CHUNK_HASH_BYTES) : start], self.hashes[start:], growth.tokens

    def partial_hash(self, tokens: int) -> bytes:
        """The name of the partial chunk of the first `tokens` tokens behind the last full chunk; b"" for none."""
        if not tokens:
            return b""
        extra = self._extras.between(self.chunks, self.chunks + 1).get(0, b"")
        parent = self.hashes[-CHUNK_HASH_BYTES:] or self._root
        return self._hasher.partial(parent, self._partial_chunk[: tokens * TOKEN_BYTES], extra)

    def _kept(self, first_token: int) -> tuple[int, bytes, int]:
        """What stays before that position: full chunks, tokens behind them, and how many chunks' extras."""
        token_count = self.token_count
        if first_token == token_count:
            return self.chunks, self._partial_chunk, limits.MAX_TOKENS_PER_SESSION
        chunk, into_chunk = divmod(first_token, self._hasher.chunk_tokens)
        if not 0 <= first_token < token_count or (into_chunk and chunk != self.chunks):
            raise RemoteError(
                ErrorCode.UNKNOWN_SESSION,
                f"The session has {token_count} tokens and cannot go on from {first_token}; send its tokens from 0.",
            )
        if not into_chunk:
            return chunk, b"", chunk
        # The extra of the last chunk stays, too: what it stands for may lie in the part that is kept.
        return chunk, self._partial_chunk[: into_chunk * TOKEN_BYTES], chunk + 1

    def _with_extras(self, hashed: int, kept_chunks: int, extras: list[tuple[int, bytes]]) -> Extras:
        """`hashed`: number of chunks whose extras cannot change any more."""
        kept = self._extras.between(0, kept_chunks)
        if not extras:
            return self._extras if len(kept) == len(self._extras) else Extras(kept)
        for chunk, extra in extras:
            if not 0 <= chunk < limits.MAX_TOKENS_PER_SESSION or len(extra) != CHUNK_HASH_BYTES:
                raise RemoteError(
                    ErrorCode.BAD_REQUEST,
                    f"The extra of chunk {chunk} has {len(extra)} bytes; the chunk must be from 0 to "
                    f"{limits.MAX_TOKENS_PER_SESSION - 1}, and its extra {CHUNK_HASH_BYTES} bytes.",
                )
            if chunk < hashed and kept.get(chunk) != extra:
                raise RemoteError(
                    ErrorCode.BAD_REQUEST,
                    f"Chunk {chunk} was hashed without this extra; send the session's tokens from 0.",
                )
            kept[chunk] = extra
        if len(kept) > limits.MAX_EXTRAS_PER_SESSION:
            raise RemoteError(ErrorCode.TOO_MANY, f"A session has at most {limits.MAX_EXTRAS_PER_SESSION} extras.")
        return Extras(kept)

    def _size_bytes(self, chunks: int, partial_bytes: int, extras: Extras) -> int:
        names = len(self.cache_salt.encode()) + len(self.identity)
        return names + chunks * CHUNK_HASH_BYTES + partial_bytes + extras.size_bytes
