"""What decoding computed: chunks that it filled are stored like those of prompts, so that the next turn of a chat hits.

The server names a chunk by its tokens, so it has to be told them first; that takes a round trip, during which the
request may end. What it leaves behind is then pinned until it is stored.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.core.limits import MAX_TOKENS_PER_SESSION
from lmcache.integration.vllm.lookup import Asker, Progress, Question
from lmcache.integration.vllm.orders import StoreOrder
from lmcache.integration.vllm.pins import Pins
from lmcache.protocol.tokens import pack_tokens

_IDLE_WAIT_SECONDS = 0.002  # an engine with nothing else to do waits this long for an answer instead of spinning


@dataclass
class _Tail:
    """The last chunks of a request that has ended, pinned."""

    question: Question
    first_chunk: int
    end_chunk: int
    job: int
    blocks: tuple[bytes, ...]


class DecodedChunks:
    """Belongs to the scheduler's thread."""

    def __init__(self, asker: Asker, pins: Pins) -> None:
        self._asker = asker
        self._pins = pins
        self._tails: list[_Tail] = []

    def learn(self, question: Question, request: Any, tokens: int) -> None:
        """Asks for the hashes of the chunks that the first `tokens` tokens of a request fill, unless they are known."""
        if self._asker.settle_append(question) is not Progress.ANSWERED or question.pending is not None:
            return
        hello = self._asker.client.hello
        if hello is None or tokens // hello.chunk_tokens * CHUNK_HASH_BYTES <= len(question.hashes):
            return
        take_tokens(question, request)
        self._asker.append(question)

    def keep(
        self,
        question: Question,
        request: Any,
        first_chunk: int,
        tokens: int,
        groups: Sequence[tuple[int, Sequence[int]]],
    ) -> None:
        """A request ends whose first `tokens` tokens have KV and whose chunks are stored up to `first_chunk`.

        groups: blocks a chunk and the request's blocks.
        """
        self.learn(question, request, tokens)
        hello = question.hello
        if hello is None or hello is not self._asker.client.hello or question.pending is not None:
            return
        end_chunk = tokens // hello.chunk_tokens
        if question.appending is None:
            end_chunk = min(end_chunk, len(question.hashes) // CHUNK_HASH_BYTES)
        blocks = [ids[first_chunk * each : end_chunk * each] for each, ids in groups]
        if end_chunk <= first_chunk or any(self._pins.null_block_id in group for group in blocks):
            return
        job = self._pins.pin(blocks)
        if job is not None:
            packed = tuple(array("q", group).tobytes() for group in blocks)
            self._tails.append(_Tail(question, first_chunk, end_chunk, job, packed))

    def drop_tails(self) -> None:
        """Lets go of the tails that nobody was told to store."""
        for tail in self._tails:
            self._pins.drop(tail.job)
        self._tails = []

    def orders(self, *, idle: bool) -> list[StoreOrder]:
        """The tails whose hashes have come; those whose hashes will not come are let go."""
        if not self._tails:
            return []
        orders, waiting = [], []
        wait_seconds = _IDLE_WAIT_SECONDS if idle else 0.0
        for tail in self._tails:
            question = tail.question
            progress = self._asker.settle_append(question, wait_seconds)
            if progress is Progress.WAITING:
                waiting.append(tail)
                wait_seconds = 0.0
                continue
            hashes = question.hashes[tail.first_chunk * CHUNK_HASH_BYTES : tail.end_chunk * CHUNK_HASH_BYTES]
            whole = len(hashes) == (tail.end_chunk - tail.first_chunk) * CHUNK_HASH_BYTES
            if progress is Progress.FAILED or not whole or question.hello is not self._asker.client.hello:
                self._pins.drop(tail.job)
                continue
            orders.append(StoreOrder(tail.job, question.boot_token, question.cache_salt, hashes, tail.blocks))
        self._tails = waiting
        return orders


def take_tokens(question: Question, request: Any) -> None:
    """Adds what has been decoded so far, or put in by a session, to the question's tokens."""
    known = len(question.tokens) // 4
    if known < request.num_tokens <= MAX_TOKENS_PER_SESSION:
        question.tokens += pack_tokens(list(request.all_token_ids[known:]))
        question.features = tuple(request.mm_features)


def lost_tokens(question: Question, request: Any) -> bool:
    """Whether tokens of the question are no longer the request's. Those of a session may be replaced; vLLM 0.32 does
    that to computed ones only when the session stops while it is preempted."""
    known = len(question.tokens) // 4
    return bool(request.resumable) and pack_tokens(list(request.all_token_ids[:known])) != question.tokens
