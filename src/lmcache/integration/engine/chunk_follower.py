"""Follows the server's changes for the chunks that an engine remembers: what has come and gone, tier by tier.

One call after the other, each from the cursor of the last one. Chunks are asked for by name when they are new here, and
all of them when changes were lost: after a pause, a restart of the server, other registrations.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

from lmcache.core import limits
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.errors import LMCacheError, RemoteError, ServerUnavailable
from lmcache.integration.engine.announced_chunks import AnnouncedChunks, ChunkName, TierChange
from lmcache.protocol.messages import ChunkChanges, ChunkChangesReply, ErrorCode, HelloReply

if TYPE_CHECKING:
    from lmcache.client.client import Client

log = logging.getLogger("lmcache.client")

T = TypeVar("T")

_CALL_SECONDS = 2.0
_AWAY_SECONDS = 10.0  # without an answer: then nothing of what was announced counts any more


class ChunkFollower(Generic[T]):
    """For one thread, which `poll` holds up for `_CALL_SECONDS` at most. `tell` gets every change, in order."""

    def __init__(
        self,
        client: Client,
        instance_id: str,
        chunks: AnnouncedChunks[T],
        tell: Callable[[TierChange[T]], None],
        now: Callable[[], float],
        *,
        shared_l2: bool = False,
    ) -> None:
        self._client = client
        self._instance_id = instance_id
        self._chunks = chunks
        self._tell = tell
        self._now = now
        self._shared_l2 = shared_l2
        self._server: HelloReply | None = None  # that the cursor is of
        self._cursor: list[int] = []
        self._unasked: dict[ChunkName, None] = {}
        self._unused: set[str] = set()  # salts that the server has not seen this engine use
        self._answered_at = now()
        self._mute: HelloReply | None = None  # a server that has no such call
        self._counts = [0, 0, 0, 0]  # since the last call: stored, removed, unknown, no room

    @property
    def is_behind(self) -> bool:
        """Whether a call would give more at once."""
        return any(name.cache_salt not in self._unused for name in self._unasked)

    def ask_for(self, names: Iterable[ChunkName]) -> None:
        for name in names:
            self._unasked[name] = None

    def count_no_room(self, chunks: int) -> None:
        self._counts[3] += chunks

    def change(self, change: TierChange[T]) -> None:
        """Tells it, and counts it."""
        if change.added or change.removed:
            self._counts[0] += change.added.bit_count()
            self._counts[1] += change.removed.bit_count()
            self._tell(change)

    def poll(self) -> bool:
        """One call. Whether something changed, or there is more."""
        server = self._client.hello
        if server is None:
            return False
        if server is self._mute:
            self._unasked.clear()  # the next server is asked for all of them
            return False
        if server is not self._server:
            self._begin(server)
        salts = self._chunks.salts
        asked = self._next_asked()
        counts, self._counts = self._counts, [0, 0, 0, 0]
        try:
            reply = self._client.call("chunk_changes", self._message(server, salts, asked, counts), _CALL_SECONDS)
        except LMCacheError as error:
            self._counts = [ours + theirs for ours, theirs in zip(self._counts, counts, strict=True)]
            self.ask_for(asked)
            self._note_failure(server, error)
            return False
        self._answered_at = self._now()
        if server is not self._client.hello:
            return True  # the answer may be of either
        return self._take(reply, salts, asked)

    # ---- a call ------------------------------------------------------------------------------------------------------
    def _begin(self, server: HelloReply) -> None:
        """What another server had is not there."""
        self._server, self._cursor = server, []
        self._unused.clear()
        self._take_back_all()

    def _take_back_all(self) -> None:
        for change in self._chunks.take_all_back():
            self.change(change)
        self._unasked = dict.fromkeys(self._chunks)

    def _next_asked(self) -> list[ChunkName]:
        asked = list(islice(self._unasked, limits.MAX_CHUNKS_ASKED_FOR))
        for name in asked:
            del self._unasked[name]
        return [name for name in asked if name in self._chunks]

    def _message(self, server: HelloReply, salts: list[str], asked: list[ChunkName], counts: list[int]) -> ChunkChanges:
        places = {salt: place for place, salt in enumerate(salts)}
        return ChunkChanges(
            self._instance_id,
            server.server_epoch,
            self._cursor,
            salts,
            array("I", [places[name.cache_salt] for name in asked]).tobytes(),
            b"".join([name.chunk_hash for name in asked]),
            self._shared_l2,
            counts,
        )

    def _note_failure(self, server: HelloReply, error: LMCacheError) -> None:
        if isinstance(error, RemoteError) and error.code == ErrorCode.UNKNOWN_METHOD:
            log.warning(
                "The LMCache server (version %s) tells nothing of its changes: no KV events are published of it. "
                "Upgrade it",
                server.server_version,
            )
            self._mute = server
            self._take_back_all()
        elif self._now() - self._answered_at > _AWAY_SECONDS:
            self._cursor = []
            self._take_back_all()
        elif not isinstance(error, ServerUnavailable):
            log.debug("The changes of the LMCache server cannot be read: %s", error)

    def _take(self, reply: ChunkChangesReply, salts: list[str], asked: list[ChunkName]) -> bool:
        if reply.lost and self._cursor:
            self.ask_for(self._chunks)
        self._cursor = reply.cursor
        unused = {salts[place] for place in reply.unused_salts if place < len(salts)}
        self._note_unused(unused - self._unused, [name for name in asked if name.cache_salt in unused])
        self._unused = unused
        hashes, places = reply.hashes, memoryview(reply.salts).cast("I")
        for number, (place, tiers) in enumerate(zip(places, reply.tiers, strict=True)):
            start = number * CHUNK_HASH_BYTES
            name = ChunkName(salts[place], hashes[start : start + CHUNK_HASH_BYTES])
            change = self._chunks.now_in(name, tiers)
            if change is None:
                self._counts[2] += 1
            else:
                self.change(change)
        return reply.more or bool(reply.tiers) or self.is_behind

    def _note_unused(self, salts: set[str], asked: list[ChunkName]) -> None:
        """Nothing is known of their chunks until the server has seen a request of theirs."""
        self.ask_for(asked)
        for salt in salts:
            names = self._chunks.of_salt(salt)
            self.ask_for(names)
            for name in names:
                change = self._chunks.now_in(name, 0)
                if change is not None:
                    self.change(change)
