"""The answer to a ping tells whether the storage loop answers, and never waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from lmcache.client import Client
from lmcache.protocol.messages import Ping
from lmcache.server import Server
from process.support import server_within


@pytest.fixture
def server() -> Iterator[Server]:
    with server_within() as server:
        yield server


def test_a_ping_tells_of_a_storage_loop_that_hangs(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache.service.cache_service.STORAGE_SILENT_SECONDS", 0.2)
    client = Client(server.status()["rpc_endpoint"])
    client.connect(10.0)
    go_on = threading.Event()

    def ready() -> bool:
        started = time.monotonic()
        reply = client.call("ping", Ping(), 10.0)
        assert time.monotonic() - started < 5.0
        return bool(reply.ready)

    try:
        assert ready()
        server.storage.call_soon(lambda: go_on.wait(30.0))  # type: ignore[arg-type]
        deadline = time.monotonic() + 10.0
        while ready():
            assert time.monotonic() < deadline
        go_on.set()
        while not ready():
            assert time.monotonic() < deadline
    finally:
        go_on.set()
        client.close()
