"""Tells subscribers what this server's tiers have, in the order in which the indexes changed.

A topic's events begin with AllBlocksCleared, and so does what is told again after changes were lost. Objects of a cache
salt are not told: nothing says who reads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from lmcache.clock import Clock
from lmcache.core import limits
from lmcache.core.key_batch import ChunkHashes
from lmcache.core.object_changes import Run
from lmcache.errors import LMCacheError
from lmcache.kv_events.descriptions import Descriptions
from lmcache.kv_events.event_sockets import EventSockets
from lmcache.kv_events.holdings import Holdings, Model, Tier, model_of
from lmcache.kv_events.wire import AllBlocksCleared, BlockRemoved, Event, stored_events
from lmcache.telemetry.metrics import KVEventMetrics

logger = logging.getLogger("lmcache.kv_events")

_ROUND_SECONDS = 0.1
_AFTER_FAULT_SECONDS = 30.0
_STOP_SECONDS = 2.0


class KVEventAnnouncer:
    """A thread between `start` and `stop`. Nothing else waits for it."""

    def __init__(
        self,
        sockets: EventSockets,
        descriptions: Descriptions,
        tiers: Sequence[Tier],
        topic: str,
        chunk_tokens: int,
        metrics: KVEventMetrics,
        clock: Clock,
    ) -> None:
        """In `topic` the text {model} is replaced by the name of the model whose chunks an event names."""
        self._sockets = sockets
        self._descriptions = descriptions
        self._tiers = tiers
        self._topic = topic
        self._chunk_tokens = chunk_tokens
        self._metrics = metrics
        self._clock = clock
        self._holdings = Holdings(tiers)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lmcache-kv-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Idempotent."""
        self._stopping.set()
        self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._follow()
                except LMCacheError as error:  # L1 is closed, or a tier does not answer
                    logger.debug("Nothing can be told by KV events: %s", error)
                    self._stopping.wait(_AFTER_FAULT_SECONDS)
        except Exception:  # the root of the thread
            logger.exception("The thread of KV events has ended by a fault")
        finally:
            self._sockets.close()

    def _follow(self) -> None:
        """Tells everything, then what changes, until some of that is lost."""
        for topic in self._sockets.topics:
            self._sockets.publish(topic, [AllBlocksCleared()])
        cursors = [tier.source.cursor() for tier in self._tiers]
        for tier in self._tiers:
            start, more = 0, True
            while more and not self._stopping.is_set():
                page = tier.source.objects(start, limits.MAX_CHUNKS_PER_KV_EVENT_BATCH)
                self._tell(tier, page.runs)
                start, more = page.next_start, page.next_start > 0
                self._sockets.repeat(0.0)
        while not self._stopping.is_set():
            is_quiet = True
            for number, tier in enumerate(self._tiers):
                changes = tier.source.changes(cursors[number], limits.MAX_CHUNKS_PER_KV_EVENT_BATCH)
                if changes.lost:
                    self._metrics.kv_events_lost.inc()
                    return
                self._tell(tier, changes.runs)
                is_quiet &= changes.next_cursor == cursors[number]
                cursors[number] = changes.next_cursor
            if not self._sockets.repeat(_ROUND_SECONDS if is_quiet else 0.0) and is_quiet:
                self._stopping.wait(_ROUND_SECONDS)

    def _tell(self, tier: Tier, runs: Sequence[Run]) -> None:
        self._descriptions.take()
        events: dict[str, list[Event]] = {}
        told: set[tuple[Model, bool, bytes]] = set()  # ranks change one after the other
        for run in runs:
            namespace = run.namespace
            if namespace.cache_salt:
                continue
            if run.added:
                self._holdings.note(namespace)
            model = model_of(namespace)
            hashes = []
            present = self._holdings.has(tier.medium, namespace, run.hashes)
            for chunk_hash, is_there in zip(ChunkHashes(run.hashes), present, strict=True):
                name = (model, is_there, chunk_hash)
                if is_there == run.added and name not in told:
                    told.add(name)
                    hashes.append(chunk_hash)
            if hashes:
                topic = self._topic.replace("{model}", namespace.model_name)
                of_topic = events.setdefault(topic, [])
                of_topic += self._events(tier.medium, hashes, namespace.object_group, added=run.added)
        known = self._sockets.topics
        for topic, of_topic in events.items():
            self._sockets.publish(topic, of_topic if topic in known else [AllBlocksCleared(), *of_topic])

    def _events(self, medium: str, hashes: list[bytes], group: int, *, added: bool) -> Sequence[Event]:
        count = self._metrics.kv_events_published
        if not added:
            count.labels("removed").inc(len(hashes))
            return [BlockRemoved(hashes, medium, group)]
        described = [(chunk_hash, self._descriptions.of(chunk_hash)) for chunk_hash in hashes]
        without = sum(description is None for _, description in described)
        count.labels("undescribed").inc(without)
        count.labels("stored").inc(len(hashes) - without)
        return stored_events(described, medium, self._chunk_tokens, group)
