"""When the exporter's process is started again, and what becomes of what is not taken, with a process of the test's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

import msgspec
import pytest

from lmcache.telemetry.metrics import Metrics
from lmcache.telemetry.otlp import OtlpExporter, RestartPause
from lmcache.telemetry.otlp_channel import ExporterProcess, Lost
from lmcache.telemetry.tracing import Span
from manual_clock import ManualClock
from polling import until

SPAN = Span("request", bytes(15) + b"\1", 2, 0, 0.0, 1.0, ())


class RefusedProcess:
    """Answers each message with a failure."""

    why_ended = ""

    def __init__(self, settings: Mapping[str, Any], lost: Lost) -> None:
        self._lost = lost

    def send(self, message: Mapping[str, Any], spans: int) -> bool:
        self._lost(spans, "nobody is there")
        return True

    def close(self) -> None:
        pass


class TakingProcess:
    """Takes each message that can be packed. Called as a class is, it is the process."""

    why_ended = ""

    def __init__(self) -> None:
        self.taken: list[Mapping[str, Any]] = []

    def __call__(self, settings: Mapping[str, Any], lost: Lost) -> TakingProcess:
        return self

    def send(self, message: Mapping[str, Any], spans: int) -> bool:
        msgspec.msgpack.encode(message)
        self.taken.append(message)
        return True

    def close(self) -> None:
        pass


def test_a_process_that_ends_is_started_after_longer_and_longer_pauses_until_it_runs_steadily() -> None:
    pause, now = RestartPause(), 100.0
    pauses = []
    for _ in range(9):
        began = now
        pause.begun(now)
        pause.ended(now)
        while not pause.due(now):
            now += 0.5
        pauses.append(now - began)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    pause.begun(now)
    now += 3600
    pause.ended(now)
    assert pause.due(now)
    pause.begun(now)
    assert not pause.due(now + 0.5) and pause.due(now + 1)


def test_what_is_not_taken_is_counted_and_said_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock, metrics = ManualClock(), Metrics()
    exporter = OtlpExporter(
        *("http://collector:4317", "", metrics),
        queue_size=10,
        clock=clock,
        metric_seconds=3600,
        start_process=cast("type[ExporterProcess]", RefusedProcess),
    )
    lines = []
    exporter.start()
    for count, seconds in enumerate((0.0, 59.0, 2.0), 1):
        clock.advance(seconds)
        exporter.put(SPAN)
        until(lambda count=count: metrics.registry.get_sample_value("lmcache_mp_otlp_dropped_spans_total") == count)
        lines.append(len([record for record in caplog.records if record.levelno == logging.WARNING]))
    exporter.stop()
    assert lines == [1, 1, 2]
    assert "--otlp-endpoint http://collector:4317 does not take spans or metrics (nobody is there)" in caplog.text


def test_a_fault_costs_one_export_of_metrics_and_no_span_uncounted(caplog: pytest.LogCaptureFixture) -> None:
    process, metrics, faults = TakingProcess(), Metrics(), [RuntimeError("once")]

    def refresh() -> None:
        if faults:
            raise faults.pop()

    metrics.on_scrape(refresh)
    exporter = OtlpExporter(
        *("http://collector:4317", "", metrics),
        queue_size=10,
        clock=ManualClock(),
        metric_seconds=0.01,
        start_process=cast("type[ExporterProcess]", process),
    )
    exporter.start()
    until(lambda: process.taken)
    exporter.put(Span("request", bytes(16), 2**64, 0, 0.0, 1.0, ()))
    until(lambda: metrics.registry.get_sample_value("lmcache_mp_otlp_dropped_spans_total") == 1)
    exporter.stop()
    assert metrics.registry.get_sample_value("lmcache_mp_otlp_failed_exports_total") == 1
    assert "Metrics are not exported to --otlp-endpoint" in caplog.text


def test_a_message_that_cannot_be_sent_is_answered_as_no_other_one() -> None:
    lost: list[int] = []
    settings = {"endpoint": "http://127.0.0.1:1", "service.instance.id": "", "started": 0.0}
    process = ExporterProcess(settings, lambda spans, why: lost.append(spans))
    try:
        with pytest.raises(TypeError):
            process.send({"offset": 0.0, "spans": [object()]}, 7)
        process.send({"offset": 0.0, "spans": []}, 3)
    finally:
        process.kill()
    until(lambda: lost)
    assert lost == [3]
