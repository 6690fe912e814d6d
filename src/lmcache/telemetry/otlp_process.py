"""`python -m lmcache.telemetry.otlp_process`: exports what a server writes to its standard input.

Messages are a length (4 bytes, little-endian) and msgpack: first the settings, then spans or metrics, each answered the
same way on its standard output, with what failed. It ends with its input, so with the server. OpenTelemetry's own
variables (OTEL_EXPORTER_OTLP_HEADERS ...) are in force.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import export as otel
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

from lmcache.telemetry.otlp_channel import STOP_SECONDS, read_messages, write_message

PREFIX = "lmcache_mp_"
_EXPORT_SECONDS = 5.0
_NANOSECONDS = 1_000_000_000
_SCOPE = InstrumentationScope("lmcache")
_IDS = RandomIdGenerator()
_MAX_FAILURE_CHARACTERS = 300
_NICE = 19  # the server and the engines come first
_CUMULATIVE = otel.AggregationTemporality.CUMULATIVE


def _end_after_the_server() -> None:
    """A receiver that hangs takes the deadline of each message that is in the pipe. A server that ends waits no longer
    than this either; one that was killed cannot say so."""
    poll = select.poll()
    poll.register(sys.stdin.fileno(), 0)  # only the end of whoever writes
    poll.poll()
    threading.Event().wait(STOP_SECONDS)
    os._exit(1)


def otel_name(name: str) -> str:
    """`lmcache_mp_lookup_hit` is `lmcache_mp.lookup_hit`, as it is documented."""
    return name.replace(PREFIX, "lmcache_mp.", 1).replace(".event_bus_", ".event_bus.", 1)


def spans(message: Mapping[str, Any], resource: Resource) -> Iterator[ReadableSpan]:
    sampled = TraceFlags(TraceFlags.SAMPLED)

    def span(
        name: str, trace: int, number: int, parent: int, times: tuple[float, float], attributes: Mapping[str, Any]
    ) -> ReadableSpan:
        started, ended = (int((message["offset"] + seconds) * _NANOSECONDS) for seconds in times)
        return ReadableSpan(
            name,
            context=SpanContext(trace, number, False, sampled),
            parent=SpanContext(trace, parent, True, sampled) if parent else None,
            resource=resource,
            attributes=attributes,
            kind=SpanKind.SERVER if name == "request" else SpanKind.INTERNAL,
            instrumentation_scope=_SCOPE,
            start_time=started,
            end_time=ended,
        )

    for name, trace_id, number, parent, started, ended, attributes, tiers in message["spans"]:
        trace = int.from_bytes(trace_id, "big")
        yield span(name, trace, number, parent, (started, ended), dict(attributes))
        for tier, tier_started, tier_ended, objects in tiers:
            below = {"objects": objects} if objects else {}
            yield span(tier, trace, _IDS.generate_span_id(), number, (tier_started, tier_ended), below)


def metrics(message: Mapping[str, Any], resource: Resource, started: int) -> otel.MetricsData:
    sampled_at = int(message["wall"] * _NANOSECONDS)
    converted = [
        _metric(family, started, sampled_at)
        for family in message["metrics"]
        if family[0].startswith(PREFIX) and family[4]
    ]
    scope = otel.ScopeMetrics(_SCOPE, converted, "")
    return otel.MetricsData([otel.ResourceMetrics(resource, [scope], "")])


def _metric(family: list[Any], started: int, sampled_at: int) -> otel.Metric:
    name, kind, unit, text, samples = family
    base = name.removesuffix(f"_{unit}") if unit else name
    data: otel.Sum | otel.Gauge | otel.Histogram
    if kind == "histogram":
        data = otel.Histogram(list(_histogram_points(name, samples, started, sampled_at)), _CUMULATIVE)
    else:
        points = [
            otel.NumberDataPoint(labels, started, sampled_at, value)
            for sample, labels, value in samples
            if not sample.endswith("_created")
        ]
        data = otel.Sum(points, _CUMULATIVE, True) if kind == "counter" else otel.Gauge(points)
    return otel.Metric(otel_name(base), text, _unit(unit), data)


def _unit(unit: str) -> str:
    """In UCUM, as OpenTelemetry wants it."""
    return {"seconds": "s", "bytes": "By", "": "1", "GB_per_second": "GBy/s"}.get(unit, f"{{{unit}}}")


def _histogram_points(
    name: str, samples: Iterable[Any], started: int, sampled_at: int
) -> Iterator[otel.HistogramDataPoint]:
    series: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
    for sample, labels, value in samples:
        key = tuple(sorted((label, text) for label, text in labels.items() if label != "le"))
        found = series.setdefault(key, {"bounds": [], "upto": [], "sum": 0.0, "count": 0})
        if sample == f"{name}_bucket":
            found["upto"].append(int(value))
            if labels["le"] != "+Inf":
                found["bounds"].append(float(labels["le"]))
        elif sample == f"{name}_sum":
            found["sum"] = value
        elif sample == f"{name}_count":
            found["count"] = int(value)
    for key, found in series.items():
        upto = found["upto"]
        counts = [count - before for count, before in zip(upto, [0, *upto], strict=False)]
        yield otel.HistogramDataPoint(
            dict(key), started, sampled_at, found["count"], found["sum"], counts, found["bounds"], 0.0, 0.0
        )


class _Failures(logging.Handler):
    """Keeps what the library would log, for the server's log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.latest = ""
        library = logging.getLogger("opentelemetry")
        library.addHandler(self)
        library.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self.latest = " ".join(record.getMessage().split())[:_MAX_FAILURE_CHARACTERS]


def _own_output() -> BinaryIO:
    """Standard output for the answers alone: what libraries print goes to the server's standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def main() -> int:
    os.nice(_NICE)
    for number in (signal.SIGINT, signal.SIGTERM):  # systemd sends it to all processes of a service
        signal.signal(number, signal.SIG_IGN)  # the server decides when this one ends
    failures = _Failures()
    answers = _own_output()
    threading.Thread(target=_end_after_the_server, daemon=True).start()
    received = read_messages(sys.stdin.buffer)
    settings = next(received, None)
    if settings is None:
        return 0
    endpoint, instance_id = settings["endpoint"], settings["service.instance.id"]
    resource = Resource.create({"service.name": "lmcache", "service.instance.id": instance_id})
    insecure = endpoint.startswith("http://")
    span_exporter = OTLPSpanExporter(endpoint=endpoint, insecure=insecure, timeout=_EXPORT_SECONDS)
    metric_exporter = OTLPMetricExporter(endpoint=endpoint, insecure=insecure, timeout=_EXPORT_SECONDS)
    started = int(settings["started"] * _NANOSECONDS)
    for message in received:
        if "spans" in message:
            is_taken = span_exporter.export(list(spans(message, resource))) is SpanExportResult.SUCCESS
        else:
            result = metric_exporter.export(metrics(message, resource, started))
            is_taken = result is otel.MetricExportResult.SUCCESS
        if is_taken:
            failures.latest = ""  # kept until then: the library logs the same failure once in a while
        with contextlib.suppress(BrokenPipeError):  # the server was killed
            write_message(answers, {"failure": "" if is_taken else failures.latest or "it was not taken"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
