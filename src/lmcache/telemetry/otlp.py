"""Sends spans and metrics to an OpenTelemetry receiver, through a process of its own (otlp_process.py).

The server imports nothing of OpenTelemetry, and a receiver that hangs or dies holds up a pipe that a thread of its own
writes to. What cannot be sent is dropped and counted.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lmcache.clock import Clock
from lmcache.errors import ConfigError
from lmcache.telemetry.batch_queue import BatchQueue
from lmcache.telemetry.log_limiter import LogLimiter
from lmcache.telemetry.metrics import Metrics, OtlpMetrics
from lmcache.telemetry.tracing import Span

log = logging.getLogger("lmcache.telemetry")

LENGTH_BYTES = 4
_MODULES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc")
_GATHER_SECONDS = 1.0
_MAX_SPANS_A_MESSAGE = 512
_FIRST_RESTART_SECONDS, _LAST_RESTART_SECONDS = 1.0, 60.0
STOP_SECONDS = 2.0  # for what waits, when the server ends
_INTERVAL_VARIABLE = "OTEL_METRIC_EXPORT_INTERVAL"  # milliseconds, as OpenTelemetry says
_INTERVAL_MS = 60_000
_MIN_INTERVAL_MS = 100


def refuse_unusable(endpoint: str, environ: Mapping[str, str]) -> None:
    """ConfigError where `OtlpExporter` could not work."""
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"--otlp-endpoint must be http://HOST:PORT, or https:// with TLS, of a gRPC receiver; got {endpoint!r}."
        )
    if any(_is_missing(module) for module in _MODULES):
        raise ConfigError("--otlp-endpoint needs the OpenTelemetry SDK; install lmcache[otlp], or drop the option.")
    interval_seconds(environ)


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
    ) -> None:
        self._settings = {"endpoint": endpoint, "service.instance.id": service_instance_id}
        self._registry = metrics
        self._metrics: OtlpMetrics = metrics.otlp
        self._clock = clock
        self._metric_seconds = metric_seconds
        self._stopping = threading.Event()
        self._spans: BatchQueue[Span] = BatchQueue(self._send_spans, queue_size, "lmcache-otlp")
        self._metric_thread = threading.Thread(target=self._export_metrics, name="lmcache-otlp-metrics", daemon=True)
        self._writing = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._restart_at = 0.0
        self._restart_seconds = _FIRST_RESTART_SECONDS
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
        if process is None:
            return
        assert process.stdin is not None
        closing = threading.Thread(target=_close_quietly, args=(process.stdin,), daemon=True)
        closing.start()  # a pipe that is full may keep it
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_SECONDS)

    # ---- the queue's thread ------------------------------------------------------------------------------------------
    def _send_spans(self, spans: list[Span], dropped: int) -> None:
        offset = self._clock.wall() - self._clock.monotonic()
        for first in range(0, len(spans), _MAX_SPANS_A_MESSAGE):
            batch = spans[first : first + _MAX_SPANS_A_MESSAGE]
            if not self._send({"offset": offset, "spans": [_packed(span) for span in batch]}):
                self._metrics.otlp_dropped_spans.inc(len(batch))
        self._stopping.wait(_GATHER_SECONDS)  # so that spans go out by the hundred

    def _export_metrics(self) -> None:
        while not self._stopping.wait(self._metric_seconds):
            families = [_family(family) for family in self._registry.collect()]
            if not self._send({"wall": self._clock.wall(), "metrics": families}):
                self._metrics.otlp_failed_exports.inc()

    # ---- the process -------------------------------------------------------------------------------------------------
    def _send(self, message: Mapping[str, Any]) -> bool:
        with self._writing:
            try:
                process = self._running()
                if process is None:
                    return False
                assert process.stdin is not None
                payload = msgspec.msgpack.encode(message)
                process.stdin.write(len(payload).to_bytes(LENGTH_BYTES, "little") + payload)
                process.stdin.flush()
            except (OSError, ValueError) as error:
                self._gone(str(error))
                return False
            return True

    def _running(self) -> subprocess.Popen[bytes] | None:
        """None while one that ended is not to be started again yet."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        if self._process is not None:
            self._gone(f"it ended with {self._process.returncode}")
        now = self._clock.monotonic()
        if self._stopping.is_set() or now < self._restart_at:
            return None
        self._restart_at = now + self._restart_seconds
        self._restart_seconds = min(2 * self._restart_seconds, _LAST_RESTART_SECONDS)
        process = subprocess.Popen(
            [sys.executable, "-m", "lmcache.telemetry.otlp_process"], stdin=subprocess.PIPE, start_new_session=True
        )
        assert process.stdin is not None
        payload = msgspec.msgpack.encode(self._settings)
        process.stdin.write(len(payload).to_bytes(LENGTH_BYTES, "little") + payload)
        self._process = process
        return process

    def _gone(self, reason: str) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            _close_quietly(process.stdin)
        self._metrics.otlp_failed_exports.inc()
        if self._log_limiter.due():
            log.warning("The process that exports to --otlp-endpoint is gone (%s); it is started again", reason)


def _close_quietly(stream: Any) -> None:
    with contextlib.suppress(OSError, ValueError):
        stream.close()


def _packed(span: Span) -> Sequence[Any]:
    """Ids as bytes: msgpack has no integers of 128 bits."""
    return (
        span.name,
        span.trace_id.to_bytes(16, "big"),
        span.span_id.to_bytes(8, "big"),
        span.parent_id.to_bytes(8, "big"),
        span.started,
        span.ended,
        span.attributes,
        span.tiers,
    )


def _family(family: Any) -> Sequence[Any]:
    samples = [(sample.name, sample.labels, sample.value) for sample in family.samples]
    return family.name, family.type, family.unit, family.documentation, samples
