"""Sends spans and metrics to an OpenTelemetry receiver, through a process of its own (otlp_process.py).

The server imports nothing of OpenTelemetry, and a receiver that hangs or dies holds up a pipe that a thread of its own
writes to. What cannot be sent, or is not taken, is dropped, counted and said in the log.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from lmcache.clock import Clock
from lmcache.errors import ConfigError
from lmcache.telemetry.batch_queue import BatchQueue
from lmcache.telemetry.log_limiter import LogLimiter
from lmcache.telemetry.metrics import Metrics, OtlpMetrics
from lmcache.telemetry.otlp_channel import STOP_SECONDS, ExporterProcess, Lost
from lmcache.telemetry.tracing import Span

log = logging.getLogger("lmcache.telemetry")

_MODULES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc")
_GATHER_SECONDS = 1.0
_MAX_SPANS_A_MESSAGE = 512
_FIRST_RESTART_SECONDS, _LAST_RESTART_SECONDS = 1.0, 60.0
_STEADY_SECONDS = 60.0  # after a run of that length the pauses begin anew
_INTERVAL_VARIABLE = "OTEL_METRIC_EXPORT_INTERVAL"  # milliseconds, as OpenTelemetry says
_INTERVAL_MS = 60_000
_MIN_INTERVAL_MS = 100


def refuse_unusable(endpoint: str, environ: Mapping[str, str]) -> None:
    """ConfigError where `OtlpExporter` could not work."""
    if not _is_endpoint(endpoint):
        raise ConfigError(
            f"--otlp-endpoint must be http://HOST:PORT, or https:// with TLS, of a gRPC receiver; got {endpoint!r}."
        )
    if any(_is_missing(module) for module in _MODULES):
        raise ConfigError("--otlp-endpoint needs the OpenTelemetry SDK; install lmcache[otlp], or drop the option.")
    interval_seconds(environ)


def _is_endpoint(text: str) -> bool:
    """Whether it is an endpoint and nothing more: the exporter would ignore the path of a receiver over HTTP."""
    try:
        url = urlsplit(text)
        has_port = url.port != 0 if url.port is not None else url.scheme == "https" and not url.netloc.endswith(":")
    except ValueError:
        return False
    rest = url.path.removeprefix("/") + url.query + url.fragment
    is_plain = text.isprintable() and not set(text) & set(" ?#@")
    return url.scheme in ("http", "https") and bool(url.hostname) and has_port and not rest and is_plain


def _is_missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True


def interval_seconds(environ: Mapping[str, str]) -> float:
    """Between two exports of metrics. ConfigError when the variable is no number of milliseconds."""
    text = environ.get(_INTERVAL_VARIABLE) or str(_INTERVAL_MS)
    if not text.isdecimal() or int(text) < _MIN_INTERVAL_MS:
        raise ConfigError(f"{_INTERVAL_VARIABLE} must be milliseconds, at least {_MIN_INTERVAL_MS}; got {text!r}.")
    return int(text) / 1e3


class OtlpExporter:
    """`put` is for any thread and never waits."""

    def __init__(
        self,
        endpoint: str,
        service_instance_id: str,
        metrics: Metrics,
        *,
        queue_size: int,
        clock: Clock,
        metric_seconds: float,
        start_process: Callable[[Mapping[str, Any], Lost], ExporterProcess] = ExporterProcess,
    ) -> None:
        self._settings = {
            "endpoint": endpoint,
            "service.instance.id": service_instance_id,
            "started": clock.wall(),  # since when counters count: the process may start later, and again
        }
        self._registry = metrics
        self._metrics: OtlpMetrics = metrics.otlp
        self._clock = clock
        self._metric_seconds = metric_seconds
        self._stopping = threading.Event()
        self._spans: BatchQueue[Span] = BatchQueue(self._send_spans, queue_size, "lmcache-otlp")
        self._metric_thread = threading.Thread(target=self._export_metrics, name="lmcache-otlp-metrics", daemon=True)
        self._writing = threading.Lock()
        self._start_process = start_process
        self._process: ExporterProcess | None = None
        self._restart = RestartPause()
        self._log_limiter = LogLimiter(60.0, clock)

    def start(self) -> None:
        self._spans.start()
        if self._registry.enabled:
            self._metric_thread.start()

    def put(self, span: Span) -> None:
        if not self._spans.put(span):
            self._metrics.otlp_dropped_spans.inc()

    def stop(self) -> None:
        """Sends what waits, or gives up after a moment. Idempotent."""
        self._stopping.set()
        self._spans.stop(STOP_SECONDS)
        process, self._process = self._process, None
        if process is not None:
            process.close()

    # ---- the queue's thread ------------------------------------------------------------------------------------------
    def _send_spans(self, spans: list[Span], dropped: int) -> None:
        offset = self._clock.wall() - self._clock.monotonic()
        rest = len(spans)
        try:
            for first in range(0, len(spans), _MAX_SPANS_A_MESSAGE):
                batch = spans[first : first + _MAX_SPANS_A_MESSAGE]
                self._send({"offset": offset, "spans": batch}, len(batch))
                rest -= len(batch)
        finally:
            self._metrics.otlp_dropped_spans.inc(rest)  # of a fault, which the queue logs
        self._stopping.wait(_GATHER_SECONDS)  # so that spans go out by the hundred

    def _export_metrics(self) -> None:
        while not self._stopping.wait(self._metric_seconds):
            try:
                families = [_family(family) for family in self._registry.collect()]
                self._send({"wall": self._clock.wall(), "metrics": families}, 0)
            except Exception:  # the root of the thread: the next export goes out all the same
                self._metrics.otlp_failed_exports.inc()
                if self._log_limiter.due("metrics"):
                    log.exception("Metrics are not exported to --otlp-endpoint")

    # ---- the process -------------------------------------------------------------------------------------------------
    def _send(self, message: Mapping[str, Any], spans: int) -> None:
        """`spans`: how many the message has, 0 for metrics."""
        with self._writing:
            process = self._running()
            if process is None or not process.send(message, spans):
                self._count_lost(spans)

    def _running(self) -> ExporterProcess | None:
        """None while one that ended is not to be started again yet."""
        monotonic = self._clock.monotonic()
        if self._process is not None:
            if not (reason := self._process.why_ended):
                return self._process
            self._process.kill()
            self._process = None
            self._restart.ended(monotonic)
            self._gone(reason)
        if self._stopping.is_set() or not self._restart.due(monotonic):
            return None
        self._restart.begun(monotonic)
        try:
            self._process = self._start_process(self._settings, self._on_lost)
        except OSError as error:
            self._gone(str(error))
        return self._process

    def _gone(self, reason: str) -> None:
        self._metrics.otlp_failed_exports.inc()
        if self._log_limiter.due("gone"):
            log.warning("The process that exports to --otlp-endpoint is gone (%s); it is started again", reason)

    def _on_lost(self, spans: int, reason: str) -> None:
        self._count_lost(spans)
        if not self._stopping.is_set() and self._log_limiter.due("lost"):
            log.warning(
                "--otlp-endpoint %s does not take spans or metrics (%s); the metrics otlp_dropped_spans and "
                "otlp_failed_exports count what is lost",
                self._settings["endpoint"],
                reason,
            )

    def _count_lost(self, spans: int) -> None:
        if spans:
            self._metrics.otlp_dropped_spans.inc(spans)
        else:
            self._metrics.otlp_failed_exports.inc()


class RestartPause:
    """Between two starts of a process that ends: it doubles, and begins anew after a run of _STEADY_SECONDS."""

    def __init__(self) -> None:
        self._begun_at = self._due_at = 0.0
        self._pause_seconds = _FIRST_RESTART_SECONDS

    def due(self, monotonic: float) -> bool:
        return monotonic >= self._due_at

    def begun(self, monotonic: float) -> None:
        self._begun_at, self._due_at = monotonic, monotonic + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, _LAST_RESTART_SECONDS)

    def ended(self, monotonic: float) -> None:
        if monotonic - self._begun_at >= _STEADY_SECONDS:
            self._due_at, self._pause_seconds = monotonic, _FIRST_RESTART_SECONDS


def _family(family: Any) -> Sequence[Any]:
    samples = [(sample.name, sample.labels, sample.value) for sample in family.samples]
    return family.name, family.type, family.unit, family.documentation, samples
