"""The last hour of the metrics that the dashboard draws: samples of the registry in a ring.

Series are those of `GET /metrics`, without the prefix. What is counted for each model and salt is kept as a sum, as a
sum for each model, and as a sum for each salt: tenants come from outside, and a series for each pair would not be
bounded.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from prometheus_client.core import Metric

from lmcache.clock import Clock
from lmcache.core.limits import HISTORY_SECONDS, MAX_HISTORY_SERIES, MAX_HISTORY_TENANTS
from lmcache.telemetry.metrics import OVERFLOW_LABEL, PREFIX, SALT_LABEL, Metrics

SAMPLE_SECONDS = 10.0

Labels = tuple[tuple[str, str], ...]  # names and values, by name
_Key = tuple[str, Labels]  # the name of a series without the prefix, its labels

_TENANT_LABELS = ("model_name", SALT_LABEL)
_RECORDED = frozenset(
    (
        *("lookups", "lookup_requested_tokens", "lookup_hit_tokens", "lookup_hit_l1_tokens", "lookup_hit_l2_tokens"),
        *("tier_hit_bytes", "prefill_saved_seconds", "misses", "sessions", "leases"),
        *("l1_usage_ratio", "l1_evicted_chunks", "l1_write_chunks", "l1_eviction_age_seconds"),
        *("l2_usage_bytes", "l2_evicted_objects", "l2_stored_bytes", "l2_loaded_bytes", "l2_breaker_open"),
        *("l2_store_queue_depth", "call_seconds", "l2_load_seconds", "l2_store_seconds"),
    )
)
_RECORDED_METHOD = "lookup"  # of `call_seconds`, which has a histogram for each method


@dataclass(frozen=True)
class Excerpt:
    """`times`: of the samples, in whole seconds since 1970-01-01 UTC, oldest first. `series`: a JSON object with the
    name and the labels of each. `samples`: a JSON list for each time, with a value for each series; null, or nothing at
    its end, where there was no such series yet."""

    times: list[int]
    series: list[bytes]
    samples: list[bytes]


class MetricsHistory:
    """Thread-safe. Holds HISTORY_SECONDS of at most MAX_HISTORY_SERIES series; series beyond are left out. A sample is
    made JSON once, when it is taken (5 to 20 bytes a value, so 4 to 14 MiB in all): everybody may ask for all of
    them."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self.interval_seconds = SAMPLE_SECONDS
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._columns: dict[_Key, int] = {}
        self._series: dict[bool, list[bytes]] = {False: [], True: []}  # by whether salts are hidden
        self._tenants: dict[str, set[str]] = {name: set() for name in _TENANT_LABELS}
        samples = math.ceil(HISTORY_SECONDS / SAMPLE_SECONDS) + 1
        self._samples: deque[tuple[int, bytes]] = deque(maxlen=samples)

    def sample(self) -> None:
        """Takes one. Costs a collection of all metrics: not on a loop that others wait for."""
        values: dict[_Key, float] = {}
        for metric in self._metrics.collect():
            if metric.name.removeprefix(PREFIX) in _RECORDED:
                for key, value in self._recorded(metric):
                    values[key] = values.get(key, 0.0) + value
        with self._lock:
            for key in values:
                if key not in self._columns and len(self._columns) < MAX_HISTORY_SERIES:
                    self._columns[key] = len(self._columns)
                    for hides_salts, texts in self._series.items():
                        texts.append(self._described(key, hides_salts=hides_salts))
            row = msgspec.json.encode([_json_number(values.get(key, math.nan)) for key in self._columns])
            taken_at = int(self._clock.wall())
            while self._samples and self._samples[-1][0] >= taken_at:
                self._samples.pop()  # the clock was set back
            self._samples.append((taken_at, row))

    def since(self, time: int, *, hides_salts: bool) -> Excerpt:
        """The samples after that second, all of them for one that is still to come: the clock was set back since. With
        `hides_salts` digests stand for cache salts."""
        with self._lock:
            if self._samples and time > self._samples[-1][0]:
                time = 0
            samples = [sample for sample in self._samples if sample[0] > time]
            series = list(self._series[hides_salts])
        return Excerpt([taken_at for taken_at, _ in samples], series, [row for _, row in samples])

    def _recorded(self, metric: Metric) -> Iterator[tuple[_Key, float]]:
        for sample in metric.samples:
            name, labels = sample.name.removeprefix(PREFIX), sample.labels
            if SALT_LABEL in labels:
                yield (name, ()), sample.value
                for label in _TENANT_LABELS:
                    yield (name, ((label, self._bounded(label, labels[label])),)), sample.value
            elif labels.get("method", _RECORDED_METHOD) == _RECORDED_METHOD:
                yield (name, tuple(sorted(labels.items()))), sample.value

    def _bounded(self, label: str, value: str) -> str:
        """The value, or OVERFLOW_LABEL when there are many of that label already."""
        known = self._tenants[label]
        if value not in known and len(known) >= MAX_HISTORY_TENANTS:
            return OVERFLOW_LABEL
        known.add(value)
        return value

    def _described(self, key: _Key, *, hides_salts: bool) -> bytes:
        name, labels = key
        digest = self._metrics.shown_digest if hides_salts else str
        shown = {label: digest(text) if label == SALT_LABEL else text for label, text in labels}
        return msgspec.json.encode({"name": name, "labels": shown})


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None
