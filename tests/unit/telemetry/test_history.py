"""Samples of the metrics: what they sum, what they leave out, and that they stay bounded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lmcache.core.limits import HISTORY_SECONDS, MAX_HISTORY_TENANTS
from lmcache.telemetry import history as history_module
from lmcache.telemetry.history import SAMPLE_SECONDS, Excerpt, MetricsHistory
from lmcache.telemetry.metrics import OVERFLOW_LABEL, Metrics
from manual_clock import ManualClock


class Rig:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.metrics = Metrics()
        self.history = MetricsHistory(self.metrics, self.clock)

    def sample(self) -> None:
        self.history.sample()
        self.clock.advance(SAMPLE_SECONDS)

    def excerpt(self, since: int = 0) -> Excerpt:
        return self.history.since(since, hides_salts=False)


def described(excerpt: Excerpt) -> list[dict[str, Any]]:
    return [json.loads(series) for series in excerpt.series]


def values(excerpt: Excerpt, name: str, **labels: str) -> Any:
    column = described(excerpt).index({"name": name, "labels": labels})
    rows = [json.loads(sample) for sample in excerpt.samples]
    return [row[column] if column < len(row) else None for row in rows]


def test_tenants_are_summed_by_model_and_by_salt() -> None:
    rig = Rig()
    requested = rig.metrics.service.lookup_requested
    for model, salt, tokens in (("small", "alice", 1), ("small", "bob", 2), ("large", "alice", 4)):
        requested.labels(model, salt).inc(tokens)
    rig.sample()
    excerpt, name = rig.excerpt(), "lookup_requested_tokens_total"
    assert values(excerpt, name) == [7]
    assert values(excerpt, name, model_name="small") == [3]
    assert values(excerpt, name, model_name="large") == [4]
    assert values(excerpt, name, cache_salt="alice") == [5]
    assert values(excerpt, name, cache_salt="bob") == [2]


def test_a_series_that_appears_later_was_not_there_before() -> None:
    rig = Rig()
    rig.sample()
    rig.metrics.service.misses.labels("evicted").inc()
    rig.sample()
    excerpt = rig.excerpt()
    assert values(excerpt, "misses_total", reason="evicted") == [None, 1]
    assert values(excerpt, "l1_evicted_chunks_total") == [0, 0]


def test_only_what_is_newer_is_given() -> None:
    rig = Rig()
    for _ in range(3):
        rig.sample()
    first, second, third = rig.excerpt().times
    assert (second - first, third - second) == (SAMPLE_SECONDS, SAMPLE_SECONDS)
    assert rig.excerpt(first).times == [second, third]
    assert (rig.excerpt(third).times, rig.excerpt(third).samples) == ([], [])


def test_a_clock_that_is_set_back_leaves_times_in_order() -> None:
    rig = Rig()
    for _ in range(10):
        rig.sample()
    last = rig.excerpt().times[-1]
    rig.clock.advance(-5.5 * SAMPLE_SECONDS)
    for _ in range(2):
        rig.sample()
    times = rig.excerpt().times
    assert times == sorted(set(times)) and times[-1] < last
    assert rig.excerpt(last).times == times  # for a page that has what was taken before


def test_all_of_a_full_history_costs_little_to_ask_for() -> None:
    """Everybody may ask: nothing is computed for each value."""
    rig = Rig()
    for number in range(MAX_HISTORY_TENANTS):
        rig.metrics.service.lookups.labels(f"model-{number}", f"salt-{number}").inc()
    for _ in range(int(HISTORY_SECONDS / SAMPLE_SECONDS)):
        rig.sample()
    excerpt, again = rig.excerpt(), rig.excerpt()
    assert len(excerpt.samples) == HISTORY_SECONDS / SAMPLE_SECONDS
    assert all(row is other for row, other in zip(excerpt.samples, again.samples, strict=True))


def test_of_calls_only_lookups_have_a_histogram() -> None:
    rig = Rig()
    for method in ("lookup", "reserve"):
        rig.metrics.rpc.call.labels(method).observe(0.003)
    rig.sample()
    series = described(rig.excerpt())
    methods = {entry["labels"]["method"] for entry in series if entry["name"] == "call_seconds_bucket"}
    assert methods == {"lookup"}


def test_it_keeps_an_hour() -> None:
    rig = Rig()
    for _ in range(int(HISTORY_SECONDS / SAMPLE_SECONDS) + 50):
        rig.sample()
    times = rig.excerpt().times
    assert times[-1] - times[0] == HISTORY_SECONDS


def test_many_tenants_share_a_series() -> None:
    rig = Rig()
    for number in range(3 * MAX_HISTORY_TENANTS):
        rig.metrics.service.lookups.labels(f"model-{number}", f"salt-{number}").inc()
    rig.sample()
    excerpt = rig.excerpt()
    assert values(excerpt, "lookups_total") == [3 * MAX_HISTORY_TENANTS]
    assert values(excerpt, "lookups_total", cache_salt=OVERFLOW_LABEL) == [2 * MAX_HISTORY_TENANTS]
    assert len([series for series in described(excerpt) if "cache_salt" in series["labels"]]) == MAX_HISTORY_TENANTS + 1


def test_series_beyond_the_limit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MAX_HISTORY_SERIES", 5)
    rig = Rig()
    rig.sample()
    assert len(rig.excerpt().series) == 5
