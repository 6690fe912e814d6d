"""Makes the engine's KV events of what the server's chunks do: L1 is the medium CPU, L2 is STORAGE."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache.core.key_batch import ChunkHashes
from lmcache.integration.engine.announced_chunks import AnnouncedChunks, ChunkName, TierChange
from lmcache.integration.engine.chunk_follower import ChunkFollower
from lmcache.integration.vllm.announced_blocks import AnnouncedBlocks
from lmcache.integration.vllm.described_chunk import (
    BlockSizes,
    DescribedChunk,
    describe,
    follows,
    removed_event,
    stored_event,
)
from lmcache.integration.vllm.versions import EventInterface

if TYPE_CHECKING:
    from lmcache.client.client import Client

log = logging.getLogger("lmcache.vllm")

MEDIA = {1: "CPU", 2: "STORAGE"}  # by the bits of `ChunkChangesReply.tiers`
_CHUNKS_AT_ONCE = 16  # between two pauses
_CHUNKS_PER_EVENT = 64


@dataclass(frozen=True, kw_only=True)
class EventOptions:
    block_tokens: int
    group: int  # of the engine's KV cache groups, that the events name
    shared_l2: bool = False  # what adapters hold that other servers read as well is announced, too


class NamedChunks(NamedTuple):
    """Chunks of a request that have names now."""

    request: Any
    cache_salt: str
    hashes: ChunkHashes  # from the first chunk of the request on
    first_chunk: int
    end_chunk: int
    chunk_tokens: int


class _Told(NamedTuple):
    tier: int
    is_there: bool
    chunk: DescribedChunk
    is_news: bool = True


class EventMaker:
    """For one thread. `pause` is called after every few chunks."""

    def __init__(
        self,
        client: Client,
        instance_id: str,
        options: EventOptions,
        events: EventInterface,
        *,
        now: Callable[[], float],
        pause: Callable[[], object] = lambda: None,
        chunks: AnnouncedChunks[DescribedChunk] | None = None,
    ) -> None:
        self._options = options
        self._events = events
        self._pause = pause
        self._chunks = chunks if chunks is not None else AnnouncedChunks()
        self._told: list[_Told] = []
        self._blocks = {tier: AnnouncedBlocks() for tier in MEDIA}
        self._follower = ChunkFollower(client, instance_id, self._chunks, self._tell, now, shared_l2=options.shared_l2)

    def is_announced(self, name: ChunkName) -> bool:
        return self._chunks.is_announced(name)

    # ---- what the engine did -----------------------------------------------------------------------------------------
    def remember(self, named: NamedChunks, hashed_tokens: int) -> None:
        """`hashed_tokens`: of what the engine's requests name their blocks by."""
        salt = named.cache_salt
        names = [ChunkName(salt, named.hashes[number]) for number in range(named.first_chunk, named.end_chunk)]
        if not self._chunks.has_room_for(salt):
            self._follower.count_no_room(len(names))
            return
        self._touch(names)
        known = 0
        while known < len(names) and names[known] in self._chunks:
            known += 1
        if known == len(names):
            return
        sizes = BlockSizes(self._options.block_tokens, hashed_tokens)
        first_chunk = named.first_chunk + known
        described = describe(named.request, names[known:], first_chunk, named.chunk_tokens, sizes, self._events)
        for number, (name, chunk) in enumerate(described, 1):
            if name not in self._chunks:
                forgotten = self._chunks.remember(name, chunk)
                self._follower.ask_for((name,))
                if forgotten is not None:
                    self._follower.count_no_room(1)
                    self._follower.change(forgotten)
            if number % _CHUNKS_AT_ONCE == 0:
                self._pause()
        self._touch(names)

    def _touch(self, names: list[ChunkName]) -> None:
        """The end of a prompt is of no use without its beginning: that is forgotten last."""
        for name in reversed(names):
            self._chunks.touch(name)

    def announce_again(self) -> None:
        """Routers were told that the engine has nothing, which they take for the cache server's blocks as well. Which
        events came after that is not known: what is announced is told once more."""
        for chunk, tiers in self._chunks.announced():
            self._told += [_Told(tier, True, chunk, is_news=False) for tier in MEDIA if tiers & tier]

    def forget_all(self) -> None:
        """What was stored before is not found any more."""
        for change in self._chunks.take_all_back():
            self._follower.change(change)
        self._chunks.clear()

    # ---- what the server did -----------------------------------------------------------------------------------------
    def poll(self) -> bool:
        """Asks the server, which holds this thread up for seconds where it does not answer. Whether something changed,
        or there is more to ask for. While nothing is remembered it is not asked."""
        return bool(len(self._chunks)) and self._follower.poll()

    def events(self) -> Iterator[Any]:
        """What routers are to be told since the last call."""
        told, self._told = self._told, []
        since_pause = lost = 0
        for run in _runs(told):
            event = None
            try:
                event = self._event(run)
            except Exception:  # of one event: the others go on
                lost += 1
                if lost == 1:
                    log.exception("A KV event of %d chunks of the LMCache server is lost", len(run))
            if event is not None:
                yield event
            since_pause += len(run)
            if since_pause >= _CHUNKS_AT_ONCE:
                since_pause = 0
                self._pause()

    def _event(self, run: list[_Told]) -> Any:
        """None where other chunks have all these blocks."""
        tier, is_there, *_ = run[0]
        blocks, options = self._blocks[tier], self._options
        if is_there:
            chunks = [entry.chunk for entry in run]
            event = stored_event(chunks, MEDIA[tier], options.block_tokens, options.group, self._events)
            for entry in run:
                if entry.is_news or entry.chunk not in blocks:
                    blocks.add(entry.chunk)
            return event
        gone = [block for entry in run for block in blocks.remove(entry.chunk)]
        return removed_event(gone, MEDIA[tier], options.group, self._events) if gone else None

    def _tell(self, change: TierChange[DescribedChunk]) -> None:
        for tier in MEDIA:
            if (change.added | change.removed) & tier:
                self._told.append(_Told(tier, bool(change.added & tier), change.described))


def _runs(told: list[_Told]) -> Iterator[list[_Told]]:
    """Those that one event can tell: of one tier and kind, and where blocks are there, one behind the other. Tiers are
    independent of each other, so one goes before the other."""
    for tier in MEDIA:
        run: list[_Told] = []
        for entry in (entry for entry in told if entry.tier == tier):
            if run and not _fits(entry, run):
                yield run
                run = []
            run.append(entry)
        if run:
            yield run


def _fits(entry: _Told, run: list[_Told]) -> bool:
    last = run[-1]
    if len(run) >= _CHUNKS_PER_EVENT or last.is_there != entry.is_there:
        return False
    return not entry.is_there or follows(entry.chunk, last.chunk)
