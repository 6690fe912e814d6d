"""Every metric, declared once.

Names follow OpenTelemetry's Prometheus rule: `lmcache_mp.lookup_hit`, counted in tokens, is exposed as
`lmcache_mp_lookup_hit_tokens_total`. Bytes are bytes, GB/s are 10^9 bytes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

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
from prometheus_client.registry import Collector

from lmcache.core.key import SaltDigest
from lmcache.environment import SYSTEM
from lmcache.telemetry.salt_series import SaltSeries

T = TypeVar("T")

PREFIX = "lmcache_mp_"
SALT_LABEL = "cache_salt"
OVERFLOW_LABEL = "_other"
# Tenants and models come from outside: beyond this many pairs new tenants share a series of their model, and beyond
# that many models more new models share one, too.
MAX_LABEL_SETS = 1024
MAX_MODELS_BEYOND = 64

_ADAPTER = ("l2_name",)
_TIERS = ("l1", "l2", "socket")
_TRANSPORTS = ("tcp", "shared_memory", "nixl", "mooncake_te")
_PEER_FAULTS = ("deadline", "protocol", "connection", "nothing_given", "refused", "transfer_engine")

_THROUGHPUT_BUCKETS_GB = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)

_LATENCY_BUCKETS_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 30)

_AGE_BUCKETS_SECONDS = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 24 * 3600, 3 * 24 * 3600, 7 * 24 * 3600)


class BoundedCounter(Counter):
    """A counter whose label values, a model and a cache salt, come from requests. Pairs beyond MAX_LABEL_SETS are
    counted under `_other` in place of the salt, and beyond MAX_MODELS_BEYOND of those in place of the model, too."""

    def labels(self, *labelvalues: object, **labelkwargs: object) -> BoundedCounter:
        key = tuple(map(str, labelvalues)) or tuple(str(labelkwargs[name]) for name in self._labelnames)
        if key not in self._metrics and len(self._metrics) >= MAX_LABEL_SETS:
            model, _ = key
            key = (model, OVERFLOW_LABEL)
            if key not in self._metrics and len(self._metrics) >= MAX_LABEL_SETS + MAX_MODELS_BEYOND:
                key = (OVERFLOW_LABEL, OVERFLOW_LABEL)
        return super().labels(*key)


class SaltGauge(Gauge):
    """A gauge of cache salts, all of which are set at once."""

    def replace(self, values: Mapping[str, float]) -> None:
        """Ends the series of other salts. Whoever reads meanwhile finds every salt that was there and stays. For one
        thread at a time."""
        for (salt,) in list(self._metrics):
            if salt not in values:
                self.remove(salt)
        for salt, value in values.items():
            self.labels(salt).set(value)


class _WithoutSalts(CollectorRegistry):
    """Those of these collectors that have no series of cache salts."""

    def __init__(self, collectors: Sequence[Collector]) -> None:
        super().__init__()
        self._collectors = collectors

    def collect(self) -> Iterator[Metric]:
        for collector in self._collectors:
            yield from collector.collect()


def _has_salts(collector: object) -> bool:
    return SALT_LABEL in getattr(collector, "_labelnames", ())


# Each declares a metric of a group; `_Group` gives it the name of its attribute.
def _declared(kind: Callable[..., T], text: str, labels: Sequence[str] = (), **options: object) -> T:
    return cast(T, partial(kind, documentation=text, labelnames=labels, **options))


def _counter(text: str, *labels: str, unit: str = "") -> Counter:
    return _declared(Counter, text, labels, unit=unit)


def _by_tenant(text: str, unit: str = "") -> Counter:
    return _declared(BoundedCounter, text, ("model_name", SALT_LABEL), unit=unit)


def _gauge(text: str, *labels: str) -> Gauge:
    return _declared(Gauge, text, labels)


def _by_salt(text: str) -> SaltGauge:
    return _declared(SaltGauge, text, (SALT_LABEL,))


def _ages(text: str) -> Histogram:
    return _declared(Histogram, text, unit="seconds", buckets=_AGE_BUCKETS_SECONDS)


def _latencies(text: str, *labels: str) -> Histogram:
    return _declared(Histogram, text, labels, unit="seconds", buckets=_LATENCY_BUCKETS_SECONDS)


def _throughput(text: str, *labels: str) -> Histogram:
    return _declared(Histogram, text, labels, unit="GB_per_second", buckets=_THROUGHPUT_BUCKETS_GB)


class _Group:
    """Metrics of one part of the server, each named as its attribute; what two groups share is one metric."""

    def __init__(self, registry: CollectorRegistry | None, built: dict[str, object]) -> None:
        for name, declaration in vars(type(self)).items():
            if isinstance(declaration, partial):
                if name not in built:
                    built[name] = declaration(PREFIX + name, registry=registry)
                setattr(self, name, built[name])


_TIMEOUTS = _counter("Operations that ran into their deadline")
_CORRUPT_FRAMES = _counter("Frames that did not verify", "tier")


class FaultMetrics(_Group):
    """Faults."""

    internal_faults = _counter("Faults that nobody expected; the log has each", "logger")


class ServiceMetrics(_Group):
    """Lookups, leases and stores of engines."""

    lookups = _by_tenant("Lookups answered")
    lookup_requested = _by_tenant("Tokens that lookups asked for", "tokens")
    lookup_hit = _by_tenant("Tokens found on any tier", "tokens")
    lookup_hit_l1 = _by_tenant("Tokens found in L1", "tokens")
    lookup_hit_l2 = _by_tenant("Tokens loaded from L2", "tokens")
    tier_hit = _counter("Bytes of the hits of each tier", "tier", unit="bytes")
    prefill_saved = _counter(
        "Time that computing what was loaded would have taken, by engines that measured their prefill speed",
        "tier",
        unit="seconds",
    )
    lookup_ceiling = _counter("Tokens that an endless cache would have found, estimated", unit="tokens")
    lookup_ceiling_sampled_ratio = _gauge("Share of the chunks that this estimate is made from, 0 to 1")
    lookup_ceiling_distance_ratio = _gauge("Hit rate of an endless cache less the hit rate, since the start")
    misses = _counter("Requests that missed tokens, by the reason of the first one", "reason")
    instances = _gauge("Engines that are registered")
    instances_silent = _gauge("Engines of which the scheduler side or a worker is registered and misses its heartbeats")
    registrations_lost = _counter("Scheduler sides and workers that vanished without taking their leave")
    sessions = _gauge("Requests that engines have open")
    leases = _gauge("Leases that engines hold")
    reservations = _gauge("Reservations that workers fill")
    handover_waits = _counter(
        "Lookups that waited for chunks that another engine was storing for them, by how that ended: all were stored, "
        "their store did not come or failed (gone), or the time was over (late)",
        "outcome",
    )
    handover_wait = _latencies("How long lookups waited for such chunks")
    lease = _latencies("How long engines held leases")
    lease_oldest_seconds = _gauge("Age of the oldest lease")
    reservation = _latencies("From a reservation to its commit")
    reservation_oldest_seconds = _gauge("Age of the oldest reservation")
    l1_read = _counter("Chunks leased from L1", unit="chunks")
    l1_write = _counter("Chunks made resident in L1", unit="chunks")
    l1_read_failure = _counter("Leased chunks that an engine reported as unreadable", unit="chunks")
    chunk_changes = _counter("Chunks of which engines with KV events were told where they are now", unit="chunks")
    chunk_changes_lost = _counter("Times that such an engine had to ask for all its chunks again")
    kv_events = _counter(
        "Chunks that engines announced to routers (stored) or took back (removed)", "type", unit="chunks"
    )
    kv_events_skipped = _counter(
        "Chunks that engines announced to nobody: they never saw their tokens (unknown), or had no room for them "
        "(no_room)",
        "reason",
        unit="chunks",
    )
    request_telemetry = _counter(
        "Requests of which engines told a proxy that they are stored (told), or could not tell it (lost)",
        "result",
        unit="requests",
    )
    num_submitted_stores = _counter("Reservations that were handed slots")
    num_finished_stores = _counter("Reservations that ended, by their commit or with their worker")
    num_submitted_retrieves = _counter("Leases given to engines")
    num_finished_retrieves = _counter("Leases that engines gave back")
    l0_l1_store_throughput = _throughput("Bytes that a worker stored over time from its reservation to its commit")
    l0_l1_load_throughput = _throughput("Bytes of a hit that an engine loaded over time that it held the lease")
    timeouts = _TIMEOUTS
    corrupt_frames = _CORRUPT_FRAMES


class RpcMetrics(_Group):
    """The message loop."""

    calls = _counter("Calls answered, by method and status", "method", "status")
    call = _latencies("From a call's arrival to its answer, waiting for L2 included", "method")
    protocol_errors = _counter("Messages refused or dropped, by error code", "code")


class L1Metrics(_Group):
    """L1's memory and its objects."""

    l1_adopted = _counter("Objects recovered from a previous server", unit="chunks")
    l1_evicted = _counter("Objects evicted from L1", unit="chunks")
    l1_memory_usage_bytes = _gauge("Bytes that L1 holds, free slots not counted")
    l1_usage_ratio = _gauge("Used bytes of L1 over its configured size, 0 to 1")
    l1_allocation_failure = _counter("Chunks that found no room in L1 even after eviction", unit="chunks")
    l1_large_page_ratio = _gauge("Share of L1's memory in use that the kernel has in large pages, 0 to 1")
    quarantined_bytes = _gauge("Bytes reserved by a silent worker, held until it is known to be gone")
    l1_chunk_lifetime = _ages("From store to eviction, of sampled objects")
    l1_chunk_idle_before_evict = _ages("From last use to eviction, of sampled objects")
    l1_chunk_reuse_gap = _ages("Between two uses, of sampled objects")
    l1_eviction_age_seconds = _gauge("How long the latest sampled objects evicted had not been used, mean")


class QuotaMetrics(_Group):
    """Cache salts that have a quota."""

    quota_limit_bytes = _by_salt("Bytes that a cache salt may keep in L1")
    quota_usage_bytes = _by_salt("Bytes that a cache salt takes in L1")


class L2Metrics(_Group):
    """Stores, prefetches and what each adapter does."""

    l2_store_submitted = _counter("Store batches begun", *_ADAPTER, unit="requests")
    l2_store_completed = _counter("Store batches ended", *_ADAPTER, unit="requests")
    l2_store_lost = _counter("Objects that left L1 and that no adapter took", unit="chunks")
    l2_store_unstored = _gauge("Objects that stay in L1 because no adapter took them, to be offered again")
    policy_faults = _counter("Answers of a policy that could not be used; the default's was", "policy")
    l2_store_dropped = _counter("Objects that did not reach an adapter, by reason", "reason")
    l2_load_completed = _counter("Load batches ended", *_ADAPTER, unit="requests")
    l2_prefetch_lookup = _counter("Prefetches asked for", unit="requests")
    l2_prefetch_load_submitted = _counter("Load batches begun by prefetches", unit="requests")
    l2_prefetch_load_completed = _counter("Objects loaded into L1 by prefetches", unit="chunks")
    l2_prefetch_failure = _counter("Objects that prefetches could not load, by reason", "reason", unit="chunks")
    l2_evicted_objects = _counter("Objects evicted from L2", *_ADAPTER)
    l2_usage_bytes = _gauge("Bytes that the adapter holds", *_ADAPTER)
    l2_store_throughput = _throughput("Bytes stored over time of a batch", *_ADAPTER)
    l2_load_throughput = _throughput("Bytes loaded over time of a batch", *_ADAPTER)
    l2_store = _latencies("A store batch, from its begin to its end", *_ADAPTER)
    l2_load = _latencies("A load batch, from its begin to its end", *_ADAPTER)
    l2_probe = _latencies("Asking an adapter which objects it has", *_ADAPTER)
    l2_stored = _counter("Bytes of objects that were stored", *_ADAPTER, unit="bytes")
    l2_loaded = _counter("Bytes of objects that were loaded", *_ADAPTER, unit="bytes")
    l2_store_queue = _latencies("How long the oldest object of a store batch waited for its turn", *_ADAPTER)
    l2_store_queue_depth = _gauge("Objects that wait to be stored", *_ADAPTER)
    l2_prefetch_queue = _latencies("How long prefetches waited for a place at an adapter", *_ADAPTER)
    num_inflight_l2_stores = _gauge("Store batches under way", *_ADAPTER)
    num_inflight_l2_loads = _gauge("Load batches under way", *_ADAPTER)
    l2_full = _counter("Objects not stored because the backend is full", *_ADAPTER)
    l2_is_full = _gauge("1 while nothing is stored because the backend is full", *_ADAPTER)
    l2_breaker_state = _gauge(
        "0: operations pass, 1: suspended after faults, 2: suspended, and a trial is due or runs",
        "l2_name",
        "direction",
    )
    l2_breaker_open = _gauge("1 while the adapter is left alone after faults", *_ADAPTER)
    l2_serde_raw = _counter("Bytes of objects before they were encoded", *_ADAPTER, unit="bytes")
    l2_serde_stored = _counter("Bytes of the same objects as they are stored", *_ADAPTER, unit="bytes")
    l2_serde_unreadable = _counter("Objects that the configured serde cannot read, each a miss", *_ADAPTER)
    l2_buffered_fallbacks = _gauge("Operations that wanted O_DIRECT and went through the page cache", *_ADAPTER)
    timeouts = _TIMEOUTS
    corrupt_frames = _CORRUPT_FRAMES


class P2PMetrics(_Group):
    """Other servers: what is loaded from them, and what they load from here."""

    p2p_peers = _gauge("Peers that this server is connected to")
    p2p_lookups = _counter("Lookups asked of peers, one for each that is asked")
    p2p_late_lookups = _counter("Lookups that a peer did not answer while the request waited")
    p2p_hits = _counter("Objects that peers said they have", unit="chunks")
    p2p_failures = _counter("Lookups and loads that failed at a peer, and peers that were refused, by reason", "reason")
    p2p_lookup = _latencies("Asking one peer which objects it has")
    p2p_load = _latencies("A load from one peer, from its begin to its end")
    p2p_received = _counter("Bytes of frames that came from peers", "transport", unit="bytes")
    p2p_sent = _counter("Bytes of frames that were sent to peers", unit="bytes")
    p2p_served_lookups = _counter("Lookups of peers that were answered")
    p2p_leased_bytes = _gauge("Bytes of L1 that peers keep from eviction until they have read them")


class FleetMemberMetrics(_Group):
    """A server's place in a fleet."""

    coordinator_joined = _gauge("1 while the coordinator knows this server")
    coordinator_members = _gauge("Servers of the fleet, this one included, as the coordinator told last")
    coordinator_failures = _counter("Calls that the coordinator did not answer, or refused", "call")
    coordinator_events = _counter("Changes that the coordinator was told", unit="chunks")
    coordinator_resyncs = _counter("Times that everything was told again")


class CoordinatorMetrics(_Group):
    """A coordinator, at its own /metrics."""

    coordinator_instances = _gauge("Servers that have joined")
    coordinator_keys = _gauge("Objects of which some server has a copy")
    coordinator_placements = _gauge("Copies that servers have")
    coordinator_directory_bytes = _gauge("Memory of the directory")
    coordinator_batches = _counter("Batches of events, by what became of them", "outcome")
    coordinator_entries = _counter("Changes that servers told", unit="chunks")
    coordinator_gaps = _counter("Times that batches of a server were missing")
    coordinator_complete_resyncs = _counter("Times that a server told everything again")
    coordinator_event_log_failures = _counter(
        "Reads of the log of events that failed, and what was in it and is no body of events"
    )
    internal_faults = FaultMetrics.internal_faults

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry(auto_describe=False)
        super().__init__(self._registry, {})

    def exposition(self) -> bytes:
        """The Prometheus text format (0.0.4)."""
        return generate_latest(self._registry)


class KVEventMetrics(_Group):
    """KV events that the server itself publishes."""

    kv_events_published = _counter(
        "Chunks that the server's own KV events named: as stored, as stored with unknown tokens (undescribed), or as "
        "removed",
        "type",
        unit="chunks",
    )
    kv_events_lost = _counter("Times that changes were lost, and everything was published again")


class EventBusMetrics(_Group):
    """Events, such as those that the log of lookups is made from."""

    event_bus_queue_depth = _gauge("Events waiting for their subscribers")
    event_bus_dropped_events = _counter("Events dropped at a full queue")
    event_bus_subscriber_exceptions = _counter("Faults raised by a subscriber", "subscriber_name")


class OtlpMetrics(_Group):
    """The export to --otlp-endpoint."""

    otlp_dropped_spans = _counter(
        "Spans that were not exported: the queue was full, the exporter away, or the receiver did not take them"
    )
    otlp_failed_exports = _counter(
        "Exports of metrics that were not sent or that the receiver did not take, and ends of the exporter"
    )


class Metrics:
    """All metrics, in groups: a part of the server gets the group that it counts in. An attribute of a group is named
    as the metric is documented, without the prefix.

    `enabled=False` keeps every attribute working and exposes nothing.
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        service_instance_id: str = "",
        random_bytes: Callable[[int], bytes] = SYSTEM.random_bytes,
    ) -> None:
        self.salt_digest = SaltDigest(random_bytes(SaltDigest.KEY_BYTES))
        disable_created_metrics()  # type: ignore[no-untyped-call]  # one more line for every series, of no use
        self.enabled = enabled
        self.registry = CollectorRegistry(auto_describe=False)
        self._refreshers: list[Callable[[], object]] = []
        built: dict[str, Any] = {}
        build = self.registry if enabled else None, built
        self.service = ServiceMetrics(*build)
        self.rpc = RpcMetrics(*build)
        self.l1 = L1Metrics(*build)
        self.quotas = QuotaMetrics(*build)
        self.l2 = L2Metrics(*build)
        self.p2p = P2PMetrics(*build)
        self.events = EventBusMetrics(*build)
        self.kv_events = KVEventMetrics(*build)
        self.fleet = FleetMemberMetrics(*build)
        self.faults = FaultMetrics(*build)
        self.otlp = OtlpMetrics(*build)
        for call in ("heartbeat", "events"):
            self.fleet.coordinator_failures.labels(call)
        for kind in ("stored", "undescribed", "removed"):
            self.kv_events.kv_events_published.labels(kind)
        for tier in _TIERS:  # from the start, so that the first such frame is an increase
            self.service.corrupt_frames.labels(tier)
        for transport in _TRANSPORTS:
            self.p2p.p2p_received.labels(transport)
        for reason in _PEER_FAULTS:
            self.p2p.p2p_failures.labels(reason)
        if enabled:  # the series by which OpenTelemetry carries resource attributes to Prometheus
            target = Info("target", "What exposes these metrics", registry=self.registry)
            target.info({"service_name": "lmcache", "service_instance_id": service_instance_id})
            with_salts = [metric for metric in built.values() if _has_salts(metric)]
            self._salt_series = {
                hides_salts: [SaltSeries(metric, SALT_LABEL, shown) for metric in with_salts]
                for hides_salts, shown in ((False, str), (True, self.shown_digest))
            }
            others = [metric for metric in built.values() if not _has_salts(metric)]
            self._without_salts = _WithoutSalts([target, *others])

    def shown_digest(self, salt: str) -> str:
        """What stands for a cache salt where it may not be read."""
        return salt if salt == OVERFLOW_LABEL else self.salt_digest(salt)

    def on_scrape(self, refresh: Callable[[], object]) -> Callable[[], None]:
        """Calls `refresh` before every exposition, for figures that are read rather than counted. The function that is
        returned ends this."""
        self._refreshers.append(refresh)
        return lambda: self._refreshers.remove(refresh)

    def collect(self) -> Iterator[Metric]:
        """Every metric, brought up to date."""
        self._refresh()
        return iter(self.registry.collect())

    def _refresh(self) -> None:
        for refresh in list(self._refreshers):
            refresh()

    def exposition(self, *, hides_salts: bool = False) -> bytes:
        """The Prometheus text format (0.0.4). With `hides_salts` digests stand for cache salts."""
        self._refresh()
        if not self.enabled:
            return b""
        texts = [series.text() for series in self._salt_series[hides_salts]]
        return generate_latest(self._without_salts) + "".join(texts).encode()
