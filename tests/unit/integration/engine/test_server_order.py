"""What a server is started with for engines that own it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache.config.load import load
from lmcache.errors import ConfigError, ResourceError
from lmcache.integration.engine.server_order import ServerOrder, autostart_order, private_order

URL = "tcp://127.0.0.1:6000"


def test_a_server_needs_no_arguments() -> None:
    order = autostart_order(URL, [], {})
    config = load(order.options, order.environment).config
    assert (config.host, config.port, config.http_host) == ("127.0.0.1", 6000, "127.0.0.1")
    assert (config.l1_size_gb, config.eviction_policy) == (5.0, "LRU")
    assert (config.http_port, config.prometheus_port) == (0, 0)  # as a machine may have several such servers
    assert order.leftovers == ("/dev/shm/lmcache-6000",)


def test_a_server_is_not_pinned_as_the_threads_of_its_engine_are() -> None:
    order = autostart_order(URL, [], {"GOMP_CPU_AFFINITY": "0 1", "KMP_AFFINITY": "compact", "LANG": "C"})
    assert order.environment == {"LANG": "C"}


def test_what_is_said_anywhere_is_no_default(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("eviction_policy: S3FIFO\n")
    order = autostart_order(
        URL,
        f"--config {file} --l1-persist --http-port 8081",
        {"LMCACHE_L1_SIZE_GB": "2", "LMCACHE_PROMETHEUS_PORT": "8082"},
    )
    config = load(order.options, order.environment).config
    assert (config.http_port, config.prometheus_port) == (8081, 8082)
    assert (config.l1_size_gb, config.eviction_policy) == (2.0, "S3FIFO")
    assert order.leftovers == ()  # what is to outlive a server is none


@pytest.mark.parametrize("flag", ["--host", "--port=7", "--http-host"])
def test_where_a_server_listens_is_not_for_its_arguments(flag: str) -> None:
    with pytest.raises(ConfigError, match="must be left out"):
        autostart_order(URL, [flag, "x"], {})


def test_arguments_are_checked_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match="did you mean --l1-size-gb"):
        autostart_order(URL, "--l1-size-bg 3", {})


def test_the_same_place_has_the_same_name() -> None:
    first, second = autostart_order(URL, [], {}), autostart_order(URL, ["--l1-size-gb", "2"], {})
    assert first.name == second.name
    assert first.name != autostart_order("tcp://127.0.0.1:6001", [], {}).name


def test_a_private_server_has_a_socket_and_memory_of_its_own() -> None:
    order = private_order("abc", ["--l1-size-gb", "1", "--eviction-policy", "LRU", "--disable-http"], {})
    assert isinstance(order, ServerOrder)
    socket, memory = order.leftovers
    assert order.url == f"ipc://{socket}"
    assert socket.endswith("/abc.sock")
    assert memory.startswith("/dev/shm/lmcache")


def test_what_the_machine_lacks_is_the_servers_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_pages() -> None:
        raise ResourceError("none is mounted")

    monkeypatch.setattr("lmcache.integration.engine.server_order.find_hugepages", no_pages)
    assert autostart_order(URL, "--l1-use-hugepages", {}).leftovers == ()
