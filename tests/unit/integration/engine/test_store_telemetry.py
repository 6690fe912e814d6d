"""Which requests a proxy is told are stored, and when; what a proxy that is slow or gone costs."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

from lmcache.core import limits
from lmcache.integration.engine.connector_metadata import StoreOrder
from lmcache.integration.engine.store_telemetry import StoreTelemetry, StoringRank
from lmcache.integration.engine.telemetry_endpoint import TelemetryEndpoint
from lmcache.memory.server_memory import ServerMemory
from polling import until
from support.telemetry_proxy import TelemetryProxy, telemetry_proxy
from unit.integration.engine.workers import EPOCH, MEMORY_BYTES, Worker

RANK = StoringRank("model", 2, 1)


def order(request_id: str, job: int = 1) -> StoreOrder:
    return StoreOrder(job, b"", "", b"", (), request_id=request_id)


@pytest.fixture(autouse=True)
def ample(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still is no proxy that does."""
    monkeypatch.setattr(limits, "TELEMETRY_POST_SECONDS", 60.0)


@pytest.fixture
def proxy() -> Iterator[TelemetryProxy]:
    with telemetry_proxy() as made:
        yield made


@pytest.fixture
def telemetry(proxy: TelemetryProxy) -> Iterator[StoreTelemetry]:
    made = StoreTelemetry(TelemetryEndpoint.of(proxy.url), RANK)
    yield made
    made.close()


def test_a_request_is_told_once_it_and_its_stores_have_ended(proxy: TelemetryProxy, telemetry: StoreTelemetry) -> None:
    first, second = order("a"), order("a", 2)
    telemetry.ordered([first])
    telemetry.settled(first, b"\1")  # of a step that more steps follow
    telemetry.ordered([second, order("b")])
    telemetry.requests_ended({"a", "b", "short"})
    until(lambda: proxy.told == ["short"])
    telemetry.settled(second, b"")  # a store that failed is over, too
    until(lambda: proxy.told == ["short", "a"])
    telemetry.settled(order("b"), b"\1")
    until(lambda: proxy.told == ["short", "a", "b"])
    assert proxy.events[-1] == {
        "event": "request_store_finished",
        "request_ids_set": ["b"],
        "model_name": "model",
        "world_size": 2,
        "kv_rank": 1,
    }
    until(lambda: telemetry.counts() == [3, 0])


def test_what_is_stored_after_the_end_is_not_told_again(proxy: TelemetryProxy, telemetry: StoreTelemetry) -> None:
    telemetry.requests_ended({"a"})
    for late in (order(""), order("a")):  # what decoding made bears no request's name
        telemetry.ordered([late])
        telemetry.settled(late, b"\1")
    telemetry.requests_ended({"b"})
    until(lambda: telemetry.counts() == [2, 0])
    assert proxy.told == ["a", "b"]


def test_what_comes_at_once_is_told_in_few_posts(proxy: TelemetryProxy, telemetry: StoreTelemetry) -> None:
    requests = {f"r{number}" for number in range(3 * limits.MAX_TELEMETRY_REQUESTS_PER_POST)}
    telemetry.requests_ended(requests)
    until(lambda: telemetry.counts() == [len(requests), 0])
    assert set(proxy.told) == requests and len(proxy.told) == len(requests)
    assert all(len(event["request_ids_set"]) <= limits.MAX_TELEMETRY_REQUESTS_PER_POST for event in proxy.events)


def test_what_waits_at_the_end_is_told(proxy: TelemetryProxy, telemetry: StoreTelemetry) -> None:
    telemetry.requests_ended({"a"})
    telemetry.close()
    telemetry.close()
    until(lambda: proxy.told == ["a"])  # the end waits a second, a machine may stand still for longer


def test_a_proxy_that_is_gone_is_said_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        endpoint = TelemetryEndpoint.of(f"http://127.0.0.1:{gone.getsockname()[1]}/x")
    telemetry = StoreTelemetry(endpoint, RANK)
    for number in range(3):
        telemetry.requests_ended({f"r{number}"})
        until(lambda number=number: telemetry.counts() == [0, number + 1])
    telemetry.close()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith("A proxy was not told that 1 requests are stored: nothing answers at http://")


def test_a_proxy_that_stands_still_costs_the_engine_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections and never answers; what finds no room is dropped at once."""
    monkeypatch.setattr(limits, "MAX_TELEMETRY_REQUESTS_WAITING", 100)
    monkeypatch.setattr(limits, "TELEMETRY_POST_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:
        telemetry = StoreTelemetry(TelemetryEndpoint.of(f"http://127.0.0.1:{silent.getsockname()[1]}/x"), RANK)
        for number in range(1000):
            telemetry.requests_ended({f"r{number}"})
        until(lambda: telemetry.counts() == [0, 1000], tell=telemetry.counts)
        telemetry.close()


def test_a_worker_tells_of_its_stores(proxy: TelemetryProxy, telemetry: StoreTelemetry) -> None:
    memory = ServerMemory.create(f"lmcache-test-telemetry-{os.getpid()}", MEMORY_BYTES, EPOCH)
    memory.grow(MEMORY_BYTES)
    worker = Worker(memory, telemetry=telemetry)
    worker.store(1, [[1, 2]], bytes([1]) * 32, request_id="stored")
    worker.store(2, [[3, 4]], bytes([2]) * 32, b"another server's", request_id="refused")
    telemetry.requests_ended({"stored", "refused"})
    until(lambda: sorted(proxy.told) == ["refused", "stored"])
    assert len(worker.client.messages("commit")) == 1
    until(lambda: worker.client.counts() == [2, 0])
    worker.side.close()
    memory.close()
