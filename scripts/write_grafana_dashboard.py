"""Writes deploy/grafana/lmcache.json: every metric, in rows of panels, with the units of their declarations.

With --check it only says whether the file is current.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from lmcache.telemetry.metrics import PREFIX, CoordinatorMetrics, Metrics
from reference_pages import write_or_check

PATH = Path(__file__).parents[1] / "deploy" / "grafana" / "lmcache.json"
SELECTOR = 'instance=~"$instance"'
INTERVAL = "$__rate_interval"
COLUMNS, PANEL_WIDTH, PANEL_HEIGHT = 24, 8, 8
SCHEMA_VERSION = 39  # of Grafana 11, which newer ones migrate

# Grafana's names of units: of a value, and of its change in a second.
_VALUE_UNITS = {"bytes": "bytes", "seconds": "s", "ratio": "percentunit", "GB_per_second": "GBs"}
_RATE_UNITS = {
    "bytes": "Bps",
    "seconds": "s",  # a second
    "tokens": "suffix: tokens/s",
    "chunks": "suffix: chunks/s",
    "requests": "reqps",
}


def families() -> dict[str, Metric]:
    """Every metric as Prometheus gets it, by its name without prefix and ending."""
    found: dict[str, Metric] = {}
    for group in (*vars(Metrics()).values(), CoordinatorMetrics()):
        for name, metric in vars(group).items() if type(group).__module__ == Metrics.__module__ else ():
            if isinstance(metric, MetricWrapperBase):
                (found[name],) = metric.describe()
    return found


FAMILIES = families()


def series(name: str, matchers: str = "") -> str:
    """A counter or gauge with the dashboard's selector."""
    family = FAMILIES[name]
    ending = "_total" if family.type == "counter" else ""
    return f"{family.name}{ending}{{{', '.join(filter(None, (SELECTOR, matchers)))}}}"


@dataclass(frozen=True)
class Query:
    expression: str
    unit: str
    legend: str


def _legend(labels: str, text: str = "") -> str:
    return " ".join([*([text] if text else []), *(f"{{{{{label}}}}}" for label in labels.replace(",", " ").split())])


def rate(name: str, by: str = "instance", text: str = "", matchers: str = "") -> Query:
    """What a counter grows by in a second."""
    unit = _RATE_UNITS.get(FAMILIES[name].unit, "ops")
    return Query(f"sum by ({by}) (rate({series(name, matchers)}[{INTERVAL}]))", unit, _legend(by, text))


def value(name: str, by: str = "instance", text: str = "") -> Query:
    """A gauge."""
    base = FAMILIES[name].name
    unit = next((_VALUE_UNITS[ending] for ending in _VALUE_UNITS if base.endswith(f"_{ending}")), "short")
    return Query(f"sum by ({by}) ({series(name)})", unit, _legend(by, text))


def quantile(fraction: float, name: str, by: str = "instance", text: str = "") -> Query:
    """Queries a quantile of a histogram, over the latest interval."""
    family = FAMILIES[name]
    buckets = f"{family.name}_bucket{{{SELECTOR}}}"
    expression = f"histogram_quantile({fraction:g}, sum by ({by}, le) (rate({buckets}[{INTERVAL}])))"
    return Query(expression, _VALUE_UNITS[family.unit], _legend(by, f"p{fraction * 100:g} {text}".rstrip()))


def share(part: str, whole: str, by: str = "instance", text: str = "") -> Query:
    """Queries the ratio of two counters of one unit."""
    assert FAMILIES[part].unit == FAMILIES[whole].unit, (part, whole)
    return Query(f"{rate(part, by).expression} / {rate(whole, by).expression}", "percentunit", _legend(by, text))


@dataclass(frozen=True)
class Panel:
    """Queries of one unit in a graph."""

    title: str
    queries: Sequence[Query]
    description: str = ""
    states: Mapping[int, str] = field(default_factory=dict)  # what values stand for

    @property
    def unit(self) -> str:
        (unit,) = {query.unit for query in self.queries}
        return unit


_L2, _SALT = "instance, l2_name", "model_name, cache_salt"
ROWS: dict[str, Sequence[Panel]] = {
    "Hits": (
        Panel(
            "Hit rate",
            [
                share("lookup_hit", "lookup_requested", text="all"),
                share("lookup_hit_l1", "lookup_requested", text="from L1"),
                share("lookup_hit_l2", "lookup_requested", text="from L2"),
            ],
            "Tokens found over tokens asked for.",
        ),
        Panel("Tokens asked for and found", [rate("lookup_requested", text="asked"), rate("lookup_hit", text="found")]),
        Panel("Lookups", [rate("lookups")]),
        Panel("Misses by the reason of the first one", [rate("misses", "reason")]),
        Panel("Bytes of hits by tier", [rate("tier_hit", "tier")]),
        Panel("Prefill time saved in a second", [rate("prefill_saved", "tier")]),
        Panel(
            "What an endless cache would add",
            [value("lookup_ceiling_distance_ratio"), value("lookup_ceiling_sampled_ratio", text="sampled of")],
            "Hit rate of an endless cache less the hit rate, since the start; estimated from what is sampled.",
        ),
        Panel("Tokens that an endless cache would have found", [rate("lookup_ceiling")]),
        Panel("Hit rate by tenant", [share("lookup_hit", "lookup_requested", _SALT)]),
    ),
    "Engines": (
        Panel("Engines", [value("instances", text="registered"), value("instances_silent", text="silent")]),
        Panel("Registrations lost", [rate("registrations_lost")], "Scheduler sides and workers that vanished."),
        Panel(
            "Requests, leases, reservations",
            [value("sessions", text="requests"), value("leases", text="leases"), value("reservations", text="stores")],
        ),
        Panel(
            "Oldest", [value("lease_oldest_seconds", text="lease"), value("reservation_oldest_seconds", text="store")]
        ),
        Panel(
            "How long",
            [
                quantile(0.99, "lease", text="lease"),
                quantile(0.99, "reservation", text="store"),
                quantile(0.99, "handover_wait", text="wait for a prefill engine"),
            ],
        ),
        Panel(
            "Waits for the chunks of prefill engines",
            [rate("handover_waits", "outcome")],
            "Lookups of decode engines that waited until all was stored, until nothing more came, or too long.",
        ),
        Panel("Chunks of L1", [rate("l1_read", text="leased"), rate("l1_write", text="stored")]),
        Panel(
            "Stores and loads of engines",
            [
                rate("num_submitted_stores", text="stores begun"),
                rate("num_finished_stores", text="stores ended"),
                rate("num_submitted_retrieves", text="leases given"),
                rate("num_finished_retrieves", text="leases back"),
            ],
        ),
        Panel(
            "Chunks told to routers",
            [
                rate("kv_events", "type"),
                rate("kv_events_skipped", "reason", "not told: {}"),
                rate("chunk_changes", text="read by engines"),
            ],
            "By engines with KV events.",
        ),
        Panel("Readers of changes that began anew", [rate("chunk_changes_lost"), rate("kv_events_lost")]),
        Panel("Chunks in the server's own KV events", [rate("kv_events_published", "type")]),
        Panel(
            "Requests that a proxy was told are stored",
            [rate("request_telemetry", "result")],
            "By prefill engines with LMCACHE_REQUEST_TELEMETRY_TYPE.",
        ),
        Panel(
            "Throughput between engines and L1",
            [
                quantile(0.5, "l0_l1_store_throughput", text="store"),
                quantile(0.5, "l0_l1_load_throughput", text="load"),
            ],
        ),
    ),
    "L1": (
        Panel("Bytes in L1", [value("l1_memory_usage_bytes")]),
        Panel("Use of L1", [value("l1_usage_ratio"), value("l1_large_page_ratio", text="in large pages")]),
        Panel(
            "Evicted, refused, recovered",
            [
                rate("l1_evicted", text="evicted"),
                rate("l1_allocation_failure", text="no room"),
                rate("l1_adopted", text="recovered"),
            ],
        ),
        Panel(
            "Age of what is evicted",
            [
                value("l1_eviction_age_seconds", text="mean idle"),
                quantile(0.5, "l1_chunk_idle_before_evict", text="idle"),
            ],
            "Short ages with a full L1: it is too small for what engines ask for.",
        ),
        Panel(
            "Life and reuse",
            [quantile(0.5, "l1_chunk_lifetime", text="life"), quantile(0.5, "l1_chunk_reuse_gap", text="gap")],
        ),
        Panel("Quarantined bytes", [value("quarantined_bytes")], "Of writers that are silent and may still write."),
        Panel(
            "Quotas",
            [value("quota_usage_bytes", "cache_salt", "used"), value("quota_limit_bytes", "cache_salt", "limit")],
        ),
    ),
    "L2": (
        Panel("Bytes in L2", [value("l2_usage_bytes", _L2)]),
        Panel("Stored and loaded", [rate("l2_stored", _L2, "stored"), rate("l2_loaded", _L2, "loaded")]),
        Panel(
            "Throughput of a batch",
            [quantile(0.5, "l2_store_throughput", _L2, "store"), quantile(0.5, "l2_load_throughput", _L2, "load")],
        ),
        Panel(
            "Time of a batch",
            [
                quantile(0.99, name, _L2, text)
                for name, text in (("l2_store", "store"), ("l2_load", "load"), ("l2_probe", "probe"))
            ],
        ),
        Panel(
            "Waiting for their turn",
            [quantile(0.99, "l2_store_queue", _L2, "stores"), quantile(0.99, "l2_prefetch_queue", _L2, "prefetches")],
        ),
        Panel(
            "Objects that wait",
            [value("l2_store_queue_depth", _L2, "to be stored"), value("l2_store_unstored", text="without an adapter")],
        ),
        Panel(
            "Batches under way",
            [value("num_inflight_l2_stores", _L2, "stores"), value("num_inflight_l2_loads", _L2, "loads")],
        ),
        Panel(
            "Batches",
            [
                rate("l2_store_submitted", _L2, "stores begun"),
                rate("l2_store_completed", _L2, "stores ended"),
                rate("l2_load_completed", _L2, "loads ended"),
                rate("l2_prefetch_lookup", text="prefetches"),
                rate("l2_prefetch_load_submitted", text="loads begun"),
            ],
        ),
        Panel(
            "Prefetched",
            [rate("l2_prefetch_load_completed", text="loaded"), rate("l2_prefetch_failure", "reason", "failed:")],
        ),
        Panel(
            "Suspended after faults",
            [value("l2_breaker_state", "instance, l2_name, direction")],
            states={0: "works", 1: "suspended", 2: "is tried"},
        ),
        Panel(
            "Left alone or full",
            [value("l2_breaker_open", _L2, "left alone"), value("l2_is_full", _L2, "full")],
            states={0: "no", 1: "yes"},
        ),
        Panel(
            "Objects that did not reach L2",
            [rate("l2_store_dropped", "reason"), rate("l2_full", _L2, "full")],
        ),
        Panel("Lost: left L1 before any adapter took them", [rate("l2_store_lost")]),
        Panel("Evicted from L2", [rate("l2_evicted_objects", _L2)]),
        Panel(
            "Encoded size",
            [share("l2_serde_stored", "l2_serde_raw", _L2)],
            "Bytes as they are stored over the bytes of the objects.",
        ),
        Panel("Not readable by the serde", [rate("l2_serde_unreadable", _L2)]),
        Panel("Around O_DIRECT, through the page cache", [value("l2_buffered_fallbacks", _L2)]),
    ),
    "Peers": (
        Panel("Peers", [value("p2p_peers")], "Other servers that this one is connected to."),
        Panel("Frames from and to peers", [rate("p2p_received", "transport", "from, by"), rate("p2p_sent", text="to")]),
        Panel(
            "Lookups",
            [
                rate("p2p_lookups", text="asked"),
                rate("p2p_late_lookups", text="not answered in time"),
                rate("p2p_served_lookups", text="answered for peers"),
            ],
        ),
        Panel("Chunks that peers said they have", [rate("p2p_hits")]),
        Panel("Failed at a peer", [rate("p2p_failures", "reason")]),
        Panel("Time", [quantile(0.99, "p2p_lookup", text="lookup"), quantile(0.99, "p2p_load", text="load")]),
        Panel("Kept for peers until they have read it", [value("p2p_leased_bytes")]),
    ),
    "Calls": (
        Panel("Calls", [rate("calls", "method")]),
        Panel("Calls that failed", [rate("calls", "method, status", matchers='status!="ok"')]),
        Panel("Time of a call, median", [quantile(0.5, "call", "method")]),
        Panel("Time of a call, 99th percentile", [quantile(0.99, "call", "method")]),
    ),
    "Fleet": (
        Panel("Known to the coordinator", [value("coordinator_joined")], states={0: "no", 1: "yes"}),
        Panel(
            "Servers of the fleet",
            [value("coordinator_members", text="seen by"), value("coordinator_instances", text="joined at")],
        ),
        Panel(
            "Changes told",
            [rate("coordinator_events", text="by"), rate("coordinator_entries", text="to")],
            "By servers to the coordinator.",
        ),
        Panel(
            "Everything told again",
            [
                rate("coordinator_resyncs", text="by"),
                rate("coordinator_complete_resyncs", text="to"),
                rate("coordinator_gaps", text="batches missing at"),
            ],
            "After a restart of either side, or where changes were lost.",
        ),
        Panel("Calls that the coordinator did not answer", [rate("coordinator_failures", "instance, call")]),
        Panel("The log of events could not be read", [rate("coordinator_event_log_failures", text="by")]),
        Panel("Batches", [rate("coordinator_batches", "instance, outcome")]),
        Panel(
            "Directory",
            [value("coordinator_keys", text="objects"), value("coordinator_placements", text="copies")],
        ),
        Panel("Memory of the directory", [value("coordinator_directory_bytes")]),
    ),
    "Faults": (
        Panel("Frames that did not verify", [rate("corrupt_frames", "instance, tier")]),
        Panel("Leased chunks that engines could not read", [rate("l1_read_failure")]),
        Panel("Deadlines that passed", [rate("timeouts")]),
        Panel("Protocol errors", [rate("protocol_errors", "code")]),
        Panel("Unexpected faults", [rate("internal_faults", "instance, logger"), rate("policy_faults", "policy")]),
        Panel(
            "Telemetry that was lost",
            [
                rate("event_bus_dropped_events", text="events"),
                rate("event_bus_subscriber_exceptions", "subscriber_name", "faults of"),
                rate("otlp_dropped_spans", text="spans"),
                rate("otlp_failed_exports", text="exports"),
            ],
        ),
        Panel("Events that wait", [value("event_bus_queue_depth")]),
    ),
}

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_VARIABLES = (
    {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
    {
        "name": "instance",
        "label": "Server",
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": f"label_values({PREFIX}sessions, instance)", "refId": "instance"},
        "refresh": 2,  # with the time range
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    },
)


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    mappings = [
        {"type": "value", "options": {str(state): {"text": text} for state, text in panel.states.items()}},
    ]
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": _DATASOURCE,
            "expr": query.expression,
            "legendFormat": query.legend,
        }
        for index, query in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": PANEL_WIDTH, "h": PANEL_HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "mappings": mappings if panel.states else []},
            "overrides": [],
        },
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": targets,
    }


def panels() -> Iterator[dict[str, Any]]:
    number, y = 1, 0
    for title, row in ROWS.items():
        place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        number, y = number + 1, y + 1
        for index, panel in enumerate(row):
            x = index * PANEL_WIDTH % COLUMNS
            yield _panel(panel, number, x, y + index * PANEL_WIDTH // COLUMNS * PANEL_HEIGHT)
            number += 1
        y += -(-len(row) * PANEL_WIDTH // COLUMNS) * PANEL_HEIGHT


def text() -> str:
    dashboard = {
        "uid": "lmcache",
        "title": "LMCache",
        "description": "KV cache servers. Made by scripts/write_grafana_dashboard.py.",
        "tags": ["lmcache"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,  # one crosshair for all
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": list(_VARIABLES)},
        "annotations": {"list": []},
        "panels": list(panels()),
    }
    return json.dumps(dashboard, indent=1) + "\n"


if __name__ == "__main__":
    sys.exit(write_or_check({str(PATH): text()}))
