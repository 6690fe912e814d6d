"""The answer to a ping tells whether the storage loop answers, and never waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from lmcache.client import Client
from lmcache.protocol.messages import Ping
from lmcache.server import Server
from polling import STALL_SECONDS, until
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
        reply = client.call("ping", Ping(), 20.0)
        assert time.monotonic() - started < 5.0 + STALL_SECONDS
        return bool(reply.ready)

    try:
        until(ready)  # not at once where this machine stands still: then the loop has been silent
        server.storage.call_soon(lambda: go_on.wait(300.0))  # type: ignore[arg-type]
        until(lambda: not ready())
        assert not any(ready() for _ in range(20))
        go_on.set()
        until(ready)
    finally:
        go_on.set()
        client.close()
