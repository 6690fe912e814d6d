"""What a server may answer: cut short, too long, throttled, refused, nonsense. Never a byte beyond a buffer."""

from __future__ import annotations

import asyncio
import socket
import statistics
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest

from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import AdapterError
from lmcache.l2.adapter import Adapter
from lmcache.l2.adapters import s3_client
from lmcache.testing.contract_run import RecordingInventory
from lmcache.testing.frames import FrameMemory, keys, namespace
from services import need_package
from support.s3_run import SECONDS, run, stored
from support.s3_stub import Handler, S3Stub

need_package("awscrt")

LOADED, MISSING, CORRUPT = LoadOutcome.LOADED, LoadOutcome.MISSING, LoadOutcome.CORRUPT
STORED, THERE = StoreOutcome.STORED, StoreOutcome.ALREADY_THERE


@pytest.fixture
def stub() -> Iterator[S3Stub]:
    with S3Stub() as stub:
        yield stub


def of_objects(answer: Callable[[Handler], bool]) -> Callable[[Handler], bool]:
    """A fault of objects; the bucket is listed as ever."""
    return lambda handler: bool(handler.name) and answer(handler)


# ---- loads -----------------------------------------------------------------------------------------------------------
async def load_guarded(adapter: Adapter) -> tuple[list[LoadOutcome], bool]:
    """The outcomes of loading two objects, and whether the memory beside the buffers is as it was."""
    target = FrameMemory(5)
    for buffer in target.buffers:
        buffer[:] = b"\xaa" * buffer.nbytes
    try:
        outcomes = await adapter.load(keys(2), target.buffers[1:5:2])
    except AdapterError:
        outcomes = [LoadOutcome.FAILED] * 2
    return outcomes, all(bytes(buffer) == b"\xaa" * buffer.nbytes for buffer in target.buffers[::2])


def longer(handler: Handler) -> bool:
    return handler.answer(200, handler.stub.objects[handler.name] + b"x" * 100_000)


def longer_than_it_says(handler: Handler) -> bool:
    body = handler.stub.objects[handler.name]
    return handler.answer(206, body * 2, Content_Range=f"bytes 0-{len(body) - 1}/{len(body)}")


def cut_short(handler: Handler) -> bool:
    body = handler.stub.objects[handler.name]
    return handler.answer(206, body[:5000], len(body), Content_Range=f"bytes 0-{len(body) - 1}/{len(body)}")


def short_of_the_range(handler: Handler) -> bool:
    body = handler.stub.objects[handler.name]
    return handler.answer(206, body[:5000], Content_Range=f"bytes 0-{len(body) - 1}/{len(body)}")


def nonsense_range(handler: Handler) -> bool:
    return handler.answer(206, b"x" * 5000, Content_Range="bytes 7-3/x")


def empty(handler: Handler) -> bool:
    return handler.refuse(416, "InvalidRange")


def server_error(handler: Handler) -> bool:
    return handler.refuse(500, "InternalError")


def reset(handler: Handler) -> bool:
    """In the middle of the answer."""
    body = handler.stub.objects[handler.name]
    handler.answer(206, body[:5000], len(body), Content_Range=f"bytes 0-{len(body) - 1}/{len(body)}")
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
    return True


def no_http(handler: Handler) -> bool:
    handler.wfile.write(b"\x00\xff nonsense\r\n\r\n")
    handler.close_connection = True
    return True


@pytest.mark.parametrize(
    "answer",
    [longer, longer_than_it_says, cut_short, short_of_the_range, nonsense_range, empty, server_error, reset, no_http],
)
def test_a_wrong_answer_to_a_load_is_no_hit_and_writes_nowhere_else(
    stub: S3Stub, answer: Callable[[Handler], bool]
) -> None:
    async def test(adapter: Adapter, _: RecordingInventory) -> None:
        await stored(adapter)
        whole = dict(stub.objects)
        stub.fault = of_objects(lambda handler: handler.command == "GET" and answer(handler))
        outcomes, is_untouched = await load_guarded(adapter)
        assert is_untouched and LOADED not in outcomes
        stub.fault = lambda handler: False
        stub.objects.update(whole)
        assert await load_guarded(adapter) == ([LOADED] * 2, True)

    run(stub, test)


def test_objects_of_other_lengths(stub: S3Stub) -> None:
    """A frame that is shorter or longer than the buffer is whole where its header says so."""

    async def test(adapter: Adapter, _: RecordingInventory) -> None:
        await stored(adapter)
        first, second = sorted(stub.objects, key=lambda name: name.endswith(keys(2)[1].chunk_hash.hex()))
        stub.objects[first] += bytes(4096)  # padded by a server with larger slots
        stub.objects[second] = stub.objects[second][:8192]
        outcomes, is_untouched = await load_guarded(adapter)
        assert outcomes == [LOADED, CORRUPT] and is_untouched
        assert list(stub.objects) == [first], "the corrupt one has been deleted"
        assert await adapter.probe(keys(2)) == [FrameMemory(1).slot_bytes + 4096, None]

    run(stub, test)


def test_some_that_fail_do_not_fail_the_others(stub: S3Stub) -> None:
    async def test(adapter: Adapter, _: RecordingInventory) -> None:
        await stored(adapter)
        bad = keys(2)[0].chunk_hash.hex()
        stub.fault = lambda handler: handler.name.endswith(bad) and handler.refuse(500, "InternalError")
        outcomes, _untouched = await load_guarded(adapter)
        assert outcomes == [LoadOutcome.FAILED, LOADED]

    run(stub, test)


def test_an_archived_object_is_deleted(stub: S3Stub) -> None:
    """By a rule of the bucket: it would fail every load of its prefix, and could not be stored again."""

    async def test(adapter: Adapter, _: RecordingInventory) -> None:
        memory = await stored(adapter)
        archived = keys(2)[1].chunk_hash.hex()
        stub.fault = lambda handler: (
            handler.command == "GET"
            and handler.name.endswith(archived)
            and any(archived in name for name in stub.objects)
            and handler.refuse(403, "InvalidObjectState")
        )
        assert await load_guarded(adapter) == ([LOADED, MISSING], True)
        assert await adapter.probe(keys(2)) == [memory.slot_bytes, None]
        stub.fault = lambda handler: False
        assert await adapter.store(keys(2), memory.buffers) == [THERE, STORED]

    run(stub, test)


# ---- stores ----------------------------------------------------------------------------------------------------------
def test_throttled_requests_are_tried_again_and_counted(stub: S3Stub) -> None:
    async def test(adapter: Adapter, _: RecordingInventory) -> None:
        refusals = iter(range(2))
        stub.fault = of_objects(lambda handler: next(refusals, None) is not None and handler.refuse(503, "SlowDown"))
        await stored(adapter, 1)
        assert adapter.status()["throttled_requests"] == 0, "awscrt tried again"
        stub.fault = of_objects(lambda handler: handler.refuse(503, "SlowDown"))
        with pytest.raises(AdapterError, match=r"SlowDown \(503\)") as caught:
            await stored(adapter, 1)
        assert caught.value.retryable
        assert adapter.status()["throttled_requests"] == 1

    run(stub, test)


def test_a_server_that_throttles_is_asked_again_at_growing_distances(
    stub: S3Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each distance is drawn at random below a bound that doubles, so it is the mean over objects that grows."""
    monkeypatch.setattr(s3_client, "RETRY_SCALE_MS", 200)
    asked: dict[str, list[float]] = defaultdict(list)
    refusals = 3

    def throttle(handler: Handler) -> bool:
        asked[handler.name].append(time.monotonic())
        return len(asked[handler.name]) <= refusals and handler.refuse(503, "SlowDown")

    async def test(adapter: Adapter, _: RecordingInventory) -> None:
        stub.fault = of_objects(throttle)
        memory = FrameMemory(8)
        for seed in range(2):
            wanted = keys(8, seed=seed)
            frames = [memory.fill(slot, key) for slot, key in enumerate(wanted)]
            assert await adapter.store(wanted, frames) == [STORED] * 8

    run(stub, test)
    means = [statistics.mean(times[n + 1] - times[n] for times in asked.values()) for n in range(refusals)]
    assert len(asked) == 16 and means[0] < means[2] and means[2] > 0.2, means  # 0.1, 0.2, 0.4 are expected


def test_a_server_without_conditional_requests(stub: S3Stub) -> None:
    async def test(adapter: Adapter, _: RecordingInventory) -> None:
        stub.fault = lambda handler: "If-None-Match" in handler.headers and handler.refuse(501, "NotImplemented")
        memory = await stored(adapter)
        assert adapter.status()["conditional_puts"] == 0
        assert await adapter.store(keys(2), memory.buffers) == [STORED] * 2
        assert await load_guarded(adapter) == ([LOADED] * 2, True)

    run(stub, test)


def test_a_server_that_deletes_objects_singly(stub: S3Stub) -> None:
    async def test(adapter: Adapter, _: RecordingInventory) -> None:
        stub.fault = lambda handler: handler.command == "POST" and handler.refuse(501, "NotImplemented")
        await stored(adapter, 5)
        stub.objects["lmcache/v1/of somebody else"] = b"x"
        assert await adapter.delete(keys(2)) == [True] * 2
        assert await adapter.clear() == (3, 3 * FrameMemory(1).slot_bytes)
        assert list(stub.objects) == ["lmcache/v1/of somebody else"]

    run(stub, test)


def test_what_could_not_be_deleted_is_told(stub: S3Stub) -> None:
    async def test(adapter: Adapter, _: RecordingInventory) -> None:
        await stored(adapter)
        names = sorted(stub.objects, key=lambda name: name.endswith(keys(2)[1].chunk_hash.hex()))
        body = f"<DeleteResult><Error><Key>{names[0]}</Key><Code>AccessDenied</Code></Error></DeleteResult>"
        stub.fault = lambda handler: handler.command == "POST" and handler.answer(200, body.encode())
        assert await adapter.delete(keys(2)) == [False, True]
        stub.fault = lambda handler: handler.refuse(403, "AccessDenied")
        with pytest.raises(AdapterError, match="AccessDenied"):
            await adapter.delete(keys(2))

    run(stub, test)


@pytest.mark.parametrize(
    ("status", "code", "outcome"),
    [
        (507, "InsufficientStorage", StoreOutcome.FULL),
        (403, "QuotaExceeded", StoreOutcome.FULL),
        (400, "EntityTooLarge", StoreOutcome.TOO_LARGE),
        (412, "PreconditionFailed", THERE),
    ],
)
def test_what_a_refused_store_means(stub: S3Stub, status: int, code: str, outcome: StoreOutcome) -> None:
    async def test(adapter: Adapter, _: RecordingInventory) -> None:
        stub.fault = of_objects(lambda handler: handler.refuse(status, code))
        assert await adapter.store(keys(1), [FrameMemory(1).fill(0, keys(1)[0])]) == [outcome]

    run(stub, test)


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, "AccessDenied", "AccessDenied (403): the credentials need s3:ListBucket, s3:GetObject, s3:PutObject"),
        (400, "ExpiredToken", "ExpiredToken (400): correct aws_access_key_id and aws_secret_access_key"),
        (403, "SignatureDoesNotMatch", "SignatureDoesNotMatch (403): correct aws_access_key_id"),
        (403, "RequestTimeTooSkewed", "RequestTimeTooSkewed (403): set the clock of this machine"),
        (404, "NoSuchBucket", "NoSuchBucket (404): create the bucket again"),
    ],
)
def test_what_can_be_mended_while_the_server_runs_is_said(stub: S3Stub, status: int, code: str, said: str) -> None:
    async def test(adapter: Adapter, _: RecordingInventory) -> None:
        await stored(adapter, 1)
        stub.fault = of_objects(lambda handler: handler.refuse(status, code))
        for operation in (adapter.store, adapter.load):
            with pytest.raises(AdapterError) as caught:
                await operation(keys(1), FrameMemory(1).buffers)
            assert said in str(caught.value) and "planted" not in str(caught.value).lower()

    run(stub, test)


# ---- silence ---------------------------------------------------------------------------------------------------------
def test_requests_without_an_answer_end_and_leave_memory_alone(stub: S3Stub) -> None:
    async def test(adapter: Adapter, _: RecordingInventory) -> None:
        memory = await stored(adapter)
        release = asyncio.Event()
        loop = asyncio.get_running_loop()

        def silent(handler: Handler) -> bool:
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(SECONDS)
            return False

        stub.fault = of_objects(silent)
        target = FrameMemory(2)
        for operation in (adapter.load(keys(2), target.buffers), adapter.store(keys(2, seed=5), memory.buffers)):
            with pytest.raises(AdapterError, match="no answer in time") as caught:
                await operation
            assert caught.value.retryable
        for buffer in target.buffers:
            buffer[:] = b"\xaa" * buffer.nbytes
        release.set()
        stub.fault = lambda handler: False
        assert await load_guarded(adapter) == ([LOADED] * 2, True)
        assert all(bytes(buffer) == b"\xaa" * buffer.nbytes for buffer in target.buffers)
        assert adapter.status()["requests_in_flight"] == 0

    run(stub, test, timeout_seconds=0.5)


def test_a_load_that_is_cancelled_leaves_memory_alone(stub: S3Stub) -> None:
    async def test(adapter: Adapter, _: RecordingInventory) -> None:
        await stored(adapter)
        arrived, release = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow(handler: Handler) -> bool:
            loop.call_soon_threadsafe(arrived.set)
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(SECONDS)
            return False

        stub.fault = of_objects(slow)
        target = FrameMemory(2)
        loading = asyncio.create_task(adapter.load(keys(2), target.buffers))
        await arrived.wait()
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        assert loading.cancelled()
        for buffer in target.buffers:
            buffer[:] = b"\xaa" * buffer.nbytes
        stub.fault = lambda handler: False
        release.set()
        assert await load_guarded(adapter) == ([LOADED] * 2, True)
        assert all(bytes(buffer) == b"\xaa" * buffer.nbytes for buffer in target.buffers)

    run(stub, test)


# ---- what the bucket holds -------------------------------------------------------------------------------------------
def test_a_listing_that_fails_leaves_a_usable_adapter(stub: S3Stub) -> None:
    async def test(adapter: Adapter, inventory: RecordingInventory) -> None:
        assert not inventory.objects
        stub.fault = lambda handler: False
        await stored(adapter)
        assert await load_guarded(adapter) == ([LOADED] * 2, True)

    stub.fault = lambda handler: "1000" in handler.query.get("max-keys", "") and handler.refuse(403, "AccessDenied")
    run(stub, test)


def test_namespaces_are_told_by_their_objects(stub: S3Stub) -> None:
    async def fill(adapter: Adapter, _: RecordingInventory) -> None:
        await stored(adapter, 3)
        other = keys(2, of=namespace("other", salt="tenant"))
        memory = FrameMemory(2)
        assert await adapter.store(other, [memory.fill(i, key) for i, key in enumerate(other)]) == [STORED] * 2

    async def look(adapter: Adapter, inventory: RecordingInventory) -> None:
        lost = {key.chunk_hash for key in keys(2, of=namespace("other", salt="tenant"))}
        assert set(keys(3)) < set(inventory.objects) and len(inventory.objects) == 5
        untold = inventory.order[3:]
        assert {key.chunk_hash for key in untold} == lost, "nobody can ask for them, so they go first"
        assert await adapter.clear() == (5, 5 * FrameMemory(1).slot_bytes)

    run(stub, fill)
    digest = namespace("other", salt="tenant").digest.hex()
    for name in stub.objects:
        if digest in name:
            stub.objects[name] = bytes(len(stub.objects[name]))
    stub.objects["lmcache/v1/x"] = stub.objects["elsewhere"] = b"of somebody else"
    run(stub, look)
    assert sorted(stub.objects) == ["elsewhere", "lmcache/v1/x"]
