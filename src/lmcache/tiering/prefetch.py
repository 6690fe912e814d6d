"""Loads into L1, and leases there, the longest prefix that L2 has of the chunks that a lookup missed.

A request goes through windows of chunks that grow: ask the adapters in order which objects exist, start loads for the
chunks that are complete before the next one is asked, stop at the first chunk that no adapter completes. Loads run at
once; the request waits for them in prefix order, until its deadline. Where the beginning of a prompt is there, it waits
for a late answer about the rest only a small part of that time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress

from lmcache._native import NO_SLOT, usable_prefix
from lmcache.core import limits
from lmcache.core.hint import Hint
from lmcache.core.key import ObjectKey
from lmcache.core.key_batch import NO_SLOTS, KeyBatch, SlotGrid, pack_keys
from lmcache.core.outcome import MissReason
from lmcache.l2.adapter import FollowsHints
from lmcache.l2.runner import ProbeAnswer, Runner
from lmcache.memory.ownership import STORAGE_OWNER
from lmcache.telemetry.tracing import TierTime
from lmcache.tiering.context import TieringContext
from lmcache.tiering.l2_loads import BatchLoad, L2Loader, LoadTarget
from lmcache.tiering.leases import FOREVER
from lmcache.tiering.prefetch_places import RequestPlace

FIRST_WINDOW_CHUNKS = 32
WINDOW_GROWTH = 4
LATE_FRACTION = 1 / 8  # of the shorter deadline, the request's or the adapter's: what loads take comes on top

# By chunk, then by namespace: the position of the first adapter that has the object, NO_LOAD, or None.
Sources = list[int | None]
NO_LOAD = -1  # L1 has it, or it is being loaded


def load_objects(most_objects: int, wanted_objects: int) -> int:
    """Of one load, where the adapters that may be asked take `most_objects`: as many as leave some loads side by side,
    and not fewer than MAX_L2_BATCH_OBJECTS."""
    return max(limits.MAX_L2_BATCH_OBJECTS, min(most_objects, -(-wanted_objects // limits.LOADS_OF_A_WINDOW)))


@dataclass(frozen=True)
class PrefetchRequest:
    """`keys` are those of a whole prompt, of which L1 had the chunks before `first_chunk`."""

    owner: int
    lease_deadline: float
    keys: KeyBatch
    first_chunk: int
    deadline_seconds: float
    hint: Hint | None = None  # who has it, for adapters that follow hints


@dataclass(frozen=True)
class PrefetchResult:
    """`slots` are leased, of the chunks from the request's `first_chunk` on. `miss_reason` tells why not all are."""

    miss_reason: MissReason | None = None
    lease: int = 0
    slots: SlotGrid = NO_SLOTS
    times: Sequence[TierTime] = ()  # of the adapters that were loaded from

    @property
    def chunks(self) -> int:
        return self.slots.chunks


class Prefetch:
    """One request under way."""

    def __init__(
        self,
        request: PrefetchRequest,
        context: TieringContext,
        loader: L2Loader,
        runners: Sequence[Runner],
        place: RequestPlace,
    ) -> None:
        """`runners` in the order in which they are asked. The caller leaves `place` at the end."""
        self.reason = MissReason.NOT_STORED  # of the first chunk that is not loaded
        self._fault: MissReason | None = None  # why an adapter that was asked did not answer
        self._request = request
        self._l1 = context.l1
        self._core = context.l1.core
        self._metrics = context.metrics
        self._loader = loader
        self._runners = runners
        self._place = place
        self._keys = request.keys[request.first_chunk :]
        self._namespaces = request.keys.namespaces
        self._hashes = list(self._keys.hashes)
        self._loads: dict[BatchLoad, int] = {}  # joined, with the first chunk of this request that each matters to
        self._awaited: set[BatchLoad] = set()
        self._leases: list[int] = []  # on objects that were resident already
        self._chunks = 0  # expected to be resident once the loads are done
        self._clock = context.clock
        self._wait_ends: float | None = None  # of what the hint says, from the first question on
        self._is_unanswered = False  # an adapter was late, and not waited for

    async def run(self) -> None:
        """Ends when the prefix that L2 has is resident, or cannot be made so. May be cancelled; `give_back` follows."""
        for _ in self._runners:
            self.reason = MissReason.NOT_STORED
            await self._start_loads()
            await self._await_loads()
            if self.reason is not MissReason.L2_DEADLINE:
                return  # else an adapter was late: it is left alone now, and the others are asked for the rest

    def lease(self) -> PrefetchResult:
        """What is resident now, which at a deadline may be more or less than what was waited for."""
        acquired = self._l1.acquire(self._request.owner, self._keys, self._request.lease_deadline)
        reason = self.reason if acquired.chunks < len(self._hashes) else None
        if reason is MissReason.NOT_STORED and self._is_unanswered:
            reason = MissReason.L2_DEADLINE
        if reason is MissReason.NOT_STORED and self._fault is not None:
            reason = self._fault
        slots = SlotGrid(acquired.slots, acquired.chunks)
        times = [time for load in self._loads for time in load.times]
        return PrefetchResult(reason, acquired.lease, slots, times)

    def give_back(self) -> None:
        """What was held for this request, loads that go on included."""
        for load in self._loads:
            self._loader.leave(load)
        for lease in self._leases:
            self._core.release(lease)

    # ---- loads -------------------------------------------------------------------------------------------------------
    async def _await_loads(self) -> None:
        for load, first_chunk in list(self._loads.items()):
            is_behind = first_chunk >= self._chunks and self.reason is not MissReason.L2_DEADLINE
            if load in self._awaited or is_behind:  # whatever it gives, the prefix ends before it
                continue
            self._awaited.add(load)
            # Shielded: others may wait for the same load.
            self._shorten(load, await asyncio.shield(load.done))

    def _shorten(self, load: BatchLoad, missing: Mapping[ObjectKey, MissReason]) -> None:
        """The prefix ends at the first chunk that a load could not deliver whole."""
        if not missing:
            return
        reasons = {key.chunk_hash: reason for key, reason in missing.items()}
        for chunk in range(self._loads[load], self._chunks):
            if self._hashes[chunk] in reasons:
                self._chunks, self.reason = chunk, reasons[self._hashes[chunk]]
                return

    async def _start_loads(self) -> None:
        total, window = len(self._hashes), FIRST_WINDOW_CHUNKS
        if self._namespaces.tail_chunks:  # what is needed depends on where the hit ends, so that has to be known first
            await self._start_tails(total)
            return
        while self._chunks < total:
            if not await self._start_window(min(total, self._chunks + window)):
                return
            window *= WINDOW_GROWTH

    async def _start_window(self, last: int) -> bool:
        """Chunks up to `last`. False when the prefix ends before it, or L1 lacks the room. What is known to be there is
        on its way before the next adapter is asked: that one may take its time."""
        keys, sources = self._unasked(self._chunks, last)
        for position in range(len(self._runners)):
            loaded = await self._start_complete(sources)
            if loaded is None:
                return False
            del keys[:loaded], sources[:loaded]
            if not sources:
                return True
            await self._ask(position, keys, sources)
        return await self._start_complete(sources) == len(sources)

    async def _start_complete(self, sources: Sources) -> int | None:
        """Starts loads for the chunks of which every object has a source, up to the first other one, and returns their
        number of objects; None when L1 lacks the room."""
        width = len(self._namespaces)
        rows: list[Sources] = []
        for at in range(0, len(sources), width):
            row = [self._or_here(self._chunks + len(rows), index, sources[at + index]) for index in range(width)]
            if None in row:
                break
            rows.append(row)
        return len(rows) * width if await self._load_window(self._chunks, rows) else None

    async def _start_tails(self, total: int) -> None:
        self._chunks = 0
        keys, sources = self._unasked(0, total)
        for position in range(len(self._runners)):
            await self._ask(position, keys, sources)
        namespaces, width = self._namespaces, len(self._namespaces)
        rows = [
            [self._or_here(chunk, index, sources[chunk * width + index]) for index in range(width)]
            for chunk in range(total)
        ]
        whole = usable_prefix(bytes(source is not None for row in rows for source in row), namespaces.tails)
        needed_from = [namespaces.first_needed(position, whole) for position in range(width)]
        needed = [
            [source if chunk >= start else None for source, start in zip(row, needed_from, strict=True)]
            for chunk, row in enumerate(rows[:whole])
        ]
        await self._load_window(0, needed)

    def _unasked(self, first: int, last: int) -> tuple[list[ObjectKey], Sources]:
        """The objects of these chunks, and what is known of them before an adapter is asked."""
        keys = [key for chunk in range(first, last) for key in self._keys_of(chunk)]
        return keys, [None if self._loader.find(key) is None else NO_LOAD for key in keys]

    async def _ask(self, position: int, keys: Sequence[ObjectKey], sources: Sources) -> None:
        """An adapter about what has no source yet."""
        unknown = [index for index, source in enumerate(sources) if source is None]
        if not unknown:
            return
        patience_seconds = self._patience_seconds(position) if self._has_prefix(sources) else None
        hint = self._hint() if isinstance(self._runners[position].adapter, FollowsHints) else None
        if hint is not None and patience_seconds is not None:
            patience_seconds += hint.wait_seconds
        answer = await self._place.ask(position, [keys[index] for index in unknown], patience_seconds, hint)
        if answer is None:
            self._is_unanswered = True
            return
        for index in compress(unknown, answer.exist):
            sources[index] = position
        if not all(answer.exist):  # what an adapter that did not answer lacks, nobody knows
            self._fault = self._fault or answer.fault

    def _hint(self) -> Hint | None:
        """That of the request. All its questions together wait as long as it says."""
        hint = self._request.hint
        if hint is None:
            return None
        now_seconds = self._clock.monotonic()
        if self._wait_ends is None:
            self._wait_ends = now_seconds + hint.wait_seconds
            return hint
        return replace(hint, wait_seconds=max(0.0, self._wait_ends - now_seconds))

    def _patience_seconds(self, position: int) -> float:
        return LATE_FRACTION * min(self._request.deadline_seconds, self._runners[position].config.timeout_seconds)

    async def _ask_instead(self, position: int, keys: Sequence[ObjectKey]) -> ProbeAnswer | None:
        """For a load whose other adapters did not give these."""
        return await self._place.ask(position, keys, self._patience_seconds(position))

    def _has_prefix(self, sources: Sources) -> bool:
        """Whether the answer has some chunks already, whatever other adapters have."""
        if self._request.first_chunk or self._chunks:
            return True
        tails = self._namespaces.tails
        return bool(tails) and usable_prefix(bytes(source is not None for source in sources), tails) > 0

    def _or_here(self, chunk: int, namespace: int, source: int | None) -> int | None:
        """`source`, or NO_LOAD where the object is in L1 or on its way."""
        if source is None:
            key = ObjectKey(self._namespaces.namespaces[namespace], self._hashes[chunk])
            if self._loader.find(key) is not None or self._core.probe(key.namespace.digest, key.chunk_hash):
                return NO_LOAD
        return source

    async def _load_window(self, first: int, sources: Sequence[Sources]) -> bool:
        """Starts loads for the chunks from `first` on, for what has a source. False when L1 lacks the room."""
        chunk_bytes, width = sum(self._namespaces.frame_bytes), len(self._namespaces)
        first_asked = min((max(0, source) for row in sources for source in row if source is not None), default=0)
        most_objects = min((runner.most_load_objects for runner in self._runners[first_asked:]), default=0)
        batch_objects = load_objects(most_objects, len(sources) * width)
        step = max(1, min(batch_objects // width, limits.L2_LOAD_BATCH_BYTES // chunk_bytes))
        for at in range(0, len(sources), step):
            part = sources[at : at + step]
            last = max((source for row in part for source in row if source is not None), default=NO_LOAD)
            if last != NO_LOAD:
                await self._place.move_to(last)
                await self._loader.wait_for_room(self._runners[last], len(part) * chunk_bytes)
            started = self._start_load(first + at, part)
            self._place.leave_when_loaded()
            self._chunks = first + at + started
            if started < len(part):
                self.reason = MissReason.NO_ROOM
                return False
        return True

    def _start_load(self, first: int, sources: Sequence[Sources]) -> int:
        """Reserves slots for these chunks and starts their load; how many chunks have room. What is resident is leased,
        what another request loads is joined."""
        count, width = len(sources), len(self._namespaces)
        wanted = b""
        if self._namespaces.tail_chunks:
            wanted = bytes(sources[chunk][position] is not None for position in range(width) for chunk in range(count))
        reserved = self._l1.reserve(STORAGE_OWNER, self._keys[first : first + count], FOREVER, wanted=wanted)
        slots = SlotGrid(reserved.slots, count)
        targets, resident = [], []
        with_room = count - reserved.chunks_without_room
        for chunk in range(with_room):
            for position, (key, source) in enumerate(zip(self._keys_of(first + chunk), sources[chunk], strict=True)):
                if source is None:
                    continue
                slot = slots[position, chunk]
                if slot != NO_SLOT:
                    place, frame_bytes = position * count + chunk, self._namespaces.frame_bytes[position]
                    # What has left L1 meanwhile: by now the first adapter may have it.
                    targets.append(LoadTarget(key, place, slot, frame_bytes, max(0, source)))
                elif (load := self._loader.find(key)) is not None:
                    self._join(load, first + chunk)
                else:
                    resident.append(key)  # or staged by an engine: a miss
        if resident:  # held, so that making room for the rest does not evict it
            lease = self._core.acquire_each(STORAGE_OWNER, *pack_keys(resident), FOREVER).lease
            if lease:
                self._leases.append(lease)
        if targets:
            load = BatchLoad(targets, reserved.reservation, width * count, self._runners, self._ask_instead)
            self._join(load, first)
            self._loader.start(load)
            self._place.used_by(load.done)
            self._metrics.l2_prefetch_load_submitted.inc()
        return with_room

    def _join(self, load: BatchLoad, first_chunk: int) -> None:
        if load not in self._loads:
            self._loads[load] = first_chunk
            self._loader.join(load)

    def _keys_of(self, chunk: int) -> list[ObjectKey]:
        return [ObjectKey(namespace, self._hashes[chunk]) for namespace in self._namespaces.namespaces]
