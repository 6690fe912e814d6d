"""Health tells the truth: a server whose loops hang says so over HTTP, and says when they answer again."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache.server import Server
from lmcache.testing.processes import http_json
from polling import until
from process.support import server_within


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with server_within(l2_adapter=[{"type": "fs_native", "base_path": str(tmp_path / "l2")}]) as server:
        yield server


def ask(server: Server, path: str) -> tuple[int, Any]:
    return http_json(server.config.http_port, "GET", path, timeout_seconds=10.0)


def message_loop(server: Server) -> Callable[[Callable[[], Any]], Any]:
    return server.rpc.post


def storage_loop(server: Server) -> Callable[[Callable[[], Any]], Any]:
    return server.storage.call_soon


@pytest.mark.parametrize(("loop_of", "name"), [(message_loop, "message loop"), (storage_loop, "storage loop")])
def test_a_loop_that_hangs_is_unhealthy_until_it_answers(
    server: Server, loop_of: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    until(lambda: ask(server, "/healthcheck") == (200, {"status": "healthy"}))
    monkeypatch.setattr("lmcache.admin.server_routes.HEALTH_BOUND_SECONDS", 0.3)
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
    until(lambda: ask(server, "/healthcheck") == (200, {"status": "healthy"}))


def test_clearing_ends_with_a_sentence_when_the_storage_loop_hangs(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache.tiering.storage_loop.CLEAR_SECONDS", 0.2)
    go_on = threading.Event()
    server.storage.call_soon(lambda: go_on.wait(30))  # type: ignore[arg-type]
    try:
        status, body = http_json(server.config.http_port, "POST", "/cache/clear", {"tier": "all"}, timeout_seconds=10.0)
        assert status == 503
        assert body["error"]
    finally:
        go_on.set()


@pytest.mark.parametrize("loop_of", [message_loop, storage_loop])
def test_what_nobody_expected_is_counted(server: Server, loop_of: Any) -> None:
    def faults() -> float:
        found = re.findall(rb"lmcache_mp_internal_faults_total{[^}]*} ([0-9.]+)", server.metrics.exposition())
        return sum(map(float, found))

    assert faults() == 0
    loop_of(server)([].pop)
    until(lambda: faults() == 1)
