"""Admits prefetches: how many run at once, until when, and until whoever asked needs no answer any more."""

from __future__ import annotations

import asyncio
import logging
from itertools import compress

from lmcache.core import limits
from lmcache.core.key import ObjectKey
from lmcache.core.key_batch import KeyBatch
from lmcache.core.outcome import MissReason
from lmcache.l2.adapter import FollowsHints
from lmcache.tiering.checked_policies import CheckedPrefetchPolicy
from lmcache.tiering.context import TieringContext
from lmcache.tiering.l2_loads import L2Loader
from lmcache.tiering.prefetch import Prefetch, PrefetchRequest, PrefetchResult
from lmcache.tiering.prefetch_places import PrefetchPlaces, RequestPlace

log = logging.getLogger("lmcache.tiering")

IN_L1, IN_L2 = 1, 2  # where an object was found; 0: nowhere


class PrefetchController:
    """Belongs to the storage loop."""

    def __init__(
        self, context: TieringContext, loader: L2Loader, policy: CheckedPrefetchPolicy, *, max_in_flight: int
    ) -> None:
        self._context = context
        self._runners = context.runners
        self._metrics = context.metrics
        self._loader = loader
        self._policy = policy
        self._places = PrefetchPlaces(context.runners, max_in_flight, context.metrics, context.clock)
        self._running = 0  # requests, those that wait for a place included

    @property
    def waiting(self) -> int:
        return self._places.waiting

    @property
    def in_flight(self) -> int:
        return self._running - self._places.waiting

    async def run(self, request: PrefetchRequest, cancelled: asyncio.Event) -> PrefetchResult:
        """Never raises for a fault of L2. After `cancelled`, nothing stays leased."""
        width = len(request.keys.namespaces)
        chunks = request.keys.chunks - request.first_chunk
        if not chunks or not self._runners:
            return PrefetchResult(MissReason.NOT_STORED if chunks else None)
        log.debug(
            "Prefetch request submitted: %d total keys, %d L1 prefix hits, %d remaining for L2",
            request.keys.objects,
            request.first_chunk * width,
            chunks * width,
        )
        self._metrics.l2_prefetch_lookup.inc()
        if self._running >= limits.MAX_PREFETCHES_WAITING:
            return PrefetchResult(MissReason.L2_DEADLINE)
        namespaces = request.keys.namespaces.namespaces
        asked = [self._runners[index] for index in self._policy.order(namespaces)]
        runners = [runner for runner in asked if any(map(runner.serves, namespaces))]
        if request.hint is not None:  # whoever sent the request knows better than the order of the adapters
            runners.sort(key=lambda runner: not isinstance(runner.adapter, FollowsHints))
        place = RequestPlace(self._places, runners)
        prefetch = Prefetch(request, self._context, self._loader, runners, place)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.deadline_seconds
        self._running += 1
        work = loop.create_task(prefetch.run())
        stop = loop.create_task(cancelled.wait())
        try:
            await asyncio.wait({work, stop}, timeout=request.deadline_seconds, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                prefetch.reason = MissReason.L2_DEADLINE
                if loop.time() >= deadline:
                    self._metrics.timeouts.inc()
            elif work.exception() is not None:
                log.error("A prefetch failed", exc_info=work.exception())
                prefetch.reason = MissReason.L2_FAILED
            return PrefetchResult() if cancelled.is_set() else prefetch.lease()
        finally:
            stop.cancel()
            work.cancel()
            await asyncio.gather(stop, work, return_exceptions=True)
            place.leave()
            self._running -= 1
            prefetch.give_back()

    async def find(self, keys: KeyBatch, tiers: bytearray) -> None:
        """Writes IN_L2 over the zeros of `tiers`, [namespace][chunk], where some adapter has the object. What stands
        there when this is cancelled is true."""
        namespaces = keys.namespaces.namespaces
        for runner in (self._runners[index] for index in self._policy.order(namespaces)):
            if runner.is_read_only:  # what others have is not here
                continue
            missing = [place for place, tier in enumerate(tiers) if not tier]
            for first in range(0, len(missing), limits.MAX_L2_BATCH_OBJECTS):
                places = missing[first : first + limits.MAX_L2_BATCH_OBJECTS]
                exist = await runner.probe([keys.key(*divmod(place, keys.chunks)) for place in places])
                for place in compress(places, exist):
                    tiers[place] = IN_L2

    def note_use(self, request: PrefetchRequest, chunks: int) -> None:
        """The answer gave that many chunks. Loads touch what they load, batch by batch, and L1's part of a prompt is
        not loaded at all; so that no prefix leaves L2 before its suffix, the whole prompt is touched once more."""
        if not chunks:
            return
        batch = request.keys[: request.first_chunk + chunks]
        needed_from = [
            batch.namespaces.first_needed(position, batch.chunks) for position in range(len(batch.namespaces))
        ]
        keys = [
            ObjectKey(namespace, chunk_hash)
            for chunk, chunk_hash in enumerate(batch.hashes)
            for namespace, needed in zip(batch.namespaces.namespaces, needed_from, strict=True)
            if chunk >= needed
        ]
        for runner in self._runners:
            runner.touch(keys)

    def check_idle(self) -> None:
        """AssertionError unless no request is under way."""
        held = {"waiting": self.waiting, "running": self.in_flight, "questions": self._places.questions}
        assert not any(held.values()), f"The prefetch controller is not idle: {held}"
