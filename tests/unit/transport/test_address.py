import pytest

from lmcache.errors import ConfigError
from lmcache.transport.address import connect_endpoint, tcp_endpoint


@pytest.mark.parametrize(
    ("host", "port", "endpoint"),
    [
        ("0.0.0.0", 5555, "tcp://0.0.0.0:5555"),
        ("::1", 1, "tcp://[::1]:1"),
    ],
)
def test_what_is_shown(host, port, endpoint):
    assert tcp_endpoint(host, port) == endpoint


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
    ],
)
def test_what_is_connected(url, port, endpoint):
    assert connect_endpoint(url, port) == endpoint


@pytest.mark.parametrize("url", ["", "tcp://", "host", "host:x", "host:0", "host:70000", "ipc:///tmp/x", "http://h:1"])
def test_other_addresses_are_refused(url):
    with pytest.raises(ConfigError, match="server address"):
        connect_endpoint(url)
