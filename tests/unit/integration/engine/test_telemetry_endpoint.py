"""The POST to a proxy, against endpoints that answer in order, in no order, slowly, or never."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import pytest

from lmcache.clock import SystemClock
from lmcache.errors import ConfigError, ServerUnavailable
from lmcache.integration.engine.telemetry_endpoint import ENDPOINT_VARIABLE, TYPE_VARIABLE, TelemetryEndpoint
from support.telemetry_proxy import telemetry_proxy

NOW = SystemClock().monotonic
AMPLE_SECONDS = 30.0
SHORT_SECONDS = 0.3


def post(url: str, seconds: float = AMPLE_SECONDS) -> None:
    TelemetryEndpoint.of(url).post(b'{"request_ids_set": ["a"]}', seconds, NOW)


@contextmanager
def answering(answer: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """One connection is answered so, until the event."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60.0)

        def serve() -> None:
            with suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    answer(connection, over)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        finally:
            over.set()
            thread.join(60.0)


def test_an_endpoint_takes_an_event() -> None:
    with telemetry_proxy() as proxy:
        post(proxy.url)
    assert proxy.told == ["a"]


def test_a_family_of_addresses_that_the_machine_lacks_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where `localhost` has ::1 too, and the kernel no IPv6."""
    with telemetry_proxy() as proxy:
        (known,) = socket.getaddrinfo("127.0.0.1", int(urlsplit(proxy.url).port or 0), type=socket.SOCK_STREAM)
        lacking = 255, socket.SOCK_STREAM, 0, "", known[4]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [lacking, known])
        post(proxy.url)
        assert proxy.told == ["a"]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [lacking])
        with pytest.raises(ServerUnavailable, match=r"^nothing answers at http://"):
            post(proxy.url)


def test_an_endpoint_that_refuses_is_named_with_its_answer() -> None:
    with (
        telemetry_proxy(status=503) as proxy,
        pytest.raises(ServerUnavailable, match=r"^http://.* answered with 503\.$"),
    ):
        post(proxy.url)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(ServerUnavailable, match=r"nothing answers at http://127\.0\.0\.1:\d+/x \(Connection refused\)"):
        post(f"http://127.0.0.1:{port}/x")


def test_a_name_that_nobody_can_have() -> None:
    with pytest.raises(ServerUnavailable, match=r"nothing answers at http://nnn"):
        post(f"http://{'n' * 64}/x")


def test_an_endpoint_that_says_nothing_ends_with_the_time() -> None:
    with (
        answering(lambda connection, over: [over.wait(60.0)].clear()) as url,
        pytest.raises(ServerUnavailable, match=r"did not answer within 0\.3 s"),
    ):
        post(url, SHORT_SECONDS)


def test_an_endpoint_that_drips_ends_with_the_time() -> None:
    """Each byte comes in time, the answer never."""

    def drip(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(b"HTTP/1.1 ")
        while not over.wait(0.01):
            connection.sendall(b" ")

    with answering(drip) as url, pytest.raises(ServerUnavailable, match=r"did not answer within 0\.3 s"):
        post(url, SHORT_SECONDS)


@pytest.mark.parametrize("more", [b"", bytes(1 << 20)], ids=["silent", "endless"])
def test_what_comes_after_a_success_is_not_waited_for(more: bytes) -> None:
    def keep(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + more)
        over.wait(60.0)

    with answering(keep) as url:
        post(url)


@pytest.mark.parametrize("said", [b"", b"\n", b"SSH-2.0-x\r\n", b"HTTP/1.1\r\n", b"HTTP/1.1 abc x\r\n", b"x" * 100_000])
def test_what_is_no_http_is_no_success(said: bytes) -> None:
    def say(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(1 << 16)
        connection.sendall(said)

    with answering(say) as url, pytest.raises(ServerUnavailable, match=r"HTTP|nothing answers"):
        post(url)


def test_an_endpoint_without_tls_where_it_is_asked_for() -> None:
    def say(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")

    with answering(say) as url, pytest.raises(ServerUnavailable, match="nothing answers at https:"):
        post(url.replace("http:", "https:"))


# ---- what the environment says ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("environ", [{}, {TYPE_VARIABLE: ""}, {TYPE_VARIABLE: "noop"}, {ENDPOINT_VARIABLE: "nonsense"}])
def test_nobody_is_told_unless_it_is_asked_for(environ: dict[str, str]) -> None:
    assert TelemetryEndpoint.read(environ) is None


def test_an_endpoint_without_a_type_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    assert TelemetryEndpoint.read({ENDPOINT_VARIABLE: "http://proxy:5768/"}) is None
    assert caplog.messages == [f"{ENDPOINT_VARIABLE} has no effect: {TYPE_VARIABLE} is not fastapi"]
    assert TelemetryEndpoint.read({TYPE_VARIABLE: "noop", ENDPOINT_VARIABLE: "http://proxy:5768/"}) is None
    assert len(caplog.messages) == 1


def test_an_endpoint_of_the_environment() -> None:
    given = {TYPE_VARIABLE: "fastapi", ENDPOINT_VARIABLE: "https://[::1]/a/b?c=d"}
    endpoint = TelemetryEndpoint.read(given)
    assert endpoint is not None
    assert (endpoint.tls, endpoint.host, endpoint.port) == (True, "::1", 443)
    assert (endpoint.authority, endpoint.target) == ("[::1]", "/a/b?c=d")


def test_an_endpoint_that_is_not_given() -> None:
    endpoint = TelemetryEndpoint.read({TYPE_VARIABLE: "fastapi"})
    assert endpoint is not None and endpoint.url == "http://localhost:5768/api/v1/telemetry"


@pytest.mark.parametrize(
    "url",
    ["proxy:5768", "ftp://proxy", "http://", "http://proxy:x/", "http://proxy:99999/", "http://a b/", "http://u:p@h/"],
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{ENDPOINT_VARIABLE} is .* such as http://localhost"):
        TelemetryEndpoint.read({TYPE_VARIABLE: "fastapi", ENDPOINT_VARIABLE: url})


def test_a_type_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match=rf"^{TYPE_VARIABLE} is 'kafka'; it must be one of fastapi, noop\.$"):
        TelemetryEndpoint.read({TYPE_VARIABLE: "kafka"})
