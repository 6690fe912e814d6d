"""Writes docs/reference/metrics.md from the metrics that telemetry/metrics.py declares. --check: fails where it is not
current."""

from __future__ import annotations

import sys

from prometheus_client.metrics import MetricWrapperBase

from lmcache.core.limits import MAX_HISTORY_TENANTS
from lmcache.core.outcome import MissReason
from lmcache.telemetry.metrics import MAX_LABEL_SETS, MAX_MODELS_BEYOND, PREFIX, CoordinatorMetrics, Metrics
from reference_pages import write_or_check

BEGINNING = f"""# Metrics

`GET /metrics` on the HTTP port, and on `--prometheus-port`, gives them in the Prometheus text format. `--otlp-endpoint`
sends the same to an OpenTelemetry receiver, where `lmcache_mp_` is `lmcache_mp.`, units are in UCUM and counters have
no `_total`; every `OTEL_METRIC_EXPORT_INTERVAL` milliseconds, 60,000 unless set. Bytes are bytes, GB/s are 10^9 bytes a
second. A histogram `NAME` has the series `NAME_bucket`, `NAME_sum` and `NAME_count`.

A request counts once in `lookups`, `lookup_requested`, `lookup_hit` and `misses`, however often an engine asks about
it: with its longest lookup and the best answer before it ran.

Figures with `model_name` and `cache_salt` have a series for each of the first {MAX_LABEL_SETS:,} pairs since the
start. Later salts share `_other`, one for each model, until the server starts again; beyond {MAX_MODELS_BEYOND} models
more, new models do, too. Nothing is left out of the sums. `GET /metrics/history`, and so the dashboard, tells the first
{MAX_HISTORY_TENANTS} models and the first {MAX_HISTORY_TENANTS} salts apart.

This page is made from the sources by `scripts/write_metrics_reference.py`.
"""

REASONS = {
    MissReason.NOT_STORED: "never here, or longer ago than is remembered, or under another salt or other weights",
    MissReason.EVICTED: "it was in L1 and left to make room, and no adapter has it; false for one in 8,192 at most",
    MissReason.OVER_QUOTA: "the same, while its cache salt had more than its quota",
    MissReason.CLEARED: "an operator cleared it",
    MissReason.ABANDONED: "its writer vanished before the commit",
    MissReason.NO_ROOM_TO_STORE: "L1 had no room when it was to be stored",
    MissReason.BEING_STORED: "an engine has reserved it and not committed yet",
    MissReason.OTHER_LAYOUT: "L1 has it for the KV layout of another engine of this model",
    MissReason.TOO_SHORT: "fewer tokens than one chunk",
    MissReason.INSTANCE_INCOMPLETE: "not every rank of the engine has registered",
    MissReason.NO_ROOM: "L1 could not hold what L2 has",
    MissReason.L2_DEADLINE: "an adapter did not answer in time",
    MissReason.RECOMPUTE_FASTER: "the engine expects to compute sooner than to load",
    MissReason.L2_FAILED: "an adapter failed",
    MissReason.L2_SUSPENDED: "an adapter is left alone after faults, so nobody knows what it has",
    MissReason.CORRUPT: "the copy that was there did not verify",
}
assert REASONS.keys() == set(MissReason)


def text() -> str:
    parts, seen = [BEGINNING], set[str]()
    for group in (*vars(Metrics()).values(), CoordinatorMetrics()):
        declared = (
            {
                name: metric
                for name, metric in vars(group).items()
                if isinstance(metric, MetricWrapperBase) and name not in seen
            }
            if type(group).__module__ == Metrics.__module__
            else {}
        )
        if not declared:
            continue
        seen |= declared.keys()
        parts.append(f"\n## {_title(group)}\n\n| name | type | unit | labels | meaning |\n|---|---|---|---|---|")
        parts += [_row(metric) for metric in declared.values()]
    parts.append("\n## Reasons of misses\n\n| reason | meaning |\n|---|---|")
    parts += [f"| `{reason.value}` | {meaning} |" for reason, meaning in REASONS.items()]
    return "\n".join(parts) + "\n"


def _title(group: object) -> str:
    title = type(group).__doc__
    assert title is not None, f"{type(group).__name__} needs a docstring: it is the title of its section"
    return title.strip().rstrip(".")


def _row(metric: MetricWrapperBase) -> str:
    (family,) = metric.describe()
    name = family.name + ("_total" if family.type == "counter" else "")
    base = family.name.removeprefix(PREFIX)
    unit = family.unit or next((word for word in ("bytes", "seconds", "ratio") if base.endswith(f"_{word}")), "")
    labels = ", ".join(f"`{label}`" for label in metric._labelnames)  # noqa: SLF001
    return f"| `{name}` | {family.type} | {unit} | {labels} | {family.documentation} |"


if __name__ == "__main__":
    sys.exit(write_or_check({"metrics.md": text()}))
