"""Requests that compute what another one wants too: the other one waits for it instead of computing it again.

Requests of a burst share a prefix and all ask before anything of it is stored. One of them computes it; the others are
asked about again by vLLM's scheduler in every step, and are held back while what they lack is on its way to L1. Waiting
costs them nothing: they would have computed the same tokens in the same steps.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lmcache.clock import Clock
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.integration.vllm.awaited import Awaited
from lmcache.integration.vllm.lookup import Question
from lmcache.protocol.messages import HelloReply

PATIENCE_SECONDS = 5.0  # since a maker last came further
_PAST_KEPT = 64


class Ahead(enum.Enum):
    """What another request means for one that is to be scheduled."""

    NOTHING = "nothing"
    COMING = "coming"  # it computes or stores more of the prefix than the answer names
    STORED = "stored"  # it has stored more since the question was asked


@dataclass
class _Job:
    maker: _Maker
    first_chunk: int


@dataclass
class _Maker:
    """`ordered`: chunks below it are stored, ordered to be stored, or left out."""

    hello: HelloReply
    cache_salt: str
    hashes: bytes
    end_chunk: int
    ordered: int
    went_on_at: float
    stored_at: float = float("-inf")
    computing: bool = True
    storing: set[int] = field(default_factory=set)  # jobs


class Makers:
    """Belongs to the scheduler's thread."""

    def __init__(self, workers: int, clock: Clock) -> None:
        """`workers` report the end of every store."""
        self._clock = clock
        self._makers: dict[str, _Maker] = {}
        self._past: deque[_Maker] = deque(maxlen=_PAST_KEPT)
        self._jobs: Awaited[_Job] = Awaited(workers)

    # ---- what requests do --------------------------------------------------------------------------------------------
    def begins(self, question: Question, stored_chunks: int, end_chunk: int) -> None:
        """The request has blocks and will compute what it has not, up to `end_chunk`."""
        end_chunk = min(end_chunk, len(question.hashes) // CHUNK_HASH_BYTES)
        if question.hello is None or stored_chunks >= end_chunk:
            return
        self.ends(question.request_id)
        self._makers[question.request_id] = _Maker(
            *(question.hello, question.cache_salt, question.hashes, end_chunk, stored_chunks, self._clock.monotonic())
        )

    def runs(self, request_id: str, computed_tokens: int, ordered: int) -> None:
        """In this step."""
        maker = self._makers.get(request_id)
        if maker is not None:
            if ordered > maker.ordered or computed_tokens < maker.end_chunk * maker.hello.chunk_tokens:
                maker.went_on_at = self._clock.monotonic()
            maker.ordered = max(maker.ordered, ordered)

    def stores(self, request_id: str, job: int, first_chunk: int) -> None:
        maker = self._makers.get(request_id)
        if maker is not None:
            maker.storing.add(job)
            self._jobs.add(job, _Job(maker, first_chunk))

    def stored(self, reports: Mapping[int, int]) -> None:
        """What workers have made known to the server, or could not."""
        for number, job in self._jobs.ended(reports):
            job.maker.storing.discard(number)
            job.maker.stored_at = job.maker.went_on_at = self._clock.monotonic()

    def pauses(self, request_id: str) -> None:
        """It waits to be scheduled (again)."""
        maker = self._makers.get(request_id)
        if maker is not None:
            maker.computing = False

    def ends(self, request_id: str) -> None:
        """What it has ordered to be stored may still come."""
        maker = self._makers.pop(request_id, None)
        if maker is not None:
            maker.computing = False
            self._past.append(maker)

    # ---- what that means for another ---------------------------------------------------------------------------------
    def ahead_of(self, question: Question, held_tokens: int) -> Ahead:
        """For a request that is answered, of which the engine itself holds the first `held_tokens` tokens."""
        reply, hello = question.reply, question.hello
        assert reply is not None and hello is not None
        first = max(reply.chunks, held_tokens // hello.chunk_tokens)
        wanted = reply.hashes[first * CHUNK_HASH_BYTES : (first + 1) * CHUNK_HASH_BYTES]
        if len(wanted) < CHUNK_HASH_BYTES:
            return Ahead.NOTHING
        answer = Ahead.NOTHING
        for maker in self._of_chunk(question, first, wanted):
            if self._comes(maker, first, _shared_chunks(maker, reply.hashes)):
                return Ahead.COMING
            if maker.stored_at > question.sent_at:
                answer = Ahead.STORED
        return answer

    def _of_chunk(self, question: Question, chunk: int, chunk_hash: bytes) -> Iterator[_Maker]:
        """A chunk's hash names all before it too."""
        start, end = chunk * CHUNK_HASH_BYTES, (chunk + 1) * CHUNK_HASH_BYTES
        own = self._makers.get(question.request_id)
        for makers in (self._makers.values(), self._past):
            for maker in makers:
                if (
                    maker.hashes[start:end] == chunk_hash
                    and maker is not own
                    and maker.cache_salt == question.cache_salt
                    and maker.hello is question.hello
                ):
                    yield maker

    def _comes(self, maker: _Maker, first: int, shared: int) -> bool:
        if self._clock.monotonic() - maker.went_on_at > PATIENCE_SECONDS:
            return False
        if maker.computing and maker.ordered < shared:
            return True
        return any(self._jobs[job].first_chunk < shared for job in maker.storing)


def _shared_chunks(maker: _Maker, hashes: bytes) -> int:
    """How many chunks that the maker stores are a prefix of the other request's."""
    low, high = 0, min(maker.end_chunk, len(hashes) // CHUNK_HASH_BYTES)
    while low < high:
        middle = (low + high + 1) // 2
        at = slice((middle - 1) * CHUNK_HASH_BYTES, middle * CHUNK_HASH_BYTES)
        if maker.hashes[at] == hashes[at]:
            low = middle
        else:
            high = middle - 1
    return low
