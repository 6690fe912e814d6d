"""Every metric moves when its cause happens, and a real Prometheus answers every query of dashboard and alerts."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from lmcache.memory.large_pages import large_page_share
from lmcache.testing.processes import CacheServer
from polling import until
from process.metric_traffic import SCENARIOS, Watched, watched_server
from process.support import SmallEngine
from services import missing
from services.prometheus import PROMETHEUS, Prometheus

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "lmcache.json"
WINDOW = "10m"  # longer than the traffic takes
MOVED: dict[str, tuple[str, ...]] = {
    "hits": (
        "lmcache_mp_lookups_total",
        "lmcache_mp_lookup_requested_tokens_total",
        "lmcache_mp_lookup_hit_tokens_total",
        "lmcache_mp_lookup_hit_l1_tokens_total",
        "lmcache_mp_lookup_hit_l2_tokens_total",
        'lmcache_mp_tier_hit_bytes_total{tier="l1"}',
        'lmcache_mp_tier_hit_bytes_total{tier="l2"}',
        'lmcache_mp_prefill_saved_seconds_total{tier="l1"}',
        'lmcache_mp_prefill_saved_seconds_total{tier="l2"}',
        "lmcache_mp_lookup_ceiling_tokens_total",
        "lmcache_mp_lookup_ceiling_sampled_ratio",
        "lmcache_mp_lookup_ceiling_distance_ratio",
        'lmcache_mp_misses_total{reason="not_stored"}',
        "lmcache_mp_instances",
        "lmcache_mp_sessions",
        "lmcache_mp_leases",
        "lmcache_mp_reservations",
        "lmcache_mp_lease_seconds_count",
        "lmcache_mp_lease_oldest_seconds",
        "lmcache_mp_reservation_seconds_count",
        "lmcache_mp_reservation_oldest_seconds",
        "lmcache_mp_l1_read_chunks_total",
        "lmcache_mp_l1_write_chunks_total",
        'lmcache_mp_handover_waits_total{outcome="stored"}',
        'lmcache_mp_handover_waits_total{outcome="gone"}',
        'lmcache_mp_handover_waits_total{outcome="late"}',
        "lmcache_mp_handover_wait_seconds_count",
        "lmcache_mp_chunk_changes_chunks_total",
        "lmcache_mp_chunk_changes_lost_total",
        'lmcache_mp_kv_events_chunks_total{type="stored"}',
        'lmcache_mp_kv_events_chunks_total{type="removed"}',
        'lmcache_mp_kv_events_skipped_chunks_total{reason="unknown"}',
        'lmcache_mp_kv_events_skipped_chunks_total{reason="no_room"}',
        'lmcache_mp_request_telemetry_requests_total{result="told"}',
        'lmcache_mp_request_telemetry_requests_total{result="lost"}',
        "lmcache_mp_num_submitted_stores_total",
        "lmcache_mp_num_finished_stores_total",
        "lmcache_mp_num_submitted_retrieves_total",
        "lmcache_mp_num_finished_retrieves_total",
        "lmcache_mp_l0_l1_store_throughput_GB_per_second_count",
        "lmcache_mp_l0_l1_load_throughput_GB_per_second_count",
        'lmcache_mp_calls_total{method="lookup"}',
        "lmcache_mp_call_seconds_count",
        "lmcache_mp_l1_evicted_chunks_total",
        "lmcache_mp_l1_memory_usage_bytes",
        "lmcache_mp_l1_usage_ratio",
        "lmcache_mp_l1_chunk_lifetime_seconds_count",
        "lmcache_mp_l1_chunk_idle_before_evict_seconds_count",
        "lmcache_mp_l1_chunk_reuse_gap_seconds_count",
        "lmcache_mp_l1_eviction_age_seconds",
        "lmcache_mp_quota_limit_bytes",
        "lmcache_mp_quota_usage_bytes",
        "lmcache_mp_l2_store_submitted_requests_total",
        "lmcache_mp_l2_store_completed_requests_total",
        "lmcache_mp_l2_load_completed_requests_total",
        "lmcache_mp_l2_prefetch_lookup_requests_total",
        "lmcache_mp_l2_prefetch_load_submitted_requests_total",
        "lmcache_mp_l2_prefetch_load_completed_chunks_total",
        "lmcache_mp_l2_evicted_objects_total",
        "lmcache_mp_l2_usage_bytes",
        "lmcache_mp_l2_store_throughput_GB_per_second_count",
        "lmcache_mp_l2_load_throughput_GB_per_second_count",
        "lmcache_mp_l2_store_seconds_count",
        "lmcache_mp_l2_load_seconds_count",
        "lmcache_mp_l2_probe_seconds_count",
        "lmcache_mp_l2_stored_bytes_total",
        "lmcache_mp_l2_loaded_bytes_total",
        "lmcache_mp_l2_store_queue_seconds_count",
        "lmcache_mp_l2_prefetch_queue_seconds_count",
        "lmcache_mp_l2_serde_raw_bytes_total",
        "lmcache_mp_l2_serde_stored_bytes_total",
    ),
    "engines": (
        "lmcache_mp_l1_read_failure_chunks_total",
        'lmcache_mp_corrupt_frames_total{tier="l1"}',
        'lmcache_mp_corrupt_frames_total{tier="socket"}',
        'lmcache_mp_protocol_errors_total{code="bad_request"}',
        "lmcache_mp_quarantined_bytes",
        "lmcache_mp_instances_silent",
        "lmcache_mp_registrations_lost_total",
    ),
    "backend": (
        "lmcache_mp_num_inflight_l2_stores",
        "lmcache_mp_num_inflight_l2_loads",
        "lmcache_mp_l2_store_queue_depth",
        'lmcache_mp_corrupt_frames_total{tier="l2"}',
        'lmcache_mp_l2_prefetch_failure_chunks_total{reason="corrupt"}',
        "lmcache_mp_l2_full_total",
        "lmcache_mp_l2_is_full",
        'lmcache_mp_l2_store_dropped_total{reason="not_stored"}',
        "lmcache_mp_l2_store_unstored",
        "lmcache_mp_l2_store_lost_chunks_total",
        'lmcache_mp_l2_breaker_state{direction="loads"}',
        "lmcache_mp_l2_breaker_open",
        "lmcache_mp_l2_buffered_fallbacks",
        "lmcache_mp_timeouts_total",
        'lmcache_mp_misses_total{reason="l2_deadline"}',
        'lmcache_mp_misses_total{reason="l2_suspended"}',
    ),
    "full": ("lmcache_mp_l1_allocation_failure_chunks_total",),
    "fleet": (
        "lmcache_mp_coordinator_joined",
        "lmcache_mp_coordinator_members",
        "lmcache_mp_coordinator_events_chunks_total",
        'lmcache_mp_coordinator_failures_total{call="heartbeat"}',
        'lmcache_mp_coordinator_failures_total{call="events"}',
        "lmcache_mp_coordinator_resyncs_total",
    ),
    "quota": ('lmcache_mp_misses_total{reason="over_quota"}',),
}
# They are seen to move elsewhere (tests/unit/scripts/test_metrics_reference.py names all), and have no series here.
WITHOUT_SERIES = {
    f"lmcache_mp_{name}"
    for name in (
        "l2_serde_unreadable_total",
        "internal_faults_total",
        "event_bus_subscriber_exceptions_total",
    )
}


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Watched], Prometheus | None]]:
    """All servers after their traffic, and the Prometheus that scraped them meanwhile, where there is one."""
    folder = tmp_path_factory.mktemp("metrics")
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(watched_server(name, folder / name)) for name in SCENARIOS}
        prometheus = None
        if PROMETHEUS.exists():
            ports = {name: watched.server.http_port for name, watched in servers.items()}
            ports["coordinator"] = servers["fleet"].coordinator_port  # which comes later
            prometheus = stack.enter_context(Prometheus(folder / "prometheus", ports))
            prometheus.wait_ready()
            until(lambda: len(prometheus.query("up == 1")) == len(servers))
        for name, scenario in SCENARIOS.items():
            scenario(servers[name])
        yield servers, prometheus


@pytest.fixture
def prometheus(driven: tuple[dict[str, Watched], Prometheus | None]) -> Prometheus:
    found = driven[1]
    if found is None:
        missing("Prometheus")
    return found


@pytest.mark.parametrize(
    ("scenario", "name"), [(scenario, name) for scenario, names in MOVED.items() for name in names]
)
def test_it_moves(scenario: str, name: str, driven: tuple[dict[str, Watched], Prometheus | None]) -> None:
    watched = driven[0][scenario]
    assert watched.moved(name), f"{name} was {watched.values.get(name)} all the time"


def test_large_pages_are_counted(tmp_path: Path) -> None:
    """lmcache_mp_l1_large_page_ratio is what the kernel says of that process; some kernels give none."""
    with CacheServer(tmp_path, l1_size_gb=0.0625, extra=["--no-l1-use-lazy"]) as server:
        server.wait_ready()
        with SmallEngine(server.port, payload_bytes=4 << 20) as engine:
            engine.store(engine.tokens(*range(8)))
        smaps = Path(f"/proc/{server.pid}/smaps")

        def is_told() -> bool:
            """The kernel may make large pages of small ones later, too."""
            wanted = large_page_share(f"/dev/shm/{server.shm_name}", smaps)
            return server.metric("lmcache_mp_l1_large_page_ratio") == pytest.approx(wanted, abs=0.02)

        until(is_told)


def dashboard_queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [query.replace("$__rate_interval", WINDOW).replace("$instance", ".*") for query in found]


def test_prometheus_answers_every_query_of_the_dashboard(prometheus: Prometheus) -> None:
    queries = dashboard_queries()
    assert len(queries) > 60
    empty: list[str] = []

    def unexpected() -> list[str]:
        """Before the traffic is in two scrapes there are more."""
        empty[:] = [query for query in queries if not prometheus.query(query)]
        return [query for query in empty if not set(re.findall(r"lmcache_mp_\w+", query)) & WITHOUT_SERIES]

    until(lambda: not unexpected(), tell=unexpected)
    assert {name for name in WITHOUT_SERIES if any(name in query for query in empty)} == WITHOUT_SERIES


def test_the_hit_rate_of_the_dashboard_is_that_of_the_traffic(
    prometheus: Prometheus, driven: tuple[dict[str, Watched], Prometheus | None]
) -> None:
    """As many tokens are found as not, all of them within the window."""
    watched = driven[0]["hits"]
    query = dashboard_queries()[0].replace(WINDOW, "10s")
    assert query.count("[10s]") == 2
    time.sleep(10.0)  # what was before is in no window now
    prompts = count(7000, 1000)

    def shown() -> list[float]:
        return [
            float(series["value"][1]) for series in prometheus.query(query) if series["metric"]["instance"] == "hits"
        ]

    def is_half_of_it() -> bool:
        """Of traffic that two scrapes see before it leaves the window, unless the machine stands still meanwhile."""
        first = next(prompts)
        watched.engine.store(watched.tokens(first))
        for asked in (first, first + 500):
            with watched.lookup(watched.tokens(asked)):
                pass
        with contextlib.suppress(AssertionError):
            return bool(until(lambda: shown() == [pytest.approx(0.5)], 9.0))
        return False

    until(is_half_of_it, tell=shown)


def test_prometheus_evaluates_every_alert(prometheus: Prometheus) -> None:
    def healthy() -> bool:
        return all(rule["health"] == "ok" for rule in prometheus.rules())

    until(healthy, tell=lambda: [rule for rule in prometheus.rules() if rule["health"] != "ok"])
    scraped = prometheus.metric_names()
    for rule in prometheus.rules():
        names = set(re.findall(r"\blmcache_mp_\w+", rule["query"])) - WITHOUT_SERIES
        assert names <= scraped, rule["name"]


@pytest.mark.parametrize(
    ("alert", "instance"),
    [
        ("LMCacheCorruptFrames", "backend"),
        ("LMCacheCorruptFrames", "engines"),
        ("LMCacheStoresLost", "backend"),
        ("LMCacheBackendSuspended", "backend"),
        ("LMCacheL1Refuses", "full"),
        ("LMCacheEngineLost", "engines"),
    ],
)
def test_what_happened_raises_its_alert(prometheus: Prometheus, alert: str, instance: str) -> None:
    """At once, or pending where it must last."""

    def raised() -> set[str]:
        (rule,) = [rule for rule in prometheus.rules() if rule["name"] == alert]
        return {raised["labels"]["instance"] for raised in rule["alerts"]}

    until(lambda: instance in raised(), tell=raised)
    assert "hits" not in raised()
