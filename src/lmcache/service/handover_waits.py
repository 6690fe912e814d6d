"""Waits for KV that one engine is storing for another: prefill and decode apart, at one server.

A prefill engine names itself in its answer, and says how many tokens it stores. Their chunks may be staged when the
decode engine looks them up, or ordered and not even reserved. The lookup then waits for them in prefix order, beside
the message loop: until they are resident, until a store of one of them has ended without it, until the prefill engine
has gone, or until its time is over. Nothing is promised beyond that: what is not there is a miss.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from lmcache._native import Fate
from lmcache.core import limits
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.core.key_batch import KeyBatch
from lmcache.service.context import ServiceContext
from lmcache.service.instances import InstanceRegistry

log = logging.getLogger("lmcache.service")

LOOK_SECONDS = 0.005


class WaitEnd(str, enum.Enum):
    STORED = "stored"
    GONE = "gone"
    LATE = "late"


@dataclass(eq=False)
class _Wait:
    """`place`: (chunk, namespace) of the first object that was missing at the last look."""

    keys: KeyBatch
    instance_id: str
    began_at: float
    deadline: float
    on_end: Callable[[], None] = field(repr=False)
    place: tuple[int, int] = (0, 0)
    is_staged: bool = False  # that object, at the last look
    progress_at: float = 0.0  # when it was last staged, or another one


class HandoverWaits:
    """Belongs to the message loop."""

    def __init__(self, context: ServiceContext, registry: InstanceRegistry) -> None:
        self._core = context.l1.core
        self._loop = context.loop
        self._clock = context.clock
        self._metrics = context.metrics
        self._registry = registry
        self._waits: dict[_Wait, None] = {}  # the oldest first
        self._is_looking = False

    def __len__(self) -> int:
        return len(self._waits)

    def begin(
        self, keys: KeyBatch, instance_id: str, seconds: float, on_end: Callable[[], None]
    ) -> Callable[[], None] | None:
        """Waits for these chunks, all of which the instance has announced. `on_end` is called once, later, unless the
        function that this returns is called first. None: there is nothing to wait for, as where the instance stores
        in other namespaces, or too many wait already."""
        if not keys.chunks or seconds <= 0 or len(self._waits) >= limits.MAX_HANDOVER_WAITS:
            return None
        if not self._registry.stores_in(instance_id, keys.namespaces):
            return None
        now_seconds = self._clock.monotonic()
        last = keys.chunks - 1
        # Of a group with a tail nothing but the end of a hit may be stored.
        first = last if keys.namespaces.tail_chunks else 0
        wait = _Wait(keys, instance_id, now_seconds, now_seconds + seconds, on_end, (first, 0), False, now_seconds)
        if self._outcome(wait, now_seconds) is not None:
            return None
        self._waits[wait] = None
        self._look_later()
        return lambda: self._waits.pop(wait, None)

    def _look_later(self) -> None:
        if not self._is_looking and self._waits:
            self._is_looking = True
            self._loop.call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._is_looking = False
        now_seconds = self._clock.monotonic()
        ended = [(wait, end) for wait in self._waits if (end := self._end_of(wait, now_seconds)) is not None]
        for wait, end in ended:
            del self._waits[wait]
            self._metrics.handover_waits.labels(end.value).inc()
            self._metrics.handover_wait.observe(now_seconds - wait.began_at)
            self._loop.post(wait.on_end)
        self._look_later()

    def _end_of(self, wait: _Wait, now_seconds: float) -> WaitEnd | None:
        try:
            return self._outcome(wait, now_seconds)
        except Exception:  # the root of a request: no other one waits for ever because of it
            log.exception("A wait for chunks that another engine stores failed")
            return WaitEnd.GONE

    def _outcome(self, wait: _Wait, now_seconds: float) -> WaitEnd | None:
        """None: it goes on."""
        place = self._first_missing(wait)
        if place is None:
            return WaitEnd.STORED
        if place != wait.place:
            wait.place, wait.is_staged, wait.progress_at = place, False, now_seconds
        was_staged, wait.is_staged = wait.is_staged, self._is_staged(wait)
        if now_seconds >= wait.deadline:
            return WaitEnd.LATE
        if wait.is_staged:
            wait.progress_at = now_seconds
            return None
        instance = self._registry.instances.get(wait.instance_id)
        if instance is not None and any(worker.reservations for worker in instance.workers.values()):
            wait.progress_at = now_seconds  # it stores one after the other: the turn of this one is still to come
        is_late = now_seconds - wait.progress_at >= limits.HANDOVER_START_SECONDS
        if was_staged or is_late or instance is None or not instance.workers:
            return WaitEnd.GONE
        return None

    def _first_missing(self, wait: _Wait) -> tuple[int, int] | None:
        """From the place of the wait on. O(1) while that one is missing."""
        digests, hashes = wait.keys.namespaces.digests, wait.keys.hashes
        chunk = wait.place[0]
        while True:
            resident = self._core.resident_each(digests, hashes[chunk] * len(wait.keys.namespaces))
            if (namespace := resident.find(0)) >= 0:
                return chunk, namespace
            chunk += 1 + self._core.probe(digests, hashes[chunk + 1 :].packed)
            if chunk >= wait.keys.chunks:
                return None

    def _is_staged(self, wait: _Wait) -> bool:
        chunk, namespace = wait.place
        first = namespace * CHUNK_HASH_BYTES
        digest = wait.keys.namespaces.digests[first : first + CHUNK_HASH_BYTES]
        return self._core.fate_of(digest, wait.keys.hashes[chunk]) is Fate.BEING_STORED
