"""Spans and metrics at a real receiver of OpenTelemetry, and receivers that hang or are not there."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lmcache.errors import ConfigError
from lmcache.protocol import messages as m
from lmcache.server import Server
from lmcache.startup import plan
from lmcache.telemetry.otlp_channel import ExporterProcess, write_message
from polling import until
from process.support import CALL_SECONDS, SmallEngine, server_within, unpack_slots
from services import need_package
from services.certificates import Certificates

need_package("opentelemetry")

from support.otlp_receiver import Receiver, a_receiver, a_refusing_receiver, a_silent_receiver  # noqa: E402

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
EXPORTER_END_SECONDS = 60.0  # its imports included; each message alone takes its deadline of 5 s
NO_ENDPOINTS = (
    *(
        "localhost:4317",
        "http://",
        "https://",
        "http://:4317",
        "http://localhost",
        "http://localhost:",
        "http://[::1:4317",
    ),
    *(
        "http://localhost:99999",
        "http://localhost:0",
        "http://localhost:port",
        "http://local host:4317",
        "grpc://localhost:1",
    ),
    *(
        "http://localhost:4318/v1/traces",
        "http://localhost:4317?a=b",
        "http://localhost:4317#a",
        "http://me:word@localhost:4317",
    ),
)
# What a receiver that stands still for a moment is said to have answered, too.
NOT_TAKEN = ("UNIMPLEMENTED", "DEADLINE_EXCEEDED", "UNAVAILABLE")
RECEIVE_SECONDS = 60.0  # the exporter's process begins by importing what it needs


def sample(server: Server, name: str) -> float:
    return server.metrics.registry.get_sample_value(name) or 0.0


def exporters() -> list[int]:
    """Process ids of the exporters that this process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # a process that ends meanwhile
            parent = int(stat.read_text().rpartition(") ")[2].split()[1])
            if parent == os.getpid() and b"otlp_process" in (stat.parent / "cmdline").read_bytes():
                found.append(int(stat.parent.name))
    return found


def a_request(engine: SmallEngine, *, flags: str = "01", request: str = "r1") -> None:
    """Asks, stores two chunks, asks again, loads and ends."""
    tokens = engine.tokens(1, 2)
    parent = f"00-{TRACE_ID}-{PARENT_ID}-{flags}"

    def lookup() -> m.LookupReply:
        message = m.Lookup(engine.instance_id, request, "", 0, tokens, trace_parent=parent)
        reply: m.LookupReply = engine.client.call("lookup", message, CALL_SECONDS)
        return reply

    hashes = lookup().hashes
    reserve = m.Reserve(engine.instance_id, 0, "", hashes, b"", request)
    reserved: m.ReserveReply = engine.client.call("reserve", reserve, CALL_SECONDS)
    if reserved.reservation:
        engine.fill(hashes, unpack_slots(reserved.slots))
        engine.client.call("commit", m.Commit(engine.instance_id, 0, reserved.reservation), CALL_SECONDS)
    found = lookup()
    engine.client.call("release", m.Release(engine.instance_id, found.lease), CALL_SECONDS)
    engine.end(request)


def total(receiver: Receiver, name: str) -> float:
    """Of the latest export of a counter."""
    metric = receiver.metrics.get(name)
    return sum(point.as_double for point in metric.sum.data_points) if metric else 0.0


def calls(receiver: Receiver) -> int:
    metric = receiver.metrics.get("lmcache_mp.call")
    return sum(point.count for point in metric.histogram.data_points) if metric else 0


def test_a_request_is_a_trace_with_a_child_for_each_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "300")
    with a_receiver() as receiver:
        options: dict[str, Any] = {"otlp_endpoint": receiver.endpoint, "enable_tracing": True}
        with (
            server_within(
                service_instance_id="here", **options, l2_adapter=[{"type": "fs", "base_path": str(tmp_path)}]
            ) as server,
            SmallEngine(server.rpc.endpoint) as engine,
        ):
            a_request(engine)
            until(lambda: receiver.named("request"), RECEIVE_SECONDS)
            until(lambda: [span for span in receiver.spans if span.name.startswith("l2 ")], RECEIVE_SECONDS)
            # Of an export after the request: those before it may arrive later than its spans.
            until(lambda: total(receiver, "lmcache_mp.lookup_requested"), RECEIVE_SECONDS)
            until(lambda: calls(receiver) > 5, RECEIVE_SECONDS)
            requested = receiver.metrics["lmcache_mp.lookup_requested"]
            depth = receiver.metrics["lmcache_mp.event_bus.queue_depth"]
            latency = receiver.metrics["lmcache_mp.call"]
    (request,) = receiver.named("request")
    assert request.trace_id.hex() == TRACE_ID and request.parent_span_id.hex() == PARENT_ID
    lookups, (store,), (retrieve,) = (
        receiver.named(name) for name in ("mp.lookup_prefetch", "mp.store", "mp.retrieve")
    )
    assert len(lookups) == 2
    for span in (*lookups, store, retrieve):
        assert span.parent_span_id == request.span_id
        assert request.start_time_unix_nano <= span.end_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano
    l1_parents = {span.parent_span_id for span in receiver.named("l1")}
    assert l1_parents == {span.span_id for span in (*lookups, store, retrieve)}
    written = [span for span in receiver.spans if span.name.startswith("l2 ")]
    assert {span.parent_span_id for span in written} == {store.span_id}
    assert abs(request.start_time_unix_nano / 1e9 - time.time()) < 600, "wall clock"
    assert receiver.resources[0]["service.instance.id"] == "here"
    assert receiver.resources[0]["service.name"] == "lmcache"
    assert requested.unit == "{tokens}" and requested.sum.is_monotonic
    assert requested.sum.data_points[0].as_double == 2 * 256
    assert depth.WhichOneof("data") == "gauge"
    assert latency.unit == "s"


def test_what_came_from_l2_is_below_the_lookup_that_asked_for_it(tmp_path: Path) -> None:
    adapters = [{"type": "fs", "base_path": str(tmp_path)}]
    with (
        a_receiver() as receiver,
        server_within(otlp_endpoint=receiver.endpoint, enable_tracing=True, l2_adapter=adapters) as server,
        SmallEngine(server.rpc.endpoint) as engine,
    ):
        a_request(engine)
        until(lambda: [span for span in receiver.spans if span.name.startswith("l2 ")], RECEIVE_SECONDS)
        server.clear("l1")
        found = engine.lookup("from L2", engine.tokens(1, 2))
        engine.client.call("release", m.Release(engine.instance_id, found.lease), CALL_SECONDS)
        engine.end("from L2")
        until(lambda: len(receiver.named("request")) == 2, RECEIVE_SECONDS)
    assert found.chunks == 2
    _, request = receiver.named("request")
    (lookup,) = [span for span in receiver.named("mp.lookup_prefetch") if span.parent_span_id == request.span_id]
    (loaded,) = [span for span in receiver.spans if span.name.startswith("l2 ") and span.trace_id == request.trace_id]
    assert loaded.parent_span_id == lookup.span_id
    assert lookup.start_time_unix_nano <= loaded.start_time_unix_nano <= loaded.end_time_unix_nano
    assert {item.key: item.value.int_value for item in loaded.attributes}["objects"] == 2


def test_a_request_whose_trace_is_not_sampled_is_not_traced() -> None:
    with a_receiver() as receiver:
        with (
            server_within(otlp_endpoint=receiver.endpoint, enable_tracing=True) as server,
            SmallEngine(server.rpc.endpoint) as engine,
        ):
            a_request(engine, flags="00", request="left out")
            a_request(engine, flags="01", request="kept")
            until(lambda: receiver.named("request"), RECEIVE_SECONDS)
        assert len(receiver.named("request")) == 1


def test_the_fraction_that_is_traced_is_of_requests_that_bring_no_trace() -> None:
    with a_receiver() as receiver:
        with (
            server_within(otlp_endpoint=receiver.endpoint, enable_tracing=True, trace_sample_rate=0.0) as server,
            SmallEngine(server.rpc.endpoint) as engine,
        ):
            for number in range(20):
                engine.lookup(f"r{number}", engine.tokens(1))
                engine.end(f"r{number}")
            a_request(engine, request="traced")
            until(lambda: receiver.named("request"), RECEIVE_SECONDS)
        assert [span.trace_id.hex() for span in receiver.named("request")] == [TRACE_ID]


def test_a_receiver_by_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates = Certificates(tmp_path)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(certificates.ca))
    with (
        a_receiver(certificate=(certificates.server_cert, certificates.server_key)) as receiver,
        server_within(otlp_endpoint=receiver.endpoint, enable_tracing=True) as server,
        SmallEngine(server.rpc.endpoint) as engine,
    ):
        a_request(engine)
        until(lambda: receiver.named("request"), RECEIVE_SECONDS)


@pytest.mark.parametrize("dead", [False, True])
def test_a_receiver_that_hangs_or_is_gone_costs_nothing(dead: bool) -> None:
    """Lookups go on, spans beyond the queue are dropped and counted, and the server ends in time."""
    with a_silent_receiver() as silent:
        endpoint = "http://127.0.0.1:9" if dead else silent
        started = 0.0
        with (
            server_within(otlp_endpoint=endpoint, enable_tracing=True, event_bus_queue_size=50) as server,
            SmallEngine(server.rpc.endpoint) as engine,
        ):
            for number in range(1000):
                engine.lookup(f"r{number}", engine.tokens(1))
                engine.end(f"r{number}")
                if sample(server, "lmcache_mp_otlp_dropped_spans_total"):
                    break
            assert sample(server, "lmcache_mp_otlp_dropped_spans_total")
            assert engine.lookup("last", engine.tokens(1)).miss_reason == "not_stored"
            started = time.monotonic()
        assert time.monotonic() - started < 15


def test_what_a_receiver_does_not_take_is_counted_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With room in the queue for all of it."""
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "300")
    with (
        a_refusing_receiver() as refusing,
        server_within(otlp_endpoint=refusing, enable_tracing=True) as server,
        SmallEngine(server.rpc.endpoint) as engine,
    ):
        a_request(engine)
        until(lambda: sample(server, "lmcache_mp_otlp_dropped_spans_total") >= 5, RECEIVE_SECONDS)
        until(lambda: sample(server, "lmcache_mp_otlp_failed_exports_total") >= 2, RECEIVE_SECONDS)
        said = [record.getMessage() for record in caplog.records if "does not take spans or metrics" in record.msg]
    assert len(said) == 1 and refusing in said[0] and any(code in said[0] for code in NOT_TAKEN), said


def test_each_of_many_failures_is_told_why() -> None:
    """The library logs the same failure once in a while."""
    told: list[str] = []
    with a_refusing_receiver() as refusing:
        settings = {"endpoint": refusing, "service.instance.id": "", "started": 0.0}
        process = ExporterProcess(settings, lambda spans, why: told.append(why))
        try:
            for _ in range(3):
                process.send({"offset": 0.0, "spans": []}, 1)
            until(lambda: len(told) == 3, RECEIVE_SECONDS)
        finally:
            process.kill()
    assert all(any(code in why for code in NOT_TAKEN) for why in told), told


def test_spans_that_went_with_the_exporter_are_counted() -> None:
    with (
        a_silent_receiver() as silent,
        server_within(otlp_endpoint=silent, enable_tracing=True) as server,
        SmallEngine(server.rpc.endpoint) as engine,
    ):
        a_request(engine)
        (exporter,) = until(exporters, RECEIVE_SECONDS)
        os.kill(exporter, signal.SIGKILL)
        until(lambda: sample(server, "lmcache_mp_otlp_dropped_spans_total"), RECEIVE_SECONDS)


def test_lookups_beside_a_receiver_that_hangs_take_as_long_as_without() -> None:
    def seconds(engine: SmallEngine, name: str) -> float:
        started = time.perf_counter()
        engine.lookup(name, engine.tokens(1))
        taken = time.perf_counter() - started
        engine.end(name)
        return taken

    tracing: dict[str, Any] = {"enable_tracing": True, "event_bus_queue_size": 50}
    with (
        a_silent_receiver() as silent,
        server_within(shm_name=f"lmcache-test-{os.getpid()}-plain") as plain,
        server_within(shm_name=f"lmcache-test-{os.getpid()}-traced", otlp_endpoint=silent, **tracing) as traced,
        SmallEngine(plain.rpc.endpoint) as beside,
        SmallEngine(traced.rpc.endpoint) as engine,
    ):
        for number in range(2000):  # until everything between the server and the receiver is full
            seconds(engine, f"filling-{number}")
            if sample(traced, "lmcache_mp_otlp_dropped_spans_total") > 100:
                break
        rounds = itertools.count()
        shown: list[list[float]] = []

        def take_as_long() -> bool:
            """In one round: in others this machine may do something else beside one of the two, or stand still."""
            before, name = sample(traced, "lmcache_mp_otlp_dropped_spans_total"), f"round {next(rounds)}"
            times = [
                (seconds(beside, f"{name} {number}"), seconds(engine, f"{name} {number}")) for number in range(200)
            ]
            assert sample(traced, "lmcache_mp_otlp_dropped_spans_total") > before > 100
            without, hanging = (sorted(taken) for taken in zip(*times, strict=True))
            shown[:] = [without[::20], hanging[::20]]
            # The exporter waits for 5 s before it gives a message up.
            return hanging[100] < 1.5 * without[100] and hanging[-1] < 2.0

        until(take_as_long, tell=lambda: shown)


def test_the_exporters_process_ends_with_a_server_that_was_killed() -> None:
    """However many messages are in the pipe, for a receiver that takes none of them."""
    with a_silent_receiver() as silent:
        settings = {"endpoint": silent, "service.instance.id": "", "started": 0.0}
        messages: list[dict[str, Any]] = [settings, *[{"offset": 0.0, "spans": []}] * 24]
        command = [sys.executable, "-m", "lmcache.telemetry.otlp_process"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
            assert process.stdin is not None
            for message in messages:
                write_message(process.stdin, message)
            process.stdin.close()  # as the kernel does
            try:
                assert process.wait(EXPORTER_END_SECONDS) == 1
            finally:
                process.kill()


def test_what_systemd_sends_to_all_processes_of_a_service_leaves_the_last_spans() -> None:
    with (
        a_receiver() as receiver,
        server_within(otlp_endpoint=receiver.endpoint, enable_tracing=True) as server,
        SmallEngine(server.rpc.endpoint) as engine,
    ):
        a_request(engine)
        until(lambda: receiver.named("request"), RECEIVE_SECONDS)
        (exporter,) = exporters()
        os.kill(exporter, signal.SIGTERM)
        a_request(engine, request="last")
        until(lambda: len(receiver.named("request")) == 2, RECEIVE_SECONDS)
        assert exporters() == [exporter]


def test_the_exporters_process_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "300")
    began = time.time()
    with (
        a_receiver() as receiver,
        server_within(otlp_endpoint=receiver.endpoint, enable_tracing=True) as server,
        SmallEngine(server.rpc.endpoint) as engine,
    ):
        server_began = time.time()
        a_request(engine, request="before")
        until(lambda: receiver.named("request"), RECEIVE_SECONDS)
        until(lambda: "lmcache_mp.lookups" in receiver.metrics, RECEIVE_SECONDS)
        counted_from = receiver.metrics["lmcache_mp.lookups"].sum.data_points[0].start_time_unix_nano
        assert began <= counted_from / 1e9 <= server_began, "counters count since the server's start"
        (exporter,) = exporters()
        os.kill(exporter, signal.SIGKILL)
        receiver.metrics.clear()
        number = iter(range(1_000_000))

        def another_arrives() -> bool:
            a_request(engine, request=f"after {next(number)}")
            return len(receiver.named("request")) > 1

        until(another_arrives, RECEIVE_SECONDS)
        assert sample(server, "lmcache_mp_otlp_failed_exports_total")
        until(lambda: "lmcache_mp.lookups" in receiver.metrics, RECEIVE_SECONDS)
        assert receiver.metrics["lmcache_mp.lookups"].sum.data_points[0].start_time_unix_nano == counted_from
    assert not exporters(), "it ends with its server"


def test_what_cannot_work_is_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--l1-size-gb", "0.1", "--eviction-policy", "LRU"]
    with pytest.raises(ConfigError, match="--enable-tracing needs --otlp-endpoint"):
        plan([*words, "--enable-tracing"], {})
    for endpoint in NO_ENDPOINTS:
        with pytest.raises(ConfigError, match="--otlp-endpoint must be http://"):
            plan([*words, "--otlp-endpoint", endpoint], {})
    for endpoint in ("http://localhost:4317", "http://[::1]:4317/", "https://collector.example"):
        plan([*words, "--otlp-endpoint", endpoint], {}).discard()
    with pytest.raises(ConfigError, match="OTEL_METRIC_EXPORT_INTERVAL must be milliseconds"):
        plan([*words, "--otlp-endpoint", "http://localhost:4317"], {"OTEL_METRIC_EXPORT_INTERVAL": "often"})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"install lmcache\[otlp\]"):
        plan([*words, "--otlp-endpoint", "http://localhost:4317"], {})
