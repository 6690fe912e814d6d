"""Tells subscribers what this server's tiers have, in the order in which the indexes changed.

A topic's events begin with AllBlocksCleared, and so does what is told again after changes were lost. Objects of a cache
salt are not told: nothing says who reads. What was there before is told slowly, beside what changes.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

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
        holdings: Holdings,
        topic: str,
        chunk_tokens: int,
        metrics: KVEventMetrics,
        clock: Clock,
    ) -> None:
        """In `topic` the text {model} is replaced by the name of the model whose chunks an event names."""
        self.descriptions = descriptions
        self.holdings = holdings
        self._sockets = sockets
        self._tiers = holdings.tiers
        self._topic = topic
        self._chunk_tokens = chunk_tokens
        self._metrics = metrics
        self._clock = clock
        self._told_at = float("-inf")
        self._retelling_seconds = limits.KV_EVENT_RETELLING_SECONDS  # before the next
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lmcache-kv-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Idempotent. The thread closes the sockets; without one this does."""
        self._stopping.set()
        if self._thread.ident is None:
            self._sockets.close()
        else:
            self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._follow()
                    pause_seconds = self._seconds_until_retelling()
                except LMCacheError as error:  # L1 is closed, or a tier does not answer
                    logger.debug("Nothing can be told by KV events: %s", error)
                    pause_seconds = _AFTER_FAULT_SECONDS
                if not self._stopping.is_set():
                    for topic in self._sockets.topics:
                        self._sockets.publish(topic, [AllBlocksCleared()])
                    self._rest(pause_seconds)
        except Exception:  # the root of the thread
            logger.exception("The thread of KV events has ended by a fault")
        finally:
            self._sockets.close()

    def _seconds_until_retelling(self) -> float:
        """Changes that are lost time and again do not keep this thread busy."""
        most_seconds = limits.MAX_KV_EVENT_RETELLING_SECONDS
        if self._clock.monotonic() - self._told_at > 2 * most_seconds:
            self._retelling_seconds = limits.KV_EVENT_RETELLING_SECONDS
        pause_seconds = self._retelling_seconds
        self._retelling_seconds = min(2 * pause_seconds, most_seconds)
        return pause_seconds

    def _rest(self, seconds: float) -> None:
        deadline = self._clock.monotonic() + seconds
        while not self._stopping.is_set() and (left := deadline - self._clock.monotonic()) > 0:
            self._wait(min(left, _ROUND_SECONDS))

    def _wait(self, seconds: float) -> None:
        """At most. Answers a request for what was missed."""
        if not self._sockets.repeat(seconds):
            self._stopping.wait(seconds)

    def _follow(self) -> None:
        """Tells everything, and what changes from now on, until some of that is lost."""
        self._told_at = self._clock.monotonic()
        self.holdings.learn()
        cursors = [tier.source.cursor() for tier in self._tiers]
        listing = _Listing(self._tiers, self._clock)
        for _ in self._tiers:  # before any change: what a source was asked before its listing is void
            listing.tell_page(self._tell)
        while not self._stopping.is_set() and not self.holdings.learn():
            is_quiet = True
            for number, tier in enumerate(self._tiers):
                changes = tier.source.changes(cursors[number], limits.MAX_CHUNKS_PER_KV_EVENT_BATCH)
                if changes.lost:
                    self._metrics.kv_events_lost.inc()
                    return
                self._tell(tier, changes.runs)
                is_quiet &= changes.next_cursor == cursors[number]
                cursors[number] = changes.next_cursor
            wait_seconds = min(listing.seconds_until_page(), _ROUND_SECONDS) if is_quiet else 0.0
            if not listing.seconds_until_page():
                listing.tell_page(self._tell)
            self._wait(wait_seconds)

    def _tell(self, tier: Tier, runs: Sequence[Run]) -> None:
        self.descriptions.take()
        events: dict[str, list[Event]] = {}
        told: set[tuple[Model, bool, bytes]] = set()  # ranks change one after the other
        for run in runs:
            namespace = run.namespace
            if namespace.cache_salt:
                continue
            if run.added:
                self.holdings.note(namespace)
            model = model_of(namespace)
            hashes = []
            present = self.holdings.has(tier.medium, namespace, run.hashes)
            for chunk_hash, is_there in zip(ChunkHashes(run.hashes), present, strict=True):
                name = (model, is_there, chunk_hash)
                if is_there == run.added and name not in told:
                    told.add(name)
                    hashes.append(chunk_hash)
            if hashes:
                topic = self._topic.replace("{model}", namespace.model_name)
                of_topic = events.setdefault(topic, [])
                of_topic += self._events(tier.medium, hashes, namespace.object_group, added=run.added)
        for topic, of_topic in events.items():
            is_known = topic in self._sockets.topics
            self._sockets.publish(topic, of_topic if is_known else [AllBlocksCleared(), *of_topic])

    def _events(self, medium: str, hashes: list[bytes], group: int, *, added: bool) -> Sequence[Event]:
        count = self._metrics.kv_events_published
        if not added:
            count.labels("removed").inc(len(hashes))
            return [BlockRemoved(hashes, medium, group)]
        described = [(chunk_hash, self.descriptions.of(chunk_hash)) for chunk_hash in hashes]
        without = sum(description is None for _, description in described)
        count.labels("undescribed").inc(without)
        count.labels("stored").inc(len(hashes) - without)
        return stored_events(described, medium, self._chunk_tokens, group)


class _Listing:
    """What tiers have: the first page of each, then the others, KV_EVENT_LISTED_PER_SECOND chunks at most."""

    def __init__(self, tiers: Sequence[Tier], clock: Clock) -> None:
        self._clock = clock
        self._pages = deque((tier, 0) for tier in tiers)  # where the next one begins
        self._next_at = clock.monotonic()

    def seconds_until_page(self) -> float:
        """Infinity after the last one."""
        return max(0.0, self._next_at - self._clock.monotonic()) if self._pages else float("inf")

    def tell_page(self, tell: Callable[[Tier, Sequence[Run]], None]) -> None:
        tier, start = self._pages.popleft()
        page = tier.source.objects(start, limits.MAX_CHUNKS_PER_KV_EVENT_BATCH)
        tell(tier, page.runs)
        if page.next_start:
            self._pages.append((tier, page.next_start))
        spacing_seconds = limits.MAX_CHUNKS_PER_KV_EVENT_BATCH / limits.KV_EVENT_LISTED_PER_SECOND
        self._next_at = max(self._next_at, self._clock.monotonic()) + spacing_seconds
