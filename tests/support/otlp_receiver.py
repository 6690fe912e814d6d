"""Receivers of OpenTelemetry's protocol over gRPC: one that keeps what it gets, one that refuses it, and one that
never answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Receiver(trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.metrics: dict[str, Any] = {}  # the latest of each name
        self.resources: list[dict[str, str]] = []
        self.endpoint = ""

    def Export(self, request: Any, context: Any) -> Any:
        if isinstance(request, trace_service_pb2.ExportTraceServiceRequest):
            for group in request.resource_spans:
                self._note(group.resource)
                self.spans += [span for scope in group.scope_spans for span in scope.spans]
            return trace_service_pb2.ExportTraceServiceResponse()
        for group in request.resource_metrics:
            self._note(group.resource)
            self.metrics.update((metric.name, metric) for scope in group.scope_metrics for metric in scope.metrics)
        return metrics_service_pb2.ExportMetricsServiceResponse()

    def _note(self, resource: Any) -> None:
        self.resources.append({item.key: item.value.string_value for item in resource.attributes})

    def named(self, name: str) -> list[Any]:
        return [span for span in list(self.spans) if span.name == name]


@contextmanager
def a_receiver(port: int = 0, *, certificate: tuple[Path, Path] | None = None) -> Iterator[Receiver]:
    """At a port of the system's choice for 0. `certificate` and its key: by TLS."""
    receiver = Receiver()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(receiver, server)
    if certificate is None:
        receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    else:
        chain, key = (path.read_bytes() for path in certificate)
        credentials = grpc.ssl_server_credentials([(key, chain)])
        receiver.endpoint = f"https://127.0.0.1:{server.add_secure_port(f'127.0.0.1:{port}', credentials)}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()


@contextmanager
def a_refusing_receiver() -> Iterator[str]:
    """Speaks gRPC and takes neither spans nor metrics; its endpoint."""
    server = grpc.server(ThreadPoolExecutor(2))
    endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield endpoint
    finally:
        server.stop(None).wait()


@contextmanager
def a_silent_receiver() -> Iterator[str]:
    """Takes connections and never says a word; its endpoint."""
    listening = socket.create_server(("127.0.0.1", 0))
    taken: list[socket.socket] = []

    def take() -> None:
        try:
            while True:
                taken.append(listening.accept()[0])
        except OSError:
            return

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(5)
        for connection in taken:
            connection.close()
