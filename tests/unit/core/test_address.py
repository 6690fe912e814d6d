import re
from pathlib import Path
from typing import Any

import pytest

from lmcache.core.address import (
    connect_endpoint,
    http_listening_host,
    http_url,
    listening_host,
    socket_path,
    tcp_endpoint,
)
from lmcache.errors import ConfigError


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("localhost", "localhost"),
        ("0.0.0.0", "0.0.0.0"),
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("tcp://localhost", "localhost"),
        ("ipc:///run/lmcache.sock", "ipc:///run/lmcache.sock"),
    ],
)
def test_where_a_server_listens(host: str, address: Any) -> None:
    assert listening_host(host) == address


@pytest.mark.parametrize(
    ("host", "port", "endpoint"), [("0.0.0.0", 5555, "tcp://0.0.0.0:5555"), ("::1", 1, "tcp://[::1]:1")]
)
def test_what_is_shown(host: str, port: int, endpoint: str) -> None:
    assert tcp_endpoint(host, port) == endpoint
    assert http_url(host, port) == endpoint.replace("tcp", "http")


@pytest.mark.parametrize(
    ("url", "port", "endpoint"),
    [
        ("tcp://localhost:5555", None, "tcp://127.0.0.1:5555"),
        ("localhost", 5555, "tcp://127.0.0.1:5555"),
        ("tcp://cache.example", 7, "tcp://cache.example:7"),
        ("10.0.0.1:80", 5555, "tcp://10.0.0.1:80"),
        ("[::1]:80", None, "tcp://[::1]:80"),
        ("fe80::1", 80, "tcp://[fe80::1]:80"),
        ("tcp://h:1/", None, "tcp://h:1"),
        ("ipc:///run/lmcache.sock", 5555, "ipc:///run/lmcache.sock"),
        ("ipc:///run/lmcache.sock", None, "ipc:///run/lmcache.sock"),
    ],
)
def test_what_is_connected(url: str, port: int, endpoint: str) -> None:
    assert connect_endpoint(url, port) == endpoint


@pytest.mark.parametrize(
    "url", ["", "tcp://", "host", "host:x", "host:0", "host:70000", "http://h:1", "a b:1", "*:1", "é:1"]
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="server address"):
        connect_endpoint(url)


@pytest.mark.parametrize("host", ["", "http://h", "tcp://", "a b", "h/x"])
def test_other_hosts_are_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="--host must be a host name, an address, or ipc:// and a path"):
        listening_host(host)


@pytest.mark.parametrize(("given", "host"), [("localhost:5555", "localhost"), ("[::1]:5555", "::1")])
def test_a_host_with_a_port_is_shown_how_to_write_it(given: Any, host: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"--host {re.escape(given)} names a port: write --host {host} --port 5555\.$"
    ):
        listening_host(given)
    with pytest.raises(ConfigError, match=rf"names a port: write --http-host {host} --http-port 5555\.$"):
        http_listening_host(given)


@pytest.mark.parametrize("path", ["", "x.sock", "@name", "*", "/run/", "/a\0b"])
def test_a_path_begins_at_the_root(path: Path) -> None:
    with pytest.raises(ConfigError, match="must name the path of a socket from the root on"):
        listening_host(f"ipc://{path}")
    with pytest.raises(ConfigError, match="must name the path of a socket from the root on"):
        connect_endpoint(f"ipc://{path}")


def test_the_length_of_a_path_is_bounded() -> None:
    fits = "/" + "x" * 106
    assert socket_path(listening_host(f"ipc://{fits}")) == socket_path(connect_endpoint(f"ipc://{fits}")) == fits
    for address in (listening_host, connect_endpoint):
        with pytest.raises(ConfigError, match="a path of 108 bytes; the path of a socket has at most 107"):
            address(f"ipc://{fits}x")
