"""The HTTP listener over real sockets, in front of a server that answers as each test wants."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import pytest
from starlette.requests import Request

from lmcache._native import L1Core
from lmcache.admin.audit import AuditLog
from lmcache.admin.listener import HttpListener
from lmcache.admin.server_routes import HealthCheck
from lmcache.clock import SystemClock
from lmcache.config.spec import ServerConfig
from lmcache.core.address import is_loopback
from lmcache.core.salt_limits import SaltLimits
from lmcache.errors import ConfigError, ResourceError, ServerUnavailable
from lmcache.http.access import read_token, why_refused
from lmcache.http.listener import JoinedWrites
from lmcache.l1.quota import Quotas
from lmcache.service.cache_operations import CacheOperations
from lmcache.telemetry.metrics import Metrics
from polling import until

SECRET = "s3cr3t-value"


@dataclass
class FakeServer:
    """A ServerState whose every answer can be set."""

    config: ServerConfig
    metrics: Metrics = field(default_factory=Metrics)
    sickness: str = ""
    is_ready: bool = True
    cleared: list[str] = field(default_factory=list)
    fault: Exception | None = None
    hold: threading.Event | None = None
    health_calls: int = 0
    figures: dict[str, Any] = field(default_factory=dict)
    asked: threading.Event = field(default_factory=threading.Event)
    quotas: Quotas = field(
        default_factory=lambda: Quotas(L1Core(1 << 20, 0, 4096, "LRU"), SaltLimits(), enforced=False)
    )

    operations: CacheOperations = field(default_factory=lambda: cast(CacheOperations, None))  # no test here asks
    audit_log: AuditLog = field(default_factory=lambda: AuditLog("", SystemClock()))

    def health(self, within_seconds: float) -> str:
        self.health_calls += 1
        self.asked.set()
        if self.hold is not None:
            self.hold.wait(10)
        return self.sickness

    def ready(self) -> bool:
        return self.is_ready

    def fleet(self) -> None:
        """It has no coordinator."""

    def status(self) -> dict[str, Any]:
        if self.fault is not None:
            raise self.fault
        return {"uptime_seconds": 1.5, **self.figures}

    def clear(self, tier: str, *, force: bool = False) -> tuple[int, int]:
        if self.fault is not None:
            raise self.fault
        self.cleared.append(tier)
        return 3, 12288


def make_config(**options: Any) -> ServerConfig:
    ports = {"http_host": "127.0.0.1", "http_port": 0, "prometheus_port": 0}
    return ServerConfig(**{"l1_size_gb": 1.0, "eviction_policy": "LRU", **ports, **options})


@pytest.fixture
def server() -> FakeServer:
    adapter = {"type": "s3", "aws_secret_access_key": SECRET, "s3_endpoint": f"https://me:{SECRET}@host/?sig={SECRET}"}
    return FakeServer(make_config(l2_adapter=[adapter]))


@pytest.fixture
def listener(server: FakeServer) -> Iterator[HttpListener]:
    listener = HttpListener(server)
    listener.start()
    yield listener
    listener.stop()


@pytest.fixture
def http(listener: HttpListener) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{listener.http_port}", timeout=10) as client:
        yield client


def test_health_is_what_the_server_answers(server: FakeServer, http: httpx.Client) -> None:
    answer = http.get("/healthcheck")
    assert (answer.status_code, answer.json()) == (200, {"status": "healthy"})
    server.sickness = "The storage loop did not answer within 2 s."
    answer = http.get("/healthcheck")
    assert (answer.status_code, answer.json()["reason"]) == (503, server.sickness)
    assert http.get("/readyz").status_code == 503


def test_not_ready_while_draining(server: FakeServer, http: httpx.Client) -> None:
    assert http.get("/readyz").json() == {"status": "ready"}
    server.is_ready = False
    assert http.get("/readyz").status_code == 503
    assert http.get("/healthcheck").status_code == 200


def test_health_questions_asked_together_share_one_answer(server: FakeServer) -> None:
    async def ask_together() -> list[str]:
        health = HealthCheck(server)
        try:
            return await asyncio.gather(*(health.check() for _ in range(8)))
        finally:
            health.close()

    server.sickness = "The storage loop did not answer within 2 s."
    assert asyncio.run(ask_together()) == [server.sickness] * 8
    assert server.health_calls == 1


def test_a_hanging_health_check_does_not_hold_up_other_requests(server: FakeServer, http: httpx.Client) -> None:
    server.hold = threading.Event()
    codes: list[int] = []
    reader = threading.Thread(
        target=lambda: codes.append(httpx.get(f"{http.base_url}/healthcheck", timeout=10).status_code)
    )
    reader.start()
    assert server.asked.wait(10)
    assert http.get("/status").status_code == 200  # answered although health hangs
    assert codes == []
    server.hold.set()
    reader.join(10)
    assert codes == [200]


def test_a_hanging_health_check_is_unhealthy(
    server: FakeServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache.admin.server_routes.HEALTH_BOUND_SECONDS", 0.01)
    server.hold = threading.Event()
    try:
        assert http.get("/healthcheck").status_code == 503
    finally:
        server.hold.set()


def test_configuration_is_shown_without_secrets(http: httpx.Client) -> None:
    for path in ("/config", "/config/adapters"):
        answer = http.get(path)
        assert answer.status_code == 200
        assert SECRET not in answer.text
        assert "[hidden]" in answer.text
    assert http.get("/config").json()["chunk_size"] == 256


def test_clear_tells_what_it_removed(server: FakeServer, http: httpx.Client) -> None:
    answer = http.post("/cache/clear", json={"tier": "all", "force": True})
    assert answer.json() == {"status": "ok", "ok": True, "tier": "all", "objects": 3, "bytes": 12288}
    assert http.post("/cache/clear").json()["tier"] == "l1"
    assert server.cleared == ["all", "l1"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"tier": "l3"}', "l1, l2, all"),
        (b'{"teir": "l1"}', "did you mean tier?"),
        (b"[]", "JSON object"),
        (b"{", "not JSON"),
        (b"[" * 50_000, "not JSON"),
        (b'{"force": "yes"}', "true or false"),
    ],
)
def test_clear_refuses_what_it_does_not_understand(
    server: FakeServer, http: httpx.Client, body: bytes, said: str
) -> None:
    answer = http.post("/cache/clear", content=body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]
    assert server.cleared == []


def test_a_large_body_is_refused(server: FakeServer, http: httpx.Client) -> None:
    assert http.post("/cache/clear", content=b" " * (1 << 20)).status_code == 413
    assert server.cleared == []


def test_a_tier_that_does_not_answer_is_an_error_with_a_sentence(server: FakeServer, http: httpx.Client) -> None:
    server.fault = ServerUnavailable("The storage loop did not clear L2 within 30 s.")
    answer = http.post("/cache/clear", json={"tier": "l2"})
    assert (answer.status_code, answer.json()["error"]) == (503, str(server.fault))


def test_an_unexpected_fault_is_answered_without_its_stack(server: FakeServer, http: httpx.Client) -> None:
    server.fault = ZeroDivisionError("at /secret/place")
    answer = http.get("/status")
    assert answer.status_code == 500
    assert "/secret/place" not in answer.text


def test_a_page_of_another_site_cannot_use_the_browser_of_this_host(server: FakeServer, http: httpx.Client) -> None:
    for origin in ("http://evil.example", "null", "http://[", "http://127.0.0.1.evil.example"):
        assert http.post("/cache/clear", headers={"Origin": origin}).status_code == 403
    for proxied in ({"X-Forwarded-For": "203.0.113.9"}, {"X-Forwarded-Proto": "http"}, {"X-Envoy-Attempt-Count": "1"}):
        assert http.post("/cache/clear", headers=proxied).status_code == 403
    assert server.cleared == []
    assert http.post("/cache/clear", headers={"Origin": str(http.base_url).rstrip("/")}).status_code == 200


def test_both_ports_hide_salts_from_others(server: FakeServer, listener: HttpListener) -> None:
    server.metrics.service.lookups.labels("model", "alice").inc()
    for port in (listener.http_port, listener.prometheus_port):
        url = f"http://127.0.0.1:{port}/metrics"
        assert 'cache_salt="alice"' in httpx.get(url).text
        through_a_proxy = httpx.get(url, headers={"X-Forwarded-For": "192.0.2.1"}).text
        assert "alice" not in through_a_proxy
        assert f'cache_salt="{server.metrics.salt_digest("alice")}"' in through_a_proxy


def request_from(host: str, **headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw, "client": (host, 40000)})


def test_another_host_needs_the_token() -> None:
    assert why_refused(request_from("127.0.0.1"), "") == ""
    assert why_refused(request_from("::1"), "") == ""
    assert "--admin-token-file" in why_refused(request_from("192.0.2.7"), "")
    assert "Bearer" in why_refused(request_from("192.0.2.7"), "0123456789abcdef")
    assert why_refused(request_from("192.0.2.7", authorization="Bearer 0123456789abcdef"), "0123456789abcdef") == ""
    assert why_refused(request_from("192.0.2.7", authorization="Bearer 0123456789abcdeF"), "0123456789abcdef") != ""
    assert why_refused(request_from("127.0.0.1", authorization="Bearer wrong"), "0123456789abcdef") != ""
    assert why_refused(request_from("192.0.2.7", authorization="Bearer "), "") != ""


def test_loopback_names() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1", "localhost"]))
    assert not any(map(is_loopback, ["192.0.2.1", "::ffff:192.0.2.1", "localhost.evil.example", "", "0.0.0.0"]))


def test_token_file(tmp_path: Any) -> None:
    path = tmp_path / "token"
    assert read_token("") == ""
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(str(path))
    path.write_text("short\n")
    with pytest.raises(ConfigError, match="at least 16"):
        read_token(str(path))
    path.write_text("x" * 5000)
    with pytest.raises(ConfigError, match="4096 at most"):
        read_token(str(path))
    path.unlink()
    os.mkfifo(path)  # whose other end nobody has
    with pytest.raises(ConfigError, match="is no file"):
        read_token(str(path))
    path.unlink()
    path.write_text("0123456789abcdef\n")
    assert read_token(str(path)) == "0123456789abcdef"


def test_metrics_on_both_ports(server: FakeServer, listener: HttpListener, http: httpx.Client) -> None:
    server.metrics.service.lookup_hit.labels("model", "").inc(256)
    line = 'lmcache_mp_lookup_hit_tokens_total{cache_salt="",model_name="model"} 256.0'
    assert line in http.get("/metrics").text.splitlines()
    scraped = httpx.get(f"http://127.0.0.1:{listener.prometheus_port}/metrics")
    assert line in scraped.text.splitlines()
    assert scraped.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert httpx.get(f"http://127.0.0.1:{listener.prometheus_port}/status").status_code == 404
    assert httpx.post(f"http://127.0.0.1:{listener.prometheus_port}/cache/clear").status_code == 404
    assert server.cleared == []


def test_without_metrics_there_is_no_second_port() -> None:
    server = FakeServer(make_config(disable_metrics=True), Metrics(enabled=False))
    listener = HttpListener(server)
    listener.start()
    try:
        assert listener.prometheus_port is None
        answer = httpx.get(f"http://127.0.0.1:{listener.http_port}/metrics")
        assert answer.status_code == 404
        assert "--disable-metrics" in answer.json()["error"]
    finally:
        listener.stop()


def test_log_level_can_be_changed(http: httpx.Client) -> None:
    before = http.get("/loglevel").json()["level"]
    try:
        assert http.put("/loglevel", json={"level": "debug"}).json() == {"level": "DEBUG"}
        assert http.get("/loglevel").json() == {"level": "DEBUG"}
        assert http.put("/loglevel", json={"level": "LOUD"}).status_code == 400
        assert http.put("/loglevel", json={"level": "DEBUG"}, headers={"X-Real-IP": "192.0.2.1"}).status_code == 403
    finally:
        http.put("/loglevel", json={"level": before})


def test_what_is_not_there_says_so(http: httpx.Client) -> None:
    assert http.get("/nowhere").status_code == 404
    assert http.delete("/cache/clear").status_code == 405


@pytest.mark.parametrize(
    "asked",
    [
        *("POST /lookup", "POST /clear", "POST /compress", "DELETE /cache/delete"),
        *("POST /decompress", "POST /move", "POST /pin", "POST /unpin", "POST /health", "POST /check_finish"),
        *("POST /query_instance", "POST /query_worker_info", "GET /controller/workers", "PUT /instances/a/heartbeat"),
        *("GET /instances", "POST /events", "POST /directory/lookup"),
    ],
)
def test_what_is_documented_and_not_built_is_501_with_one_sentence(http: httpx.Client, asked: str) -> None:
    answer = http.request(*asked.split(" "))
    assert answer.status_code == 501
    sentence = answer.json()["error"]
    assert sentence.startswith(f"A cache server has no {asked.split()[1]}: ") and sentence.endswith(".")


@pytest.mark.parametrize(
    ("asked", "instead"),
    [
        ("POST /pin", "POST /cache/pins pins objects."),
        ("POST /unpin", "DELETE /cache/pins unpins objects."),
        ("POST /compress", "and POST /compress of a coordinator moves a prompt from L1 to it."),
        ("POST /decompress", "and POST /decompress of a coordinator moves a prompt from it to L1."),
        ("GET /instances", ": `lmcache coordinator` has it, for servers that name it by --coordinator-url."),
    ],
)
def test_what_there_is_in_place_of_a_path_is_said(http: httpx.Client, asked: str, instead: str) -> None:
    assert http.request(*asked.split(" ")).json()["error"].endswith(instead)


@pytest.mark.parametrize("flag", ["http_port", "prometheus_port"])
def test_a_busy_port_is_one_sentence_and_leaves_nothing_open(server: FakeServer, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = make_config(**{flag: taken.getsockname()[1]})
        with pytest.raises(ResourceError, match=f"in use; choose another --{flag.replace('_', '-')}"):
            HttpListener(FakeServer(config))


def test_noise_does_not_stop_the_listener(listener: HttpListener, http: httpx.Client) -> None:
    for noise in (
        b"\x00\xff" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /cache/clear HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", listener.http_port)) as raw:
            raw.sendall(noise)
    assert http.get("/healthcheck").status_code == 200


def test_what_is_written_in_one_turn_is_sent_at_once() -> None:
    sent: list[bytes] = []

    class Transport:
        def write(self, content: bytes) -> None:
            sent.append(bytes(content))

        def get_write_buffer_size(self) -> int:
            return 10

        def close(self) -> None:
            sent.append(b"closed")

    async def write() -> None:
        joined = JoinedWrites(cast(Any, Transport()), asyncio.get_running_loop())
        for content in (b"head ", b"body", b""):
            joined.write(content)
        assert not sent and joined.get_write_buffer_size() == 19
        await asyncio.sleep(0)
        assert sent == [b"head body"] and joined.get_write_buffer_size() == 10
        joined.write(bytes(1 << 20))  # not kept until the end of the turn
        assert len(sent) == 2
        joined.write(b"the last")
        joined.close()
        assert sent[2:] == [b"the last", b"closed"]
        await asyncio.sleep(0)
        assert len(sent) == 4

    asyncio.run(write())


def test_silent_connections_are_closed_and_slow_answers_are_not(
    server: FakeServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache.http.listener.SILENCE_SECONDS", 0.05)
    address = ("127.0.0.1", int(str(http.base_url.port)))
    for beginning in (b"", b"GET /version HTTP/1.1\r\nX-Slow: "):
        with socket.create_connection(address, timeout=10) as silent:
            silent.sendall(beginning)
            assert silent.recv(1) == b""
    server.hold = threading.Event()
    release = threading.Timer(0.3, server.hold.set)
    release.start()
    assert httpx.get(f"{http.base_url}/healthcheck", timeout=10).status_code == 200
    release.join()


def test_who_does_not_take_answers_loses_the_connection(
    server: FakeServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would keep its place for ever."""
    monkeypatch.setattr("lmcache.http.listener.SILENCE_SECONDS", 0.5)
    server.figures = {"many": "x" * (32 << 20)}  # more than the kernel buffers of both sides take
    with socket.create_connection(("127.0.0.1", http.base_url.port or 0), timeout=10) as stuck:
        stuck.sendall(b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n")
        assert stuck.recv(1)
        both_ends = len(os.listdir("/proc/self/fd"))
        until(lambda: len(os.listdir("/proc/self/fd")) < both_ends)
    with httpx.stream("GET", f"{http.base_url}/status", timeout=10) as slow:  # takes some of it all the time
        taken = 0
        for piece in slow.iter_raw(1 << 20):
            taken += len(piece)
            threading.Event().wait(0.005)
    assert taken > 32 << 20


@pytest.fixture
def few_places(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("lmcache.http.listener.MAX_CONNECTIONS", 5)
    return 5


def hoard(port: int, connections: contextlib.ExitStack) -> list[socket.socket]:
    """Connections from another address, of which nothing comes."""
    place = ("127.0.0.1", port)
    source = ("127.0.0.2", 0)
    hoarded = [
        connections.enter_context(socket.create_connection(place, timeout=10, source_address=source)) for _ in range(20)
    ]
    for raw in hoarded:
        raw.setblocking(False)
    return hoarded


def is_open(raw: socket.socket) -> bool:
    try:
        return raw.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


def test_an_address_with_many_connections_keeps_nobody_out(few_places: int, http: httpx.Client) -> None:
    with contextlib.ExitStack() as connections:
        hoarded = hoard(int(http.base_url.port or 0), connections)
        for _ in range(3):
            assert httpx.get(f"{http.base_url}/healthcheck", timeout=10).status_code == 200
        until(lambda: sum(map(is_open, hoarded)) <= few_places)
        assert is_open(hoarded[-1])  # the oldest have gone


@pytest.mark.parametrize(
    "blast",
    [
        b"GET /version HTTP/1.1\r\n" + b"X: " + b"x" * (4 << 20),
        b"GET /version HTTP/1.1\r\n" + b"X-Many: x\r\n" * 100_000,
        b"GET /" + b"x" * (4 << 20),
        b"POST /cache/clear HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1;" + b"e" * (4 << 20),
    ],
    ids=["a header", "many headers", "a path", "a chunk's extension"],
)
def test_what_has_no_end_is_not_held(listener: HttpListener, http: httpx.Client, blast: bytes) -> None:
    with socket.create_connection(("127.0.0.1", listener.http_port), timeout=10) as raw:
        with contextlib.suppress(OSError):
            raw.sendall(blast)
        with contextlib.suppress(ConnectionResetError):
            while raw.recv(65536):
                pass
    assert http.get("/healthcheck").status_code == 200


@pytest.mark.parametrize(
    ("request_", "more"),
    [
        (b"POST /cache/clear HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{", b""),
        (b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", b"no length\r\n"),
    ],
    ids=["gone in its body", "faulty after the answer"],
)
def test_what_clients_do_wrong_is_no_fault_of_the_server(
    listener: HttpListener, http: httpx.Client, caplog: pytest.LogCaptureFixture, request_: bytes, more: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", listener.http_port), timeout=10) as raw:
        raw.sendall(request_)
        if more:
            assert b" 404 " in raw.recv(65536)
            raw.sendall(more)
        else:
            raw.shutdown(socket.SHUT_WR)
        while raw.recv(65536):
            pass
    assert http.get("/healthcheck").status_code == 200
    assert not [record.getMessage() for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


def test_stop_closes_both_ports(server: FakeServer) -> None:
    listener = HttpListener(server)
    listener.start()
    url = f"http://127.0.0.1:{listener.http_port}"
    assert json.loads(httpx.get(url + "/version").text)["protocol_version"]["current"] == 1
    listener.stop()
    listener.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url + "/version")
