"""Health tells the truth: a server whose loops hang says so over HTTP, and says when they answer again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache.config.spec import ServerConfig
from lmcache.server import Server
from lmcache.testing.processes import free_port, http_json


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr("lmcache.admin.app.HEALTH_BOUND_SECONDS", 0.3)
    config = ServerConfig(
        host="127.0.0.1",
        port=0,
        http_host="127.0.0.1",
        http_port=free_port(),
        prometheus_port=0,
        l1_size_gb=0.05,
        eviction_policy="LRU",
        l2_adapter=[{"type": "fs_native", "base_path": str(tmp_path / "l2")}],
    )
    server = Server(config)
    server.start()
    yield server
    server.stop()


def ask(server: Server, path: str) -> tuple[int, Any]:
    return http_json(server.config.http_port, "GET", path, timeout_seconds=10.0)


def message_loop(server: Server) -> Callable[[Callable[[], Any]], Any]:
    return server._rpc.post


def storage_loop(server: Server) -> Callable[[Callable[[], Any]], Any]:
    return server._storage.call_soon


@pytest.mark.parametrize(("loop_of", "name"), [(message_loop, "message loop"), (storage_loop, "storage loop")])
def test_a_loop_that_hangs_is_unhealthy_until_it_answers(server: Server, loop_of: Any, name: str) -> None:
    assert ask(server, "/healthcheck") == (200, {"status": "healthy"})
    go_on = threading.Event()
    loop_of(server)(lambda: go_on.wait(30))
    try:
        status, body = ask(server, "/healthcheck")
        assert status == 503
        assert name in body["reason"]
        assert ask(server, "/readyz")[0] == 503
        assert ask(server, "/version")[0] == 200  # the listener itself goes on
    finally:
        go_on.set()
    assert ask(server, "/healthcheck") == (200, {"status": "healthy"})


def test_clearing_ends_with_a_sentence_when_the_storage_loop_hangs(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache.tiering.storage.CLEAR_SECONDS", 0.2)
    go_on = threading.Event()
    server._storage.call_soon(lambda: go_on.wait(30))
    try:
        status, body = http_json(server.config.http_port, "POST", "/cache/clear", {"tier": "all"}, timeout_seconds=10.0)
        assert status == 503
        assert body["error"]
    finally:
        go_on.set()
