"""What `kv_connector_extra_config` may say, and the sentence for what it may not."""

from __future__ import annotations

import pytest

from lmcache.client.transfer_mode import WantedTransfer
from lmcache.errors import ConfigError
from lmcache.integration.vllm.settings import ConnectorSettings


def test_nothing_said_means_the_defaults() -> None:
    assert ConnectorSettings.read({}) == ConnectorSettings()
    assert ConnectorSettings().transfer_mode is WantedTransfer.AUTO


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("cache.example", "tcp://cache.example:7"),
        ("tcp://cache.example", "tcp://cache.example:7"),
        ("ipc:///run/lmcache.sock", "ipc:///run/lmcache.sock"),
    ],
)
def test_a_bare_host_means_tcp_and_a_path_has_no_port(host: str, url: str) -> None:
    assert ConnectorSettings.read({"lmcache.mp.host": host, "lmcache.mp.port": 7}).url == url


def test_a_port_is_given_once() -> None:
    assert ConnectorSettings.read({"lmcache.mp.host": "tcp://h:7"}).url == "tcp://h:7"
    assert ConnectorSettings.read({"lmcache.mp.host": "tcp://h:7", "lmcache.mp.port": "7"}).url == "tcp://h:7"
    with pytest.raises(ConfigError, match="two different ports"):
        ConnectorSettings.read({"lmcache.mp.host": "tcp://h:7", "lmcache.mp.port": 8})


@pytest.mark.parametrize("mode", ["auto", "shm", "socket"])
def test_the_transfer_mode_is_taken(mode: str) -> None:
    assert ConnectorSettings.read({"lmcache.mp.transfer_mode": mode}).transfer_mode.value == mode


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("lmcache.mp.transfer_mode", "pigeon", "one of auto, shm, socket"),
        ("lmcache.mp.transfer_mode", ["shm"], "one of auto, shm, socket"),
        ("lmcache.mp.port", "x", "a port from 1 to 65535"),
        ("lmcache.mp.port", True, "a port from 1 to 65535"),
        ("lmcache.mp.port", 80.5, "a port from 1 to 65535"),
        ("lmcache.mp.host", None, "it must be text"),
        ("lmcache.mp.heartbeat_interval", 0, "from 0.05 to 3600 seconds"),
        ("lmcache.mp.heartbeat_interval", 0.01, "from 0.05 to 3600 seconds"),
        ("lmcache.mp.heartbeat_interval", 7200, "from 0.05 to 3600 seconds"),
        ("lmcache.mp.heartbeat_interval", "nan", "from 0.05 to 3600 seconds"),
        ("lmcache.mp.heartbeat_interval", None, "from 0.05 to 3600 seconds"),
        ("lmcache.mp.mq_timeout", "inf", "seconds above 0"),
        ("lmcache.mp.mq_timeout", "soon", "seconds above 0"),
        ("lmcache.mp.autostart", "perhaps", "it must be true or false"),
        ("lmcache.mp.autostart.wait_timeout", 0, "seconds above 0"),
        ("lmcache.mp.lookup_timeout", -1, "seconds above 0"),
        ("lmcache.mp.handover_timeout", "soon", "seconds above 0"),
        ("lmcache.mp.handover_timeout", 0, "seconds above 0"),
        ("lmcache.mp.autostart.server_args", "--l2-adapter '{", "cannot be split into words, no closing quotation"),
        ("lmcache.mp.kv_events_shared_l2", "perhaps", "true or false"),
        ("lmcache.mp.lossy_serde", True, "the name of a lossy serde"),
        ("lmcache.mp.lossy_serde", "FP 8", "the name of a lossy serde"),
        ("lmcache.mp.lossy_serde", "f" * 33, "the name of a lossy serde"),
    ],
)
def test_what_cannot_be_is_refused_by_key_and_rule(key: str, value: object, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as refusal:
        ConnectorSettings.read({"lmcache.mp.autostart": True, key: value})
    assert key in str(refusal.value)


def test_exact_kv_is_expected_unless_a_lossy_serde_is_named() -> None:
    assert ConnectorSettings.read({"lmcache.mp.lossy_serde": ""}).lossy_serde == ""
    assert ConnectorSettings.read({"lmcache.mp.lossy_serde": "fp8-e5m2"}).lossy_serde == "fp8-e5m2"


@pytest.mark.parametrize("given", [31, "60"])
def test_of_a_longer_handover_30_seconds_count(given: object, caplog: pytest.LogCaptureFixture) -> None:
    assert ConnectorSettings.read({"lmcache.mp.handover_timeout": 30}).handover_timeout_seconds == 30.0
    assert not caplog.records
    assert ConnectorSettings.read({"lmcache.mp.handover_timeout": given}).handover_timeout_seconds == 30.0
    assert caplog.messages == [f"lmcache.mp.handover_timeout is {given}; 30 seconds count, more is not waited"]


def test_a_misspelled_key_is_named(caplog: pytest.LogCaptureFixture) -> None:
    ConnectorSettings.read({"lmcache.mp.transfer_mod": "shm"})
    assert "did you mean lmcache.mp.transfer_mode" in caplog.text


def test_autostart_is_asked_for_and_says_what_is_started() -> None:
    assert ConnectorSettings.read({"lmcache.mp.autostart": False}).autostart is None
    extra = {"lmcache.mp.autostart": True, "lmcache.mp.autostart.server_args": "--l1-size-gb 2", "lmcache.mp.port": 7}
    order = ConnectorSettings.read({**extra, "lmcache.mp.autostart.keep": True}).autostart
    assert order is not None
    assert (order.url, order.keep) == ("tcp://127.0.0.1:7", True)
    assert "--l1-size-gb 2 --eviction-policy LRU" in " ".join(order.options)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (5, "it must be text or a list"),
        (["--port", "7"], "lmcache.mp.autostart.server_args: --port must be left out: lmcache.mp.port says it."),
        ("--l1-size 3", "lmcache.mp.autostart.server_args: --l1-size is not an option of lmcache server; did you mean"),
    ],
)
def test_arguments_of_the_server_are_checked_with_the_other_keys(arguments: object, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ConnectorSettings.read({"lmcache.mp.autostart": True, "lmcache.mp.autostart.server_args": arguments})
    assert sentence in str(refused.value)


def test_what_is_said_of_a_server_that_nobody_starts_is_without_effect(caplog: pytest.LogCaptureFixture) -> None:
    given = {"lmcache.mp.autostart.server_args": "--l1-size-gb 50", "lmcache.mp.autostart.wait_timeout": 5}
    ConnectorSettings.read({**given, "lmcache.mp.autostart.keep": False})
    for key in given:
        assert f"{key} has no effect, as lmcache.mp.autostart is not true" in caplog.text
    assert "keep" not in caplog.text
    caplog.clear()
    assert ConnectorSettings.read(given, has_own_server=True).wait_timeout_seconds == 5.0
    assert not caplog.text
