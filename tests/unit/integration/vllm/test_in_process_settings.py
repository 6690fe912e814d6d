"""The settings of an engine that is configured as LMCache inside it."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("vllm")

from lmcache.integration.vllm.lmcache_connector_v1 import in_process_settings


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
