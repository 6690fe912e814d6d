"""Every metric, declared once.

Names follow OpenTelemetry's Prometheus rule: `lmcache_mp.lookup_hit`, counted in tokens, is exposed as
`lmcache_mp_lookup_hit_tokens_total`. Bytes are bytes, GB/s are 10^9 bytes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import Metric

from lmcache.core.key import salt_digest

PREFIX = "lmcache_mp_"
SALT_LABEL = "cache_salt"
OVERFLOW_LABEL = "_other"
MAX_LABEL_SETS = 1024  # tenants and models come from outside: beyond this many pairs they share one series

_THROUGHPUT_BUCKETS_GB = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)

_AGE_BUCKETS_SECONDS = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 24 * 3600, 3 * 24 * 3600, 7 * 24 * 3600)


class BoundedCounter(Counter):
    """A counter whose label values come from requests. Label sets beyond MAX_LABEL_SETS are counted under `_other`."""

    def labels(self, *labelvalues: object, **labelkwargs: object) -> BoundedCounter:
        key = tuple(map(str, labelvalues)) or tuple(str(labelkwargs[name]) for name in self._labelnames)
        if key not in self._metrics and len(self._metrics) >= MAX_LABEL_SETS:
            key = (OVERFLOW_LABEL,) * len(key)
        return super().labels(*key)


class _HiddenSalts(CollectorRegistry):
    """Another registry, with digests for cache salts."""

    def __init__(self, of: CollectorRegistry) -> None:
        super().__init__()
        self._of = of

    def collect(self) -> Iterator[Metric]:
        for metric in self._of.collect():
            hidden = copy(metric)
            hidden.samples = [
                sample._replace(labels={**sample.labels, SALT_LABEL: _shown(sample.labels[SALT_LABEL])})
                if SALT_LABEL in sample.labels
                else sample
                for sample in metric.samples
            ]
            yield hidden


def _shown(salt: str) -> str:
    return salt if salt == OVERFLOW_LABEL else salt_digest(salt)


class Metrics:
    """One attribute a metric, named as documented without the prefix.

    `enabled=False` keeps every attribute working and exposes nothing.
    """

    def __init__(self, *, enabled: bool = True, service_instance_id: str = "") -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a time of creation beside every series doubles the page and tells nothing
        self.enabled = enabled
        self.registry = CollectorRegistry(auto_describe=False)
        self._refreshers: list[Callable[[], object]] = []
        tenant = ("model_name", SALT_LABEL)
        adapter = ("l2_name",)

        # lookups
        self.lookups = self._by_tenant("lookups", "Lookups answered", tenant)
        self.lookup_requested = self._by_tenant("lookup_requested", "Tokens that lookups asked for", tenant, "tokens")
        self.lookup_hit = self._by_tenant("lookup_hit", "Tokens found on any tier", tenant, "tokens")
        self.lookup_hit_l1 = self._by_tenant("lookup_hit_l1", "Tokens found in L1", tenant, "tokens")
        self.lookup_hit_l2 = self._by_tenant("lookup_hit_l2", "Tokens loaded from L2", tenant, "tokens")
        self.misses = self._counter("misses", "Lookups that missed tokens, by the reason of the first one", ("reason",))

        # L1
        self.l1_read = self._counter("l1_read", "Chunks leased from L1", unit="chunks")
        self.l1_write = self._counter("l1_write", "Chunks made resident in L1", unit="chunks")
        self.l1_adopted = self._counter("l1_adopted", "Objects taken over from a former server", unit="chunks")
        self.l1_evicted = self._counter("l1_evicted", "Objects evicted from L1", unit="chunks")
        self.l1_memory_usage_bytes = self._gauge("l1_memory_usage_bytes", "Bytes that L1 holds, free slots not counted")
        self.l1_usage_ratio = self._gauge("l1_usage_ratio", "Used bytes of L1 over its configured size, 0 to 1")
        self.l1_allocation_failure = self._counter(
            "l1_allocation_failure", "Chunks that found no room in L1 even after eviction", unit="chunks"
        )
        self.l1_read_failure = self._counter(
            "l1_read_failure", "Leased chunks that an engine reported as unreadable", unit="chunks"
        )
        self.quarantined_bytes = self._gauge(
            "quarantined_bytes", "Bytes reserved by a silent worker, held until it is known to be gone"
        )

        self.l1_chunk_lifetime = self._ages("l1_chunk_lifetime", "From store to eviction, of sampled objects")
        self.l1_chunk_idle_before_evict = self._ages(
            "l1_chunk_idle_before_evict", "From last use to eviction, of sampled objects"
        )
        self.l1_chunk_reuse_gap = self._ages("l1_chunk_reuse_gap", "Between two uses, of sampled objects")
        self.l1_eviction_age_seconds = self._gauge(
            "l1_eviction_age_seconds", "How long the latest sampled objects evicted had not been used, mean"
        )
        self.quota_limit_bytes = self._gauge(
            "quota_limit_bytes", "Bytes that a cache salt may keep in L1", (SALT_LABEL,)
        )
        self.quota_usage_bytes = self._gauge("quota_usage_bytes", "Bytes that a cache salt takes in L1", (SALT_LABEL,))

        # engines
        self.num_submitted_stores = self._counter("num_submitted_stores", "Reservations that were handed slots")
        self.num_finished_stores = self._counter("num_finished_stores", "Reservations that ended by commit or abort")
        self.num_submitted_retrieves = self._counter("num_submitted_retrieves", "Leases given to engines")
        self.num_finished_retrieves = self._counter("num_finished_retrieves", "Leases that engines gave back")
        self.calls = self._counter("calls", "Calls answered, by method and status", ("method", "status"))
        self.protocol_errors = self._counter("protocol_errors", "Messages refused or dropped, by error code", ("code",))
        self.timeouts = self._counter("timeouts", "Operations that ran into their deadline")

        # L2
        self.l2_store_submitted = self._counter("l2_store_submitted", "Store batches begun", adapter, "requests")
        self.l2_store_completed = self._counter("l2_store_completed", "Store batches ended", adapter, "requests")
        self.l2_store_lost = self._counter(
            "l2_store_lost", "Objects that left L1 and that no adapter took", unit="chunks"
        )
        self.l2_store_unstored = self._gauge(
            "l2_store_unstored", "Objects that stay in L1 because no adapter took them, to be offered again"
        )
        self.policy_faults = self._counter(
            "policy_faults", "Answers of a policy that could not be used; the default's was", ("policy",)
        )
        self.l2_store_dropped = self._counter(
            "l2_store_dropped", "Objects that did not reach an adapter, by reason", ("reason",)
        )
        self.l2_load_completed = self._counter("l2_load_completed", "Load batches ended", adapter, "requests")
        self.l2_prefetch_lookup = self._counter("l2_prefetch_lookup", "Prefetches asked for", unit="requests")
        self.l2_prefetch_load_submitted = self._counter(
            "l2_prefetch_load_submitted", "Load batches begun by prefetches", unit="requests"
        )
        self.l2_prefetch_load_completed = self._counter(
            "l2_prefetch_load_completed", "Objects loaded into L1 by prefetches", unit="chunks"
        )
        self.l2_prefetch_failure = self._counter(
            "l2_prefetch_failure", "Objects that prefetches could not load, by reason", ("reason",), "chunks"
        )
        self.l2_evicted_objects = self._counter("l2_evicted_objects", "Objects evicted from L2", adapter)
        self.l2_usage_bytes = self._gauge("l2_usage_bytes", "Bytes that the adapter holds", adapter)
        self.l2_store_throughput = self._throughput("l2_store_throughput", "Bytes stored over time of a batch", adapter)
        self.l2_load_throughput = self._throughput("l2_load_throughput", "Bytes loaded over time of a batch", adapter)
        self.num_inflight_l2_stores = self._gauge("num_inflight_l2_stores", "Store batches under way", adapter)
        self.num_inflight_l2_loads = self._gauge("num_inflight_l2_loads", "Load batches under way", adapter)
        self.l2_full = self._counter("l2_full", "Objects not stored because the backend is full", adapter)
        self.l2_is_full = self._gauge("l2_is_full", "1 while nothing is stored because the backend is full", adapter)
        self.l2_breaker_open = self._gauge("l2_breaker_open", "1 while the adapter is left alone after faults", adapter)
        self.l2_buffered_fallbacks = self._gauge(
            "l2_buffered_fallbacks", "Operations that wanted O_DIRECT and went through the page cache", adapter
        )
        self.corrupt_frames = self._counter("corrupt_frames", "Frames that did not verify", ("tier",))

        # events
        self.event_bus_queue_depth = self._gauge("event_bus_queue_depth", "Events waiting for their subscribers")
        self.event_bus_dropped_events = self._counter("event_bus_dropped_events", "Events dropped at a full queue")
        self.event_bus_subscriber_exceptions = self._counter(
            "event_bus_subscriber_exceptions", "Faults raised by a subscriber", ("subscriber_name",)
        )

        self.internal_faults = self._counter(
            "internal_faults", "Faults that nobody expected; the log has each", ("logger",)
        )

        if enabled:  # the series by which OpenTelemetry carries resource attributes to Prometheus
            target = Info("target", "What exposes these metrics", registry=self.registry)
            target.info({"service_name": "lmcache", "service_instance_id": service_instance_id})

    def on_scrape(self, refresh: Callable[[], object]) -> Callable[[], None]:
        """Calls `refresh` before every exposition, for figures that are read rather than counted, until the function
        that is returned is called."""
        self._refreshers.append(refresh)
        return lambda: self._refreshers.remove(refresh)

    def exposition(self, *, hides_salts: bool = False) -> bytes:
        """The Prometheus text format (0.0.4). With `hides_salts` digests stand for cache salts."""
        for refresh in list(self._refreshers):
            refresh()
        return generate_latest(_HiddenSalts(self.registry) if hides_salts else self.registry)

    def _registry(self) -> CollectorRegistry | None:
        return self.registry if self.enabled else None

    def _counter(self, name: str, text: str, labels: Sequence[str] = (), unit: str = "") -> Counter:
        return Counter(PREFIX + name, text, labels, unit=unit, registry=self._registry())

    def _by_tenant(self, name: str, text: str, labels: Sequence[str], unit: str = "") -> BoundedCounter:
        return BoundedCounter(PREFIX + name, text, labels, unit=unit, registry=self._registry())

    def _gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(PREFIX + name, text, labels, registry=self._registry())

    def _ages(self, name: str, text: str) -> Histogram:
        return Histogram(PREFIX + name, text, unit="seconds", buckets=_AGE_BUCKETS_SECONDS, registry=self._registry())

    def _throughput(self, name: str, text: str, labels: Sequence[str]) -> Histogram:
        return Histogram(
            PREFIX + name, text, labels, unit="GB_per_second", buckets=_THROUGHPUT_BUCKETS_GB, registry=self._registry()
        )
