"""What a bucket says that it holds: pages that fail, go round or never end, times that are none, and the cost."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lmcache import _native
from lmcache.clock import SystemClock
from lmcache.core.limits import GIB
from lmcache.errors import AdapterError
from lmcache.l2.adapter import Adapter
from lmcache.l2.adapter_types import build, parse_adapter
from lmcache.l2.adapters import s3, s3_inventory, s3_listing, scan_order
from lmcache.l2.adapters.remote_names import RemoteNames
from lmcache.l2.adapters.s3_xml import Listed
from lmcache.l2.runner import Runner
from lmcache.telemetry.metrics import Metrics
from lmcache.testing.contract_run import RecordingInventory
from lmcache.testing.frames import FrameMemory, keys
from services import need_package
from support.s3_run import CREDENTIALS, SECONDS, run, stored
from support.s3_stub import XML, Handler, S3Stub

need_package("awscrt")

OBJECTS = 6


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Stub]:
    """Holds some objects, in pages of two."""
    monkeypatch.setattr(s3_listing, "PAGE_OBJECTS", 2)
    monkeypatch.setattr(s3_listing, "PAGE_PAUSE_SECONDS", 0.01)
    with S3Stub() as stub:

        async def fill(adapter: Adapter, _: RecordingInventory) -> None:
            await stored(adapter, OBJECTS)

        run(stub, fill)
        stub.requests.clear()
        yield stub


def is_page(handler: Handler) -> bool:
    """Whether it is asked for a page of a scan; `open` asks for one name."""
    return handler.query.get("max-keys") == "2"


def pages_asked_for(stub: S3Stub) -> int:
    return sum("max-keys=2" in path for _, path in stub.requests)


async def told(_: Adapter, inventory: RecordingInventory) -> int:
    return len(inventory.objects)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # within SECONDS: the deadline of a test
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("time", ["0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999Z"])
def test_a_time_that_is_none_costs_no_listing(stub: S3Stub, time: str) -> None:
    stub.times = dict.fromkeys(stub.objects, time)
    assert run(stub, told) == OBJECTS


def test_a_page_that_is_throttled_costs_no_listing(stub: S3Stub) -> None:
    refusals = iter(range(8))  # two tries of ours, of four each by awscrt

    def throttled(handler: Handler) -> bool:
        is_second = is_page(handler) and "continuation-token" in handler.query
        return is_second and next(refusals, None) is not None and handler.refuse(503, "SlowDown")

    stub.fault = throttled
    assert run(stub, told) == OBJECTS and next(refusals, None) is None


def test_a_scan_that_failed_is_made_again_soon(stub: S3Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "RESCAN_FAILED_SECONDS", 0.01)
    stub.fault = lambda handler: is_page(handler) and handler.refuse(403, "AccessDenied")

    async def test(_: Adapter, inventory: RecordingInventory) -> None:
        assert not inventory.objects
        stub.fault = lambda handler: False
        await until(lambda: len(inventory.objects) == OBJECTS)

    run(stub, test, max_capacity_gb=1)


def listing(stub: S3Stub, count: int, token: str) -> bytes:
    rows = "".join(f"<Contents><Key>{name}</Key><Size>20480</Size></Contents>" for name in sorted(stub.objects)[:count])
    more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>"
    return f"{XML}<ListBucketResult>{more}{rows}</ListBucketResult>".encode()


@pytest.mark.parametrize("tokens", ["one", "many"])
def test_pages_that_go_round_are_left(stub: S3Stub, tokens: str, caplog: pytest.LogCaptureFixture) -> None:
    """By a server, or what stands in front of it, that does not look at tokens."""

    def first_page(handler: Handler) -> bool:
        token = "same" if tokens == "one" else str(len(stub.requests))
        return is_page(handler) and handler.answer(200, listing(stub, 2, token))

    stub.fault = first_page
    with caplog.at_level(logging.WARNING):
        assert run(stub, told) == 2
    assert pages_asked_for(stub) <= 2
    assert caplog.text.count("its listing goes round") == 1


def test_a_token_that_comes_again_is_an_error_whatever_lies_between(stub: S3Stub) -> None:
    tokens = itertools.cycle(["a", "b", "c"])
    stub.fault = lambda handler: is_page(handler) and handler.answer(200, listing(stub, 0, next(tokens)))

    async def test(adapter: Adapter, _: RecordingInventory) -> None:
        stub.requests.clear()
        with pytest.raises(AdapterError, match="the same continuation token again"):
            await adapter.clear()
        assert pages_asked_for(stub) == 4

    run(stub, test)


def test_namespaces_of_a_listing_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is one more read, and more memory than its objects."""
    monkeypatch.setattr(s3_inventory, "MAX_L2_LISTED_NAMESPACES", 3)
    names = RemoteNames()
    contents = s3_inventory.BucketContents(names)
    contents.add([Listed(f"{names.folder(bytes([number]) * 32)}{'00' * 32}", 8192, 0) for number in range(9)])
    assert len(contents) == 3 and len(contents.candidates()) == 3


def test_pages_without_end_are_left(
    stub: S3Stub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(s3_listing, "MAX_L2_LISTED_OBJECTS", 20)
    stub.fault = lambda handler: (
        is_page(handler) and handler.answer(200, listing(stub, 0, f"token {len(stub.requests)}"))
    )
    with caplog.at_level(logging.WARNING):
        assert run(stub, told) == 0
    assert pages_asked_for(stub) == 10 and caplog.text.count("does not end") == 1

    async def test(adapter: Adapter, _: RecordingInventory) -> None:
        with pytest.raises(AdapterError, match="does not end, and is left after 20 objects"):
            await adapter.clear()

    run(stub, test)


def test_a_long_listing_says_how_far_it_is(
    stub: S3Stub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(s3, "LOG_SECONDS", 0.0)
    with caplog.at_level(logging.INFO):
        assert run(stub, told) == OBJECTS
    assert "/bucket: 4 objects so far" in caplog.text


def test_a_namespace_is_read_once_for_all_listings(stub: S3Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of many tenants have many, and each read is a paid request."""
    monkeypatch.setattr(s3, "RESCAN_SECONDS", 0.01)
    monkeypatch.setattr(s3, "RESCAN_SHARE", 0)

    async def test(_: Adapter, inventory: RecordingInventory) -> None:
        scan_pages = OBJECTS // 2
        await until(lambda: pages_asked_for(stub) >= 4 * scan_pages)
        assert set(inventory.objects) == set(keys(OBJECTS))
        assert sum("list-type" not in path for _, path in stub.requests) == 1

    run(stub, test, max_capacity_gb=1)


def test_the_loop_goes_on_while_a_listing_is_sorted(stub: S3Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten million times take more than a second."""
    sorters: list[str] = []

    class Watched:
        @staticmethod
        def youngest_first(times: Any) -> bytes:
            sorters.append(threading.current_thread().name)
            return _native.youngest_first(times)

    monkeypatch.setattr(scan_order, "_native", Watched)
    assert run(stub, told) == OBJECTS and sorters == ["l2-list"]


def test_what_another_server_stored_since_the_last_listing_is_no_first_victim(
    stub: S3Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else servers that share a bucket evict what the others need most."""
    monkeypatch.setattr(s3, "RESCAN_SECONDS", 0.01)
    monkeypatch.setattr(s3, "RESCAN_SHARE", 0)
    slot_bytes = FrameMemory(1).slot_bytes
    limits = {"max_capacity_gb": 10 * slot_bytes / GIB, "eviction": {"eviction_policy": "LRU"}}

    async def test(other: Adapter, _: RecordingInventory) -> None:
        spec = {"type": "s3", "s3_endpoint": stub.endpoint, "s3_region": "r", "s3_num_io_threads": 2, **CREDENTIALS}
        runner = Runner(build(parse_adapter({**spec, **limits}, 0)), Metrics().l2, SystemClock())
        await runner.open()
        await until(lambda: len(runner.ledger) == OBJECTS)
        memory = FrameMemory(10)
        both = keys(10, seed=5)
        buffers = [memory.fill(i, key) for i, key in enumerate(both)]
        stub.now = "2026-01-03T00:00:00Z"
        await other.store(both[:2], buffers[:2])
        await until(lambda: len(runner.ledger) == OBJECTS + 2)
        await runner.store(both[2:6], buffers[2:6], lambda: None)
        assert await other.probe(both[:6]) == [slot_bytes] * 6
        assert sum(size is not None for size in await other.probe(keys(OBJECTS))) == OBJECTS - 2
        assert await runner.drain(SECONDS) and await runner.close(SECONDS)

    run(stub, test)
