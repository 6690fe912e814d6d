"""Clients and servers of different protocol versions: one apart they work together, further apart they say no."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from lmcache.client.client import ClientState
from lmcache.errors import RemoteError
from lmcache.integration.engine.connection_settings import DEFAULT_HEARTBEAT_SECONDS
from lmcache.testing.processes import CacheServer
from polling import STALL_SECONDS, until
from process.support import CALL_SECONDS, SmallEngine
from support.other_version import other_version

VERSIONS = [(1, 1), (1, 2), (2, 3)]  # the oldest and the newest that a side speaks


@pytest.mark.parametrize("served", VERSIONS)
def test_the_newest_version_that_both_speak_is_spoken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: tuple[int, int]
) -> None:
    with CacheServer(tmp_path, l1_size_gb=0.0625, program=other_version(*served)) as server:
        server.wait_ready()
        stored = 0
        for oldest, newest in VERSIONS:
            monkeypatch.setattr("lmcache.client.client.OLDEST_SUPPORTED_PROTOCOL_VERSION", oldest)
            monkeypatch.setattr("lmcache.client.client.PROTOCOL_VERSION", newest)
            engine = SmallEngine(server.port)
            try:
                if min(newest, served[1]) < max(oldest, served[0]):
                    with pytest.raises(RemoteError, match="upgrade the older side") as refusal:
                        engine.client.connect(CALL_SECONDS)
                    assert f"{served[0]} to {served[1]}" in str(refusal.value) and f"{oldest} to {newest}" in str(
                        refusal.value
                    )
                    # The one before has gone, this one is not taken.
                    until(lambda: server.status()["instances"] == [])
                    continue
                engine.start()
                assert engine.client.hello is not None
                assert engine.client.hello.protocol_version == min(newest, served[1])
                tokens = engine.tokens(1, 2)
                stored += engine.store(tokens)
                found = engine.lookup("r", tokens)
                assert found.chunks == 2 and engine.read(found)
                engine.end("r")
            finally:
                engine.close()
        assert stored == 2  # what the first of them has stored, the others find


@pytest.mark.parametrize(("before", "after"), [((1, 1), (1, 2)), ((1, 2), (1, 1))])
def test_another_version_under_a_running_engine_costs_a_heartbeat(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """The engine misses until it finds the server that took the place of its own, by itself."""
    with (
        CacheServer(tmp_path, l1_size_gb=0.0625, program=other_version(*before)) as first,
        contextlib.ExitStack() as stack,
    ):
        first.wait_ready()
        engine = stack.enter_context(SmallEngine(first.port, heartbeat=DEFAULT_HEARTBEAT_SECONDS))
        tokens = engine.tokens(1, 2)
        assert engine.store(tokens) == 2
        epoch = engine.client.server_epoch
        assert first.stop() == 0
        place: dict[str, Any] = {"port": first.port, "http_port": first.http_port, "shm_name": first.shm_name}
        second = stack.enter_context(
            CacheServer(tmp_path, l1_size_gb=0.0625, program=other_version(*after), log_name="second.log", **place)
        )
        second.wait_ready()

        def is_found() -> bool:
            registered = [entry for entry in second.status()["instances"] if entry["workers"]]
            is_ready = engine.client.state is ClientState.READY and engine.client.server_epoch != epoch
            return bool(registered and is_ready)

        until(is_found, DEFAULT_HEARTBEAT_SECONDS + STALL_SECONDS, tell=second.status)
        assert engine.lookup("early", tokens).chunks == 0
        engine.end("early")
        assert engine.store(tokens) == 2
        found = engine.lookup("again", tokens)
        assert found.chunks == 2 and engine.read(found)
        engine.end("again")
