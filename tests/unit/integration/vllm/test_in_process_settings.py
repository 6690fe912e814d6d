"""The settings of an engine that is configured as LMCache inside it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from lmcache.config.load import load
from lmcache.config.spec import ServerConfig
from lmcache.errors import ConfigError
from lmcache.integration.vllm.lmcache_connector_v1 import in_process_settings


def server_config(extra: dict[str, Any], environ: dict[str, str]) -> ServerConfig:
    order = in_process_settings(extra, environ, "engine").autostart
    assert order is not None
    return load(order.options, order.environment).config


def test_an_engine_has_a_server_of_its_own_and_its_replicas_share_it() -> None:
    settings = in_process_settings(
        {"lmcache.max_local_cpu_size": 2, "lmcache.mp.save_decode_cache": True}, {}, "engine"
    )
    assert settings.autostart is not None
    assert settings.url == settings.autostart.url
    assert settings.save_decode_cache
    assert "--l1-size-gb 2" in " ".join(settings.autostart.options)
    for replica in ("engine_dp0", "engine_dp13"):
        assert in_process_settings({}, {}, replica).url == settings.url
    assert in_process_settings({}, {}, "another").url != settings.url


def test_what_is_translated_reaches_the_server_once_and_secrets_by_its_environment() -> None:
    environ = {
        "LMCACHE_REMOTE_URL": "redis://:secret@h:1",
        "LMCACHE_RESP_USERNAME": "me",
        "LMCACHE_LOG_LEVEL": "DEBUG",
        "LMCACHE_CHUNK_SIZE": "128",
        "HOME": "/root",
    }
    order = in_process_settings({}, environ, "engine").autostart
    assert order is not None
    assert set(order.environment) == {"LMCACHE_RESP_USERNAME", "LMCACHE_LOG_LEVEL", "LMCACHE_L2_ADAPTER", "HOME"}
    assert "secret" in order.environment["LMCACHE_L2_ADAPTER"]
    assert not any("secret" in option for option in order.options)


def test_a_server_that_is_named_is_used_instead(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lmcache"):
        settings = in_process_settings({"lmcache.mp_port": 7, "lmcache.chunk_size": 128}, {}, "engine")
    assert (settings.url, settings.autostart) == ("tcp://127.0.0.1:7", None)
    assert "lmcache.chunk_size: no effect, as the server at tcp://127.0.0.1:7 decides" in caplog.text


def test_options_of_a_server_reach_the_one_that_the_engine_starts(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("max_workers: 3\nl1_size_gb: 7\n")
    environ = {"LMCACHE_CONFIG": str(file), "LMCACHE_L2_ADAPTER": '{"type": "mock"}', "LMCACHE_L1_SIZE_GB": "8"}
    config = server_config({}, environ)
    assert (config.l1_size_gb, config.max_workers, config.l2_adapter) == (8.0, 3, [{"type": "mock"}])
    assert server_config({"lmcache.max_local_cpu_size": 9}, environ).l1_size_gb == 9.0
    extra = {"lmcache.max_local_cpu_size": 9, "lmcache.mp.autostart.server_args": "--l1-size-gb 50 --shm-name kept"}
    config = server_config(extra, {**environ, "LMCACHE_L1_PERSIST": "true"})
    assert (config.l1_size_gb, config.shm_name, config.l1_persist) == (50.0, "kept", True)


def test_a_variable_of_a_server_is_none_of_a_family_of_keys_that_are_not_built() -> None:
    environ = {"LMCACHE_P2P_ADVERTISE_URL": "127.0.0.1:9500", "LMCACHE_P2P_PEERS": "127.0.0.1:9501"}
    assert server_config({}, environ).p2p_peers == ["127.0.0.1:9501"]
    with pytest.raises(ConfigError, match="LMCACHE_P2P_HOST is no setting of this version"):
        server_config({}, {"LMCACHE_P2P_HOST": "h"})


@pytest.mark.parametrize(
    ("extra", "environ", "sentence"),
    [
        (
            {"lmcache.mp.autostart.keep": True},
            {},
            "lmcache.mp.autostart.keep is true, and no later engine reaches a server that has a socket of its own",
        ),
        ({"lmcache.mp.autostart": False}, {}, "lmcache.mp.autostart is false, and nothing names a server"),
        (
            {"lmcache.mp.autostart.server_args": "--http-port 80"},
            {},
            "lmcache.mp.autostart.server_args: --http-port must be left out: internal_api_server_enabled, _host",
        ),
        (
            {"lmcache.mp.autostart.server_args": ["--port", "80"]},
            {},
            "lmcache.mp.autostart.server_args: --port must be left out: the server of this engine has a socket",
        ),
        (
            {"lmcache.mp.autostart.server_args": "--l1-persist"},
            {},
            "--l1-persist leaves memory that no later engine finds",
        ),
        ({}, {"LMCACHE_L1_PERSIST": "1"}, "LMCACHE_L1_PERSIST leaves memory that no later engine finds"),
        ({}, {"LMCACHE_PORT": "5556"}, "LMCACHE_PORT means nothing to an engine that starts its own server"),
        ({}, {"LMCACHE_HTTP_PORT": "80"}, "LMCACHE_HTTP_PORT means nothing to an engine that starts its own server"),
        (
            {},
            {"LMCACHE_ZMQ_CURVE_SERVER_KEY_FILE": "/server.key", "LMCACHE_ZMQ_CURVE_CLIENT_KEYS_DIR": "/engines"},
            "LMCACHE_ZMQ_CURVE_SERVER_KEY_FILE demands a key of engines, and a server with a socket of its own is for",
        ),
        (
            {
                "lmcache.mp.autostart.server_args": (
                    "--zmq-curve-server-key-file /server.key --zmq-curve-client-keys-dir /engines"
                )
            },
            {},
            "--zmq-curve-server-key-file demands a key of engines, and a server with a socket of its own is for",
        ),
        (
            {"lmcache.mp.curve_client_key_file": "/engine.key"},
            {},
            "lmcache.mp.curve_client_key_file is given, and nothing names a server that asks for a key",
        ),
        (
            {"lmcache.local_disk": "/d", "lmcache.remote_url": "redis://h:1"},
            {"LMCACHE_L2_ADAPTER": '{"type": "mock"}'},
            "LMCACHE_L2_ADAPTER and lmcache.local_disk and lmcache.remote_url both say where KV goes",
        ),
        (
            {
                "lmcache.local_disk": "/d",
                "lmcache.mp.autostart.server_args": ["--l2-adapter", json.dumps({"type": "mock"})],
            },
            {},
            "--l2-adapter and lmcache.local_disk both say where KV goes",
        ),
    ],
)
def test_what_the_server_of_an_engine_cannot_obey_is_refused(
    extra: dict[str, Any], environ: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        in_process_settings(extra, environ, "engine")
    (said,) = refused.value.problems
    assert said.startswith(sentence)


@pytest.mark.parametrize("option", ["host: 0.0.0.0", "port: 7777", "http_port: 9999", "disable_http: false"])
def test_where_the_server_of_an_engine_listens_is_not_for_a_file(option: str, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(option + "\n")
    words = f"{option.partition(':')[0]} in {file} means nothing to an engine that starts its own server: "
    by_words: dict[str, Any] = {"lmcache.mp.autostart.server_args": ["--config", str(file)]}
    for extra, environ in (({}, {"LMCACHE_CONFIG": str(file)}), (by_words, {})):
        with pytest.raises(ConfigError) as refused:
            in_process_settings(extra, environ, "engine")
        (said,) = refused.value.problems
        assert said.startswith(words)


def test_variables_that_kubernetes_sets_beside_a_service_are_none_of_a_server() -> None:
    assert server_config({}, {"LMCACHE_PORT": "tcp://10.0.0.1:5555"}).l1_size_gb == 5.0


def test_a_key_without_effect_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lmcache"):
        in_process_settings({"lmcache.remote_serde": "cachegen"}, {}, "engine")
    assert "lmcache.remote_serde has no effect: there is no remote_url" in caplog.text
