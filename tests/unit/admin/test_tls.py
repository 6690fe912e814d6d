"""HTTPS of the listener, and certificates that are replaced under it."""

from __future__ import annotations

import contextlib
import socket
import ssl
from pathlib import Path

import httpx
import pytest

from lmcache.admin.listener import HttpListener
from lmcache.cli.http import request
from lmcache.errors import ConfigError, ServerUnavailable
from lmcache.http.tls import server_context
from polling import until
from services.certificates import Certificates
from unit.admin.test_http import FakeServer, hoard, is_open, make_config


def trusting(certificates: Certificates) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificates.ca))


def test_a_replaced_certificate_is_used_by_the_next_connection(tmp_path: Path) -> None:
    first, second = (Certificates(tmp_path / name) for name in ("first", "second"))
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def use(made: Certificates) -> None:
        for source, target in ((made.server_cert, cert), (made.server_key, key)):
            new = tmp_path / "new"
            new.write_bytes(source.read_bytes())
            new.rename(target)

    use(first)
    listener = HttpListener(FakeServer(make_config(http_tls_cert=str(cert), http_tls_key=str(key))))
    listener.start()
    try:
        url = f"https://127.0.0.1:{listener.http_port}/version"
        assert httpx.get(url, verify=trusting(first)).status_code == 200
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            httpx.get(url, verify=trusting(second))
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http"))
        use(second)
        assert httpx.get(url, verify=trusting(second)).status_code == 200
        cert.write_text("no certificate\n")
        assert httpx.get(url, verify=trusting(second)).status_code == 200
        metrics = f"https://127.0.0.1:{listener.prometheus_port}/metrics"
        assert httpx.get(metrics, verify=trusting(second)).status_code == 200
    finally:
        listener.stop()


def test_commands_trust_an_authority_that_is_named_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Certificates(tmp_path)
    config = make_config(http_tls_cert=str(made.server_cert), http_tls_key=str(made.server_key))
    listener = HttpListener(FakeServer(config))
    listener.start()
    try:
        url = f"https://127.0.0.1:{listener.http_port}"
        with pytest.raises(ServerUnavailable, match="name the file of its authority in SSL_CERT_FILE"):
            request(url, "GET", "/version")
        monkeypatch.setenv("SSL_CERT_FILE", str(made.ca))
        assert request(url, "GET", "/version")["version"]
    finally:
        listener.stop()


def test_unfinished_handshakes_keep_nobody_out_and_ended_connections_leave_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lmcache.http.listener.MAX_CONNECTIONS", 5)
    monkeypatch.setattr("lmcache.http.listener.SILENCE_SECONDS", 0.1)
    made = Certificates(tmp_path)
    config = make_config(http_tls_cert=str(made.server_cert), http_tls_key=str(made.server_key))
    listener = HttpListener(FakeServer(config))
    listener.start()
    try:
        with contextlib.ExitStack() as connections:
            hoarded = hoard(listener.http_port, connections)
            url = f"https://127.0.0.1:{listener.http_port}/healthcheck"
            assert httpx.get(url, verify=trusting(made), timeout=10).status_code == 200
            until(lambda: sum(map(is_open, hoarded)) <= 5)
        raw = socket.create_connection(("127.0.0.1", listener.http_port), timeout=10)
        with trusting(made).wrap_socket(raw, server_hostname="127.0.0.1") as silent:
            assert silent.recv(1) == b""  # by then it was looked at whether the one before is silent
    finally:
        listener.stop()
    assert "Exception in callback" not in caplog.text


def test_what_is_no_certificate_is_refused_in_one_sentence(tmp_path: Path) -> None:
    assert server_context("", "") is None
    with pytest.raises(ConfigError, match="belong together"):
        server_context("cert.pem", "")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        server_context(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))
    wrong = tmp_path / "cert.pem"
    wrong.write_text("no certificate\n")
    with pytest.raises(ConfigError, match="are no certificate in PEM"):
        server_context(str(wrong), str(wrong))
