"""Request coalescing: a request that lacks what another one is computing waits for it instead of computing it again.

Requests of a burst share a prefix and are all looked up before anything of it is stored. One of them computes it; the
engine asks about the others again in every step, and they are held back while what they lack is on its way to L1.
Waiting costs them nothing: they would have computed the same tokens in the same steps.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lmcache.client.lookup_client import RequestSession
from lmcache.clock import Clock
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.core.key_batch import ChunkHashes
from lmcache.integration.engine.completion_barrier import CompletionBarrier
from lmcache.protocol.messages import HelloReply

PATIENCE_SECONDS = 5.0  # since a prefix last made progress
_ENDED_KEPT = 64


class PrefixState(enum.Enum):
    """What other requests do about the first chunk that a request lacks."""

    NOTHING = "nothing"
    COMING = "coming"  # one computes or stores it
    STORED = "stored"  # one has stored it, or tried to, since the lookup


@dataclass
class _Store:
    prefix: _Prefix
    first_chunk: int


@dataclass
class _Prefix:
    """The chunks that one request computes, as far as they are named."""

    server: HelloReply
    cache_salt: str
    hashes: ChunkHashes
    end_chunk: int
    ordered_chunks: int  # chunks before it are stored, ordered to be stored, or left out
    progress_at: float
    stored_at: float = float("-inf")
    computing: bool = True
    jobs: set[int] = field(default_factory=set)  # stores under way


class InflightPrefixes:
    """Belongs to the scheduler's thread."""

    def __init__(self, workers: int, clock: Clock) -> None:
        """`workers` report the end of every store."""
        self._clock = clock
        self._prefixes: dict[str, _Prefix] = {}  # by request
        self._ended: deque[_Prefix] = deque(maxlen=_ENDED_KEPT)  # of requests that are over: stores may still end
        self._stores: CompletionBarrier[_Store] = CompletionBarrier(workers)

    # ---- what requests do --------------------------------------------------------------------------------------------
    def on_scheduled(self, session: RequestSession, stored_chunks: int, end_chunk: int) -> None:
        """The request has blocks and will compute the chunks from `stored_chunks` up to `end_chunk`."""
        end_chunk = min(end_chunk, len(session.hashes))
        if session.server is None or stored_chunks >= end_chunk:
            return
        self.on_ended(session.request_id)
        self._prefixes[session.request_id] = _Prefix(
            session.server, session.cache_salt, session.hashes, end_chunk, stored_chunks, self._clock.monotonic()
        )

    def on_step(self, request_id: str, computed_tokens: int, ordered_chunks: int) -> None:
        """A step computes the request up to `computed_tokens`."""
        prefix = self._prefixes.get(request_id)
        if prefix is not None:
            if (
                ordered_chunks > prefix.ordered_chunks
                or computed_tokens < prefix.end_chunk * prefix.server.chunk_tokens
            ):
                prefix.progress_at = self._clock.monotonic()
            prefix.ordered_chunks = max(prefix.ordered_chunks, ordered_chunks)

    def on_store_ordered(self, request_id: str, job: int, first_chunk: int) -> None:
        prefix = self._prefixes.get(request_id)
        if prefix is not None:
            prefix.jobs.add(job)
            self._stores.add(job, _Store(prefix, first_chunk))

    def on_stored(self, reports: Mapping[int, int]) -> None:
        """`reports`: by job, how many more workers have reported its end to the server, or could not."""
        for job, store in self._stores.ended(reports):
            store.prefix.jobs.discard(job)
            store.prefix.stored_at = store.prefix.progress_at = self._clock.monotonic()

    def on_waiting(self, request_id: str) -> None:
        """The request waits to be scheduled (again)."""
        prefix = self._prefixes.get(request_id)
        if prefix is not None:
            prefix.computing = False

    def on_ended(self, request_id: str) -> None:
        """The request computes no more. Stores that it has ordered may still end."""
        prefix = self._prefixes.pop(request_id, None)
        if prefix is not None:
            prefix.computing = False
            self._ended.append(prefix)

    # ---- what that means for another ---------------------------------------------------------------------------------
    def state_for(self, session: RequestSession, held_tokens: int) -> PrefixState:
        """For a request whose answer is held, and of which the engine itself holds the first `held_tokens` tokens."""
        answer, server = session.answer, session.server
        assert answer is not None and server is not None
        chunk = max(answer.chunks, held_tokens // server.chunk_tokens)
        if chunk >= len(session.hashes):
            return PrefixState.NOTHING
        state = PrefixState.NOTHING
        for prefix in self._with_chunk(session, chunk):
            if self._is_coming(prefix, _shared_chunks(prefix, session.hashes)):
                return PrefixState.COMING
            if prefix.stored_at > session.looked_up_at:
                state = PrefixState.STORED
        return state

    def _with_chunk(self, session: RequestSession, chunk: int) -> Iterator[_Prefix]:
        """Those of other requests. A chunk's hash names all chunks before it too."""
        chunk_hash, at = session.hashes[chunk], chunk * CHUNK_HASH_BYTES
        own = self._prefixes.get(session.request_id)
        for prefixes in (self._prefixes.values(), self._ended):
            for prefix in prefixes:
                if (
                    prefix.hashes.packed.startswith(chunk_hash, at)  # of every waiting request and prefix in every step
                    and prefix is not own
                    and prefix.cache_salt == session.cache_salt
                    and prefix.server is session.server
                ):
                    yield prefix

    def _is_coming(self, prefix: _Prefix, shared_chunks: int) -> bool:
        if self._clock.monotonic() - prefix.progress_at > PATIENCE_SECONDS:
            return False
        if prefix.computing and prefix.ordered_chunks < shared_chunks:
            return True
        return any(self._stores[job].first_chunk < shared_chunks for job in prefix.jobs)


def _shared_chunks(prefix: _Prefix, hashes: ChunkHashes) -> int:
    """How many leading chunks the prefix has in common with `hashes`."""
    low, high = 0, min(prefix.end_chunk, len(hashes))
    while low < high:
        middle = (low + high + 1) // 2
        if prefix.hashes[middle - 1] == hashes[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
