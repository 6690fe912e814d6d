"""Counts each request once, however often it is asked about.

An engine asks again when another request has stored what it waits for, when its input grows, or when it was preempted.
A request counts with its longest lookup and the best answer before it ran. The reason is that of its first miss.
"""

from __future__ import annotations

from collections.abc import Callable

from lmcache._native import SeenChunks
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.core.key_batch import NamespaceSet
from lmcache.core.outcome import MissReason
from lmcache.core.rounding import div_ceil
from lmcache.service.context import ServiceContext
from lmcache.service.instances import TenantCounters
from lmcache.service.session import CountedLookup, LeasedPrefix, Session

_NOTHING = CountedLookup(0, 0, 0)
_TIERS = ("l1", "l2")
_MOST_PREFILL_SECONDS = 3600.0  # of one request; more is no measure


class LookupCounts:
    """Belongs to the message loop."""

    def __init__(self, context: ServiceContext) -> None:
        metrics = context.metrics
        self._metrics = metrics
        self._chunk_tokens = context.hasher.chunk_tokens
        self._misses = {reason: metrics.misses.labels(reason.value) for reason in MissReason}
        self._hit_bytes = [metrics.tier_hit.labels(tier) for tier in _TIERS]
        self._prefill_saved = [metrics.prefill_saved.labels(tier) for tier in _TIERS]
        self._seen = SeenChunks() if context.settings.counts_ceiling else None
        self._requested_chunks = self._hit_chunks = self._ceiling_chunks = 0.0

    def count(
        self,
        session: Session,
        counters: TenantCounters | None,
        namespaces: NamespaceSet | None,
        requested: int,
        hit: int,
        hit_l1: int,
        reason: MissReason | None,
        *,
        resumed: bool,
        partial_tokens: int = 0,
    ) -> None:
        """An answer, in chunks; the first `hit_l1` were in L1. Without counters it is none to a request.
        `partial_tokens`: of the last chunk that was requested; 0: it is a full one."""
        if hit:
            self._metrics.l1_read.inc(hit)
        before = session.counted
        if counters is None or (resumed and before is not None):
            return
        if before is None:
            counters.lookups.inc()
            before = _NOTHING
        new_requested = max(0, requested - before.requested)
        new_hit = max(0, hit - before.hit)
        new_l1 = min(new_hit, max(0, hit_l1 - before.hit_l1))
        session.counted = CountedLookup(before.requested + new_requested, before.hit + new_hit, before.hit_l1 + new_l1)
        lacking_tokens = self._chunk_tokens - partial_tokens if partial_tokens else 0

        def tokens(first: int, chunks: int) -> int:
            """Counts the tokens of so many chunks from the `first` on."""
            has_last = first < requested <= first + chunks
            return chunks * self._chunk_tokens - (lacking_tokens if has_last else 0)

        if new_requested:
            counters.requested.inc(tokens(before.requested, new_requested))
        if new_hit and namespaces is not None:
            self._count_hit(counters, namespaces, hit, new_hit, new_l1, tokens)
        if reason is not None and (before is _NOTHING or new_requested):
            self._misses[reason].inc()
        if new_requested and namespaces is not None and self._seen is not None:
            self._observe(self._seen, session, namespaces, before.requested, new_requested, new_hit)

    def count_probe(
        self, counters: TenantCounters, namespaces: NamespaceSet, tiers: list[int], object_tokens: int
    ) -> None:
        """What an engine asked for that names its objects itself, and goes on to load: the leading ones that there are.
        `tiers` as in `ProbeKeysReply`, one a chunk."""
        hit = next((chunk for chunk, tier in enumerate(tiers) if not tier), len(tiers))
        counters.lookups.inc()
        counters.requested.inc(len(tiers) * object_tokens)
        counters.hit.inc(hit * object_tokens)
        for tier, (tokens, size_bytes) in enumerate(
            zip((counters.hit_l1, counters.hit_l2), self._hit_bytes, strict=True), start=1
        ):
            chunks = tiers[:hit].count(tier)
            tokens.inc(chunks * object_tokens)
            size_bytes.inc(chunks * namespaces.chunk_bytes)
        if hit < len(tiers):
            self._misses[MissReason.NOT_STORED].inc()

    def count_miss(self, reason: MissReason) -> None:
        self._misses[reason].inc()

    def count_loaded(self, prefix: LeasedPrefix, tokens: int, prefill_seconds: float, held_seconds: float) -> None:
        """An engine held the lease for so long, loaded that many tokens at the end of the hit, and would have computed
        them in `prefill_seconds`."""
        if not 0 < tokens <= prefix.chunks * self._chunk_tokens:
            return
        if held_seconds > 0:
            first = prefix.chunks - div_ceil(tokens, self._chunk_tokens)
            size_bytes = prefix.keys.namespaces.hit_bytes(first, prefix.chunks, prefix.chunks)
            self._metrics.l0_l1_load_throughput.observe(size_bytes / held_seconds / 1e9)
        if not 0 < prefill_seconds <= _MOST_PREFILL_SECONDS:
            return
        from_l2 = min(tokens, (prefix.chunks - prefix.l1_chunks) * self._chunk_tokens)
        for counter, part in zip(self._prefill_saved, (tokens - from_l2, from_l2), strict=True):
            if part:
                counter.inc(prefill_seconds * part / tokens)

    def publish(self) -> None:
        """Figures that are read. Any thread."""
        if self._seen is None:
            return
        self._metrics.lookup_ceiling_sampled_ratio.set(self._seen.rate())
        if self._requested_chunks:
            distance = (self._ceiling_chunks - self._hit_chunks) / self._requested_chunks
            self._metrics.lookup_ceiling_distance_ratio.set(max(0.0, distance))

    def _count_hit(
        self,
        counters: TenantCounters,
        namespaces: NamespaceSet,
        hit: int,
        new_hit: int,
        new_l1: int,
        tokens: Callable[[int, int], int],
    ) -> None:
        first = hit - new_hit
        counters.hit.inc(tokens(first, new_hit))
        if new_l1:
            counters.hit_l1.inc(tokens(first, new_l1))
            self._hit_bytes[0].inc(namespaces.hit_bytes(first, first + new_l1, hit))
        if new_hit > new_l1:
            counters.hit_l2.inc(tokens(first + new_l1, new_hit - new_l1))
            self._hit_bytes[1].inc(namespaces.hit_bytes(first + new_l1, hit, hit))

    def _observe(
        self, seen: SeenChunks, session: Session, namespaces: NamespaceSet, first: int, count: int, hit: int
    ) -> None:
        """Notes full chunks alone: a partial one is loaded once, by the engine that it was stored for."""
        count = max(0, min(count, session.chain.chunks - first))
        hit = min(hit, count)
        hashes = session.chain.hashes[first * CHUNK_HASH_BYTES : (first + count) * CHUNK_HASH_BYTES]
        counts = seen.observe(namespaces.scope, hashes)
        self._requested_chunks += count
        self._hit_chunks += hit
        if counts.requested:
            self._ceiling_chunks += counts.seen
            self._metrics.lookup_ceiling.inc(counts.seen * self._chunk_tokens)
