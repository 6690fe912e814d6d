"""What `lmcache top` shows: figures of a server now, and rates between two samples of it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache.cli.http import HttpRefused, answer_of, request
from lmcache.cli.output import bytes_text, printable, seconds_text

_LINE = re.compile(r"([\w:]+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": " "}
_METRICS_OFF = 404
_PREFIX = "lmcache_mp_"

Labels = tuple[tuple[str, str], ...]
Metrics = Mapping[str, Mapping[Labels, float]]


@dataclass(frozen=True)
class Sample:
    """What a server told at a moment of this host's monotonic clock. `metrics` is empty where they are off."""

    at_seconds: float
    status: Mapping[str, Any]
    metrics: Metrics


def take(url: str, timeout_seconds: float) -> Sample:
    """ServerUnavailable or HttpRefused where the server does not tell, or tells what no cache server does."""
    status = request(url, "GET", "/status", timeout_seconds=timeout_seconds)
    try:
        text = request(url, "GET", "/metrics", timeout_seconds=timeout_seconds)
    except HttpRefused as error:
        if error.status != _METRICS_OFF:
            raise
        text = ""
    with answer_of(url):
        sample = Sample(time.monotonic(), status, parse(str(text)))
        _check(sample)
    return sample


def _check(sample: Sample) -> None:
    """Whether it can be shown: what has another type raises here, not on the screen."""
    seen = picture(sample, sample)
    headline(seen.summary)
    seconds_text(sample.status["uptime_seconds"])
    for name, columns in TABLES.items():
        cells(columns, seen.tables[name])


def parse(text: str) -> dict[str, dict[Labels, float]]:
    """The text format of Prometheus: values by name and labels."""
    found: dict[str, dict[Labels, float]] = {}
    for line in text.split("\n"):  # a name may have what else ends a line
        if match := _LINE.fullmatch(line):
            name, labels, value = match.groups()
            key = tuple((label, _unescaped(value)) for label, value in _LABEL.findall(labels or ""))
            found.setdefault(name, {})[key] = float(value)
    return found


def _unescaped(text: str) -> str:
    return re.sub(r"\\[\\\"n]", lambda match: _ESCAPES[match[0]], text)


# ---- rates -----------------------------------------------------------------------------------------------------------
class _Rates:
    """Rates of counters between two samples; without an earlier one of the same server, everything is None."""

    def __init__(self, before: Sample | None, sample: Sample) -> None:
        same = before is not None and before.status["pid"] == sample.status["pid"]
        self._before = before.metrics if before is not None and same and before.metrics else None
        self._after = sample.metrics
        self._seconds = max(1e-6, sample.at_seconds - before.at_seconds) if before is not None else 1.0

    def of(self, name: str, **labels: str) -> float | None:
        """A second, summed over the series with these labels."""
        if self._before is None:
            return None
        after, before = self._after.get(_PREFIX + name, {}), self._before.get(_PREFIX + name, {})
        key = tuple(labels.items())
        keys = [key] if key in after else [known for known in after if labels.items() <= dict(known).items()]
        return max(0.0, sum(after[known] - before.get(known, 0.0) for known in keys)) / self._seconds

    def labels(self, name: str) -> list[dict[str, str]]:
        return [dict(key) for key in self._after.get(_PREFIX + name, {})]


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if whole and part is not None else None


# ---- the picture -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Picture:
    """JSON values; rates and shares are None where they are not known."""

    summary: dict[str, Any]
    tables: dict[str, list[dict[str, Any]]]  # by the names of TABLES


def picture(before: Sample | None, sample: Sample) -> Picture:
    rates = _Rates(before, sample)
    status = sample.status
    asked = rates.of("lookup_requested_tokens_total")
    misses = {labels["reason"]: rates.of("misses_total", **labels) for labels in rates.labels("misses_total")}
    summary = {
        "version": status["version"],
        "uptime_seconds": status["uptime_seconds"],
        "l1_capacity_bytes": status["l1"]["capacity_bytes"],
        "l1_used_bytes": status["l1"]["used_bytes"],
        "l1_objects": status["l1"]["objects"],
        "evicted_per_second": rates.of("l1_evicted_chunks_total"),
        "sessions": status["sessions"],
        "leases": status["leases"],
        "reservations": status["reservations"],
        "store_queue_objects": status["l2"]["store"]["queued_objects"],
        "prefetches": status["l2"]["prefetch"]["in_flight"] + status["l2"]["prefetch"]["waiting"],
        "lookups_per_second": rates.of("lookups_total"),
        "requested_tokens_per_second": asked,
        "hit_ratio": _share(rates.of("lookup_hit_tokens_total"), asked),
        "hit_ratio_l1": _share(rates.of("lookup_hit_l1_tokens_total"), asked),
        "hit_ratio_l2": _share(rates.of("lookup_hit_l2_tokens_total"), asked),
        "misses_per_second": {reason: rate for reason, rate in misses.items() if rate},
        "internal_faults_per_second": rates.of("internal_faults_total"),
    }
    return Picture(
        summary,
        {
            "engines": [_engine(instance) for instance in status["instances"]],
            "adapters": [_adapter(adapter, rates) for adapter in status["l2"]["adapters"]],
            "tenants": [_tenant(labels, rates) for labels in rates.labels("lookups_total")],
        },
    )


def _engine(instance: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "instance": instance["instance_id"],
        "model": instance["model_name"] or "-",
        "engine": instance["engine"] or "-",
        "workers": len(instance["workers"]),
        "transfer": ", ".join(sorted({worker["mode"] for worker in instance["transfer"]})) or "-",
        "sessions": instance["sessions"],
        "leases": instance["leases"],
    }


def _adapter(adapter: Mapping[str, Any], rates: _Rates) -> dict[str, Any]:
    name = adapter["name"]
    troubles = {"full": "full", "stores_suspended": "stores paused", "loads_suspended": "loads paused"}
    state = [text for key, text in troubles.items() if adapter.get(key)]
    return {
        "name": name,
        "type": adapter["type"],
        "state": ", ".join(state) or "ok",
        "objects": adapter["objects"],
        "used_bytes": adapter["used_bytes"],
        "capacity_bytes": adapter["capacity_bytes"],
        "stored_bytes_per_second": rates.of("l2_stored_bytes_total", l2_name=name),
        "loaded_bytes_per_second": rates.of("l2_loaded_bytes_total", l2_name=name),
        "in_flight": adapter["stores_in_flight"] + adapter["loads_in_flight"],
    }


def _tenant(labels: Mapping[str, str], rates: _Rates) -> dict[str, Any]:
    asked = rates.of("lookup_requested_tokens_total", **labels)
    return {
        "model": labels["model_name"],
        "salt": labels["cache_salt"] or "(none)",
        "lookups_per_second": rates.of("lookups_total", **labels),
        "tokens_per_second": asked,
        "hit_ratio": _share(rates.of("lookup_hit_tokens_total", **labels), asked),
    }


# ---- columns ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Column:
    key: str
    head: str
    shown: Callable[[Any], str] = str


def number_text(value: float | None) -> str:
    """1234.5 -> "1,234"; 3.21 -> "3.2"."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 or float(value).is_integer() else f"{value:.1f}"


def share_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def rate_text(value: float | None) -> str:
    """MB/s of 10^6 bytes."""
    return "-" if value is None else f"{value / 1e6:,.1f}"


def _limit_text(value: float | None) -> str:
    return bytes_text(value) if value else "-"


TABLES: Mapping[str, tuple[Column, ...]] = {
    "engines": (
        Column("instance", "ENGINE"),
        Column("model", "MODEL"),
        Column("engine", "RUNS"),
        Column("workers", "WORKERS"),
        Column("transfer", "TRANSFER"),
        Column("sessions", "SESSIONS"),
        Column("leases", "LEASES"),
    ),
    "adapters": (
        Column("name", "ADAPTER"),
        Column("type", "TYPE"),
        Column("state", "STATE"),
        Column("objects", "OBJECTS", number_text),
        Column("used_bytes", "USED", bytes_text),
        Column("capacity_bytes", "LIMIT", _limit_text),
        Column("stored_bytes_per_second", "STORE MB/S", rate_text),
        Column("loaded_bytes_per_second", "LOAD MB/S", rate_text),
        Column("in_flight", "IN FLIGHT"),
    ),
    "tenants": (
        Column("model", "MODEL"),
        Column("salt", "SALT"),
        Column("lookups_per_second", "LOOKUPS/S", number_text),
        Column("tokens_per_second", "TOKENS/S", number_text),
        Column("hit_ratio", "HIT", share_text),
    ),
}


def arranged(rows: Sequence[Mapping[str, Any]], key: str, *, descending: bool, wanted: str) -> list[Mapping[str, Any]]:
    """Those of which some text has `wanted`, whatever the case, by their `key`; what is not known comes last."""
    kept = [row for row in rows if wanted.lower() in " ".join(map(str, row.values())).lower()]
    known = [row for row in kept if row[key] is not None]
    return sorted(known, key=lambda row: row[key], reverse=descending) + [row for row in kept if row[key] is None]


def cells(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Texts of one line, whatever a name has in it."""
    return [tuple(printable(column.shown(row[column.key])) for column in columns) for row in rows]


def headline(summary: Mapping[str, Any]) -> list[str]:
    """The lines above the tables."""
    share = summary["l1_used_bytes"] / summary["l1_capacity_bytes"]
    used, capacity = bytes_text(summary["l1_used_bytes"]), bytes_text(summary["l1_capacity_bytes"])
    misses = sorted(summary["misses_per_second"].items(), key=lambda miss: -miss[1])
    lines = [
        f"L1      {share:.1%}: {used} of {capacity}, {summary['l1_objects']:,} objects, "
        f"{number_text(summary['evicted_per_second'])} evicted/s",
        f"lookups {number_text(summary['lookups_per_second'])}/s, "
        f"{number_text(summary['requested_tokens_per_second'])} tokens/s, hit {share_text(summary['hit_ratio'])} "
        f"(L1 {share_text(summary['hit_ratio_l1'])}, L2 {share_text(summary['hit_ratio_l2'])})",
        f"held    {summary['sessions']} sessions, {summary['leases']} leases, {summary['reservations']} reservations; "
        f"waiting: {summary['store_queue_objects']} objects for L2, {summary['prefetches']} prefetches",
        "misses  " + (", ".join(f"{reason} {number_text(rate)}/s" for reason, rate in misses) or "none"),
    ]
    if summary["internal_faults_per_second"]:
        lines.append(f"FAULTS  {number_text(summary['internal_faults_per_second'])}/s: see the server's log")
    return lines
