"""Names as operators scrape them: prefix, unit, `_total`."""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from lmcache.telemetry.metrics import MAX_LABEL_SETS, MAX_MODELS_BEYOND, OVERFLOW_LABEL, Metrics

DOCUMENTED = """
l1_read_chunks_total l1_write_chunks_total l1_evicted_chunks_total l1_memory_usage_bytes l1_usage_ratio
l1_allocation_failure_chunks_total l1_read_failure_chunks_total lookups_total lookup_requested_tokens_total
lookup_hit_tokens_total lookup_hit_l1_tokens_total lookup_hit_l2_tokens_total l2_store_submitted_requests_total
l2_store_completed_requests_total l2_load_completed_requests_total l2_prefetch_lookup_requests_total
l2_prefetch_load_submitted_requests_total l2_prefetch_load_completed_chunks_total l2_prefetch_failure_chunks_total
l2_serde_raw_bytes_total l2_serde_stored_bytes_total l2_serde_unreadable_total
l2_evicted_objects_total l2_usage_bytes l2_store_throughput_GB_per_second_count l2_load_throughput_GB_per_second_count
num_inflight_l2_stores num_inflight_l2_loads num_submitted_stores_total num_finished_stores_total
num_submitted_retrieves_total num_finished_retrieves_total timeouts_total event_bus_queue_depth
l0_l1_store_throughput_GB_per_second_count l0_l1_load_throughput_GB_per_second_count
event_bus_dropped_events_total event_bus_subscriber_exceptions_total misses_total corrupt_frames_total quarantined_bytes
protocol_errors_total calls_total l2_full_total l2_is_full l2_store_dropped_total l2_breaker_open l2_buffered_fallbacks
quota_limit_bytes quota_usage_bytes l2_store_lost_chunks_total l1_adopted_chunks_total l1_chunk_lifetime_seconds_count
l1_chunk_idle_before_evict_seconds_count l1_chunk_reuse_gap_seconds_count l1_eviction_age_seconds internal_faults_total
l2_store_unstored policy_faults_total tier_hit_bytes_total prefill_saved_seconds_total lookup_ceiling_tokens_total
lookup_ceiling_sampled_ratio lookup_ceiling_distance_ratio sessions leases reservations lease_seconds_count
lease_oldest_seconds reservation_seconds_count reservation_oldest_seconds call_seconds_count l1_large_page_ratio
l2_store_seconds_count l2_load_seconds_count l2_probe_seconds_count l2_stored_bytes_total l2_loaded_bytes_total
l2_store_queue_seconds_count l2_store_queue_depth l2_prefetch_queue_seconds_count l2_breaker_state
coordinator_joined coordinator_members coordinator_failures_total coordinator_events_chunks_total
coordinator_resyncs_total
instances instances_silent registrations_lost_total otlp_dropped_spans_total otlp_failed_exports_total
p2p_peers p2p_lookups_total p2p_late_lookups_total p2p_hits_chunks_total p2p_failures_total p2p_lookup_seconds_count
p2p_load_seconds_count p2p_received_bytes_total p2p_sent_bytes_total p2p_served_lookups_total p2p_leased_bytes
handover_waits_total handover_wait_seconds_count
kv_events_chunks_total kv_events_skipped_chunks_total chunk_changes_chunks_total chunk_changes_lost_total
kv_events_published_chunks_total kv_events_lost_total
request_telemetry_requests_total
"""


def touch_everything(metrics: Metrics) -> None:
    """A labelled metric has no sample before its first use."""
    groups = [
        metrics.faults,
        metrics.service,
        metrics.rpc,
        metrics.l1,
        metrics.quotas,
        metrics.l2,
        metrics.p2p,
        metrics.events,
        metrics.kv_events,
        metrics.otlp,
        metrics.fleet,
    ]
    for metric in [metric for group in groups for metric in vars(group).values()]:
        names = getattr(metric, "_labelnames", None)
        if names:
            metric.labels(*["x"] * len(names))


def samples(metrics: Metrics) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def test_every_documented_name_is_exposed_and_no_other() -> None:
    metrics = Metrics(service_instance_id="here")
    touch_everything(metrics)
    names = {name for name in samples(metrics) if not name.endswith(("_bucket", "_sum"))}
    assert names == {"lmcache_mp_" + name for name in DOCUMENTED.split()} | {"target_info"}


def test_the_instance_is_named_as_opentelemetry_does() -> None:
    assert 'target_info{service_instance_id="here",service_name="lmcache"} 1.0' in (
        Metrics(service_instance_id="here").exposition().decode()
    )


def test_labels_from_requests_are_bounded_and_nothing_is_lost() -> None:
    metrics = Metrics()
    for number in range(MAX_LABEL_SETS + 500):
        metrics.service.lookups.labels(model_name="m", cache_salt=f"salt-{number}").inc()
    metrics.service.lookups.labels("m", "salt-0").inc()  # a known pair keeps its series
    lines = [line for line in metrics.exposition().decode().splitlines() if line.startswith("lmcache_mp_lookups_total")]
    assert len(lines) == MAX_LABEL_SETS + 1
    assert 'lmcache_mp_lookups_total{cache_salt="salt-0",model_name="m"} 2.0' in lines
    assert samples(metrics)["lmcache_mp_lookups_total"] == MAX_LABEL_SETS + 501


def test_models_stay_apart_however_many_salts_there_were() -> None:
    metrics = Metrics()
    for number in range(MAX_LABEL_SETS):
        metrics.service.lookups.labels("m", f"salt-{number}").inc()
    for number in range(MAX_MODELS_BEYOND + 10):
        for salt in ("late", "later"):
            metrics.service.lookups.labels(f"m-{number}", salt).inc()

    def value(model: str) -> float | None:
        labels = {"model_name": model, "cache_salt": OVERFLOW_LABEL}
        return metrics.registry.get_sample_value("lmcache_mp_lookups_total", labels)

    assert {value(f"m-{number}") for number in range(MAX_MODELS_BEYOND)} == {2}
    assert value(OVERFLOW_LABEL) == 2 * 10


def test_disabled_metrics_work_and_expose_nothing() -> None:
    metrics = Metrics(enabled=False)
    touch_everything(metrics)
    metrics.service.lookup_hit.labels("m", "").inc(3)
    assert metrics.exposition() == b""


def test_figures_that_are_read_are_fresh_at_every_scrape() -> None:
    metrics = Metrics()
    used = {"bytes": 1.0}
    forget = metrics.on_scrape(lambda: metrics.l1.l1_memory_usage_bytes.set(used["bytes"]))
    assert samples(metrics)["lmcache_mp_l1_memory_usage_bytes"] == 1
    used["bytes"] = 2.0
    assert samples(metrics)["lmcache_mp_l1_memory_usage_bytes"] == 2
    forget()
    used["bytes"] = 3.0
    assert samples(metrics)["lmcache_mp_l1_memory_usage_bytes"] == 2


def test_salts_are_written_as_the_library_writes_them() -> None:
    metrics = Metrics()
    for salt in ("", "tenant", 'quote " back \\ line \n', "é"):
        metrics.service.lookups.labels("model", salt).inc(3)
        metrics.quotas.quota_limit_bytes.labels(salt).set(1.5)
    written = metrics.exposition().decode()
    assert sorted(written.splitlines()) == sorted(generate_latest(metrics.registry).decode().splitlines())


def test_lines_of_salts_follow_their_figures() -> None:
    metrics = Metrics()
    lookups, limit = metrics.service.lookups, metrics.quotas.quota_limit_bytes

    def written_as_by_the_library() -> bool:
        library = generate_latest(metrics.registry).decode().splitlines()
        return sorted(metrics.exposition().decode().splitlines()) == sorted(library)

    for step in range(3):
        for salt in ("a", "b"):
            lookups.labels("model", salt).inc()
        limit.clear()
        limit.labels(f"tenant-{step}").set(step)
        assert written_as_by_the_library()
        lookups.labels("model", "a").inc()
        limit.labels(f"tenant-{step}").set(step + 0.5)
        assert written_as_by_the_library()
        hidden = metrics.exposition(hides_salts=True).decode()
        assert f'cache_salt="{metrics.salt_digest("a")}",model_name="model"}} {2 * step + 2}.0' in hidden
        assert "tenant" not in hidden


def test_a_thousand_salts_are_written_in_less_time_than_by_the_library() -> None:
    metrics = Metrics()
    for number in range(1000):
        labels = ("model", f"salt-{number}")
        for counter in (metrics.service.lookups, metrics.service.lookup_requested, metrics.service.lookup_hit):
            counter.labels(*labels).inc()

    def fastest(write: Callable[[], object]) -> float:
        return min(timeit.repeat(write, number=1, repeat=5, timer=time.thread_time))

    assert fastest(metrics.exposition) < 0.4 * fastest(lambda: generate_latest(metrics.registry))
