"""What decoding computed: chunks that it filled are stored like those of prompts, so that the next turn of a chat hits.

The server names a chunk by its tokens, so they have to be sent first. That takes a round trip, during which the request
may end: its blocks then stay pinned until they are stored.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache.client.lookup_client import LookupClient, Progress
from lmcache.integration.engine.connector_metadata import StoreOrder
from lmcache.integration.vllm.block_pins import BlockPins
from lmcache.integration.vllm.tracked_request import TrackedRequest

_IDLE_WAIT_SECONDS = 0.002  # an engine with nothing else to do waits this long for an answer instead of spinning

NoteStored = Callable[[TrackedRequest, int], None]


def _note_nothing(tracked: TrackedRequest, end_chunk: int) -> None:
    pass


@dataclass
class _Tail:
    """The last chunks of a request that has ended, pinned."""

    tracked: TrackedRequest
    first_chunk: int
    end_chunk: int
    job: int
    blocks: tuple[bytes, ...]


class DecodeStore:
    """Belongs to the scheduler's thread."""

    def __init__(self, lookups: LookupClient, pins: BlockPins, note_stored: NoteStored = _note_nothing) -> None:
        """`note_stored`: the chunks of a request up to that one are being stored."""
        self._lookups = lookups
        self._pins = pins
        self._note_stored = note_stored
        self._tails: list[_Tail] = []

    def learn(self, tracked: TrackedRequest, request: Any, tokens: int) -> None:
        """Asks for the hashes of the chunks that the first `tokens` tokens of a request fill, unless they are known."""
        session = tracked.session
        if self._lookups.take_hashes(session) is not Progress.ANSWERED or session.lookup is not None:
            return
        hello = self._lookups.client.hello
        if hello is None or tokens // hello.chunk_tokens <= len(session.hashes):
            return
        tracked.take_tokens(request)
        self._lookups.append(session)

    def keep(self, tracked: TrackedRequest, tokens: int, groups: Sequence[tuple[int, Sequence[int]]]) -> None:
        """A request ends whose first `tokens` tokens have KV.

        groups: blocks a chunk and the request's blocks.
        """
        session, first_chunk = tracked.session, tracked.stored_chunks
        self.learn(tracked, tracked.request, tokens)
        hello = session.server
        if hello is None or hello is not self._lookups.client.hello or session.lookup is not None:
            return
        end_chunk = tokens // hello.chunk_tokens
        if session.append is None:
            end_chunk = min(end_chunk, len(session.hashes))
        blocks = [ids[first_chunk * per_chunk : end_chunk * per_chunk] for per_chunk, ids in groups]
        if end_chunk <= first_chunk or any(self._pins.null_block_id in group for group in blocks):
            return
        job = self._pins.pin(blocks)
        if job is not None:
            packed = tuple(array("q", group).tobytes() for group in blocks)
            self._tails.append(_Tail(tracked, first_chunk, end_chunk, job, packed))

    def drop_tails(self) -> None:
        """Unpins the tails that are not ordered to be stored yet."""
        for tail in self._tails:
            self._pins.drop(tail.job)
        self._tails = []

    def next_orders(self, *, idle: bool) -> list[StoreOrder]:
        """The tails whose hashes have come; those whose hashes will not come are let go. `idle`: waits a moment."""
        if not self._tails:
            return []
        orders, waiting = [], []
        wait_seconds = _IDLE_WAIT_SECONDS if idle else 0.0
        for tail in self._tails:
            session = tail.tracked.session
            progress = self._lookups.take_hashes(session, wait_seconds)
            if progress is Progress.WAITING:
                waiting.append(tail)
                wait_seconds = 0.0
                continue
            hashes = session.hashes[tail.first_chunk : tail.end_chunk]
            whole = len(hashes) == tail.end_chunk - tail.first_chunk
            hello = session.server
            if progress is Progress.FAILED or not whole or hello is None or hello is not self._lookups.client.hello:
                self._pins.drop(tail.job)
                continue
            self._note_stored(tail.tracked, tail.end_chunk)
            orders.append(StoreOrder(tail.job, hello.server_epoch, session.cache_salt, hashes.packed, tail.blocks))
        self._tails = waiting
        return orders
