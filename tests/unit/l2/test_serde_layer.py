"""A real adapter below a serde: the bytes that were stored come back, or it is a miss."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import struct
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from lmcache import _native
from lmcache.core.frame import parse_header, verify_frames
from lmcache.core.key import ObjectKey, stored_serde
from lmcache.core.limits import FRAME_HEADER_BYTES, GIB, MAX_SERDES_NAMED, MIB
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import ConfigError
from lmcache.l2.adapter_types import ConfiguredAdapter, build, parse_adapter
from lmcache.l2.layers.memory_pool import MemoryPool
from lmcache.l2.runner import Runner
from lmcache.telemetry.metrics import Metrics
from lmcache.testing.frames import FrameMemory, keys, namespace
from manual_clock import ManualClock
from support.faults import FaultyAdapter
from unit.l2.plain_serdes import Scrambled

LOADED, MISSING, CORRUPT = LoadOutcome.LOADED, LoadOutcome.MISSING, LoadOutcome.CORRUPT
STORED = StoreOutcome.STORED
PAYLOAD_BYTES = 60_000
MOCK = {"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 1000}
SCRAMBLED = {"type": "plugin", "factory": "unit.l2.plain_serdes:Scrambled"}
SHORT_SECONDS = 0.5  # enough to encode on a busy machine


@functools.lru_cache(256)  # each takes Python as long as the rest of a test
def bfloats(key: ObjectKey) -> bytes:
    """A payload of the key's own, of numbers as KV has them."""
    rng = random.Random(key.namespace.digest + key.chunk_hash)
    numbers = [rng.gauss(0, 1) for _ in range(PAYLOAD_BYTES // 2)]
    packed = struct.pack(f"<{len(numbers)}f", *numbers)
    return b"".join(packed[at + 2 : at + 4] for at in range(0, len(packed), 4))


def resealed(key: ObjectKey, frame: bytes) -> bytes:
    """The payload of a frame under another key, with checksums that are right."""
    header, memory = parse_header(frame), FrameMemory.of(frame)
    template = _native.frame_template(
        key.namespace.encode(), key.namespace.digest, header.payload_bytes, header.serde, header.serde_params
    )
    _native.frame_seal(_native.buffer_address(memory), template, key.chunk_hash)
    return bytes(memory)


class Bench:
    """One server's view of a backend behind a serde."""

    def __init__(self, serde: object = None, spec: dict[str, Any] | None = None, **more: Any) -> None:
        given = {**(spec or MOCK), **more}
        if serde is not None:
            given["serde"] = serde
        configured = build(parse_adapter(given, 0))
        self.metrics = Metrics()
        self.adapter = FaultyAdapter(configured.adapter)
        configured = ConfiguredAdapter(configured.config, self.adapter, configured.serde)
        self.runner = Runner(configured, self.metrics.l2, ManualClock())
        self.memory = FrameMemory(8, PAYLOAD_BYTES)
        self.released = 0

    async def __aenter__(self) -> Bench:
        await self.runner.open()
        assert await self.runner.wait_for_inventory(20)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.adapter.gate.set()
        assert await self.runner.drain(10)
        self.runner.check_idle()
        assert await self.runner.close(10)

    def release(self) -> None:
        self.released += 1

    async def store(self, wanted: Sequence[ObjectKey]) -> list[StoreOutcome]:
        buffers = [self.memory.fill(slot, key, bfloats(key)) for slot, key in enumerate(wanted)]
        return await self.runner.store(wanted, buffers, self.release)

    async def load(self, wanted: Sequence[ObjectKey]) -> list[LoadOutcome]:
        """Loads, and checks every byte of what is said to be there, headers too."""
        target = FrameMemory(len(wanted), PAYLOAD_BYTES)
        outcomes = await self.runner.load(wanted, target.buffers, self.release)
        for slot, (key, outcome) in enumerate(zip(wanted, outcomes, strict=True)):
            if outcome is LOADED:
                end = FRAME_HEADER_BYTES + PAYLOAD_BYTES
                assert target.buffers[slot][:end] == self.memory.fill(0, key, bfloats(key))[:end]
            else:
                assert target.verify(slot, key) != "", "what is no hit looks like one"
        return outcomes

    def be_impatient(self) -> None:
        self.runner.context.config = replace(self.runner.context.config, timeout_seconds=SHORT_SECONDS)

    def sample(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"lmcache_mp_{name}", {"l2_name": "mock_0"})

    @property
    def stored(self) -> dict[ObjectKey, bytes]:
        return self.adapter.inner.objects


def run(test: Callable[[Bench], Awaitable[None]], serde: object, **more: Any) -> None:
    async def whole() -> None:
        async with Bench(serde, **more) as bench:
            await test(bench)

    asyncio.run(asyncio.wait_for(whole(), 60))


@pytest.mark.parametrize(
    "serde",
    [
        {"type": "zstd"},
        {"type": "exponent"},
        {"type": "zstd", "level": 3, "smallest_saving": 0},
        SCRAMBLED,
        [{"type": "exponent"}, SCRAMBLED],
        [SCRAMBLED, {"type": "exponent"}, {"type": "zstd"}],
    ],
)
def test_what_was_stored_comes_back_and_what_lies_there_is_whole(serde: Any) -> None:
    async def test(bench: Bench) -> None:
        wanted = [*keys(4), *keys(3, of=namespace("other", salt="tenant"))]
        name = ",".join(
            stage.get("factory", stage["type"]) for stage in (serde if isinstance(serde, list) else [serde])
        )
        name = name.replace(SCRAMBLED["factory"], "scrambled")
        assert await bench.store(wanted) == [STORED] * 7
        assert await bench.store(wanted) == [StoreOutcome.ALREADY_THERE] * 7
        assert await bench.runner.probe([*wanted, *keys(1, seed=9)]) == [True] * 7 + [False]
        assert await bench.load(wanted) == [LOADED] * 7
        assert await bench.load(wanted[::-1]) == [LOADED] * 7
        assert bench.released == 4 and len(bench.stored) == 7
        for key, frame in bench.stored.items():
            header = parse_header(frame)
            assert stored_serde(key.namespace) == header.serde == name
            assert len(frame) % 4096 == 0 and verify_frames([key], [FrameMemory.of(frame)]) == [""]
        assert bench.runner.ledger.used_bytes == sum(map(len, bench.stored.values()))
        if "exponent" in name or "zstd" in name:
            assert bench.runner.ledger.used_bytes < 0.8 * 7 * bench.memory.slot_bytes
            assert bench.sample("l2_serde_stored_bytes_total") == bench.runner.ledger.used_bytes

    run(test, serde)


def test_objects_of_another_serde_are_misses_and_leave_the_others_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def whole() -> None:
        wanted = keys(3)
        serdes: list[Any] = [{"type": "zstd"}, {"type": "exponent"}, None]
        async with Bench(serdes[0]) as first:
            held = first.stored
            await first.store(wanted)
        for serde in serdes[1:]:
            async with Bench(serde) as other:
                other.adapter.inner.objects = held
                assert await other.load(wanted) == [MISSING] * 3
                other.runner.found([(key, len(frame)) for key, frame in held.items()])
                assert await other.runner.probe(wanted) == [False] * 3
                assert await other.store(wanted) == [STORED] * 3
                assert await other.load(wanted) == [LOADED] * 3
        async with Bench(serdes[0]) as again:
            again.adapter.inner.objects = held
            assert await again.load(wanted) == [LOADED] * 3
        assert len(held) == 9

    asyncio.run(whole())
    assert any('serde "zstd", and the serde here is "exponent"' in record.getMessage() for record in caplog.records)


def test_a_damaged_object_is_moved_aside_and_counted_once() -> None:
    async def test(bench: Bench) -> None:
        wanted = keys(3)
        await bench.store(wanted)
        for where, key in zip((5000, 100, 30_000), list(bench.stored), strict=True):
            frame = bytearray(bench.stored[key])
            frame[where] ^= 1
            bench.stored[key] = bytes(frame)
        assert await bench.load(wanted) == [CORRUPT] * 3
        assert not bench.stored and not any(await bench.runner.probe(wanted))
        assert bench.metrics.registry.get_sample_value("lmcache_mp_corrupt_frames_total", {"tier": "l2"}) == 3
        assert await bench.store(wanted) == [STORED] * 3
        assert await bench.load(wanted) == [LOADED] * 3

    run(test, {"type": "exponent"})


def test_swapped_objects_are_corrupt() -> None:
    async def test(bench: Bench) -> None:
        wanted = keys(2)
        await bench.store(wanted)
        first, second = bench.stored
        bench.stored[first], bench.stored[second] = bench.stored[second], bench.stored[first]
        assert await bench.load(wanted) == [CORRUPT] * 2

    run(test, {"type": "zstd"})


def test_a_truncated_object_is_corrupt() -> None:
    async def whole() -> None:
        wanted = keys(4)
        async with Bench({"type": "zstd"}) as first:
            await first.store(wanted)
        held = first.stored
        for size, key in zip((0, 100, 4096, 20_480), list(held), strict=True):
            held[key] = held[key][:size]
        async with Bench({"type": "zstd"}) as second:  # whose memory has nothing of it
            second.adapter.inner.objects = held
            assert await second.load(wanted) == [CORRUPT] * 4

    asyncio.run(whole())


def test_what_an_adapter_did_not_write_is_not_taken_from_memory_that_was_used_before() -> None:
    async def test(bench: Bench) -> None:
        wanted = keys(4)
        await bench.store(wanted)
        assert await bench.load(wanted) == [LOADED] * 4
        bench.adapter.load_outcome = LOADED  # and nothing is written
        assert await bench.load(wanted) == [CORRUPT] * 4

    run(test, {"type": "zstd"})


def test_an_oversized_object_is_corrupt() -> None:
    async def test(bench: Bench) -> None:
        wanted = keys(1)
        await bench.store(wanted)
        (key,) = bench.stored
        bench.stored[key] += bytes(MIB)
        assert await bench.load(wanted) == [CORRUPT]

    run(test, {"type": "zstd"})


def test_l1_memory_that_is_too_small_is_not_left() -> None:
    async def test(bench: Bench) -> None:
        wanted = keys(1)
        await bench.store(wanted)
        target = FrameMemory(3, 8192)
        for buffer in target.buffers:
            buffer[:] = b"\xaa" * buffer.nbytes
        assert await bench.runner.load(wanted, [target.buffers[1]], bench.release) == [CORRUPT]
        assert all(bytes(buffer) == b"\xaa" * buffer.nbytes for buffer in target.buffers[::2])

    run(test, {"type": "exponent"})


def test_a_plugin_that_fails_stores_nothing_and_gives_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(bench: Bench) -> None:
        first, second = keys(2), keys(2, seed=2)
        assert await bench.store(first) == [STORED] * 2
        with monkeypatch.context() as patch:
            patch.setattr(Scrambled, "fails", True)
            assert await bench.load(first) == [LoadOutcome.FAILED] * 2
            assert await bench.store(second) == [StoreOutcome.FAILED] * 2
            assert len(bench.stored) == 2, "what it could not decode just now may be well"
        assert await bench.store(second) == [STORED] * 2
        assert await bench.load([*first, *second]) == [LOADED] * 4
        first_key, second_key, *_ = bench.stored
        bench.stored[first_key] = resealed(first_key, bench.stored[second_key])  # which it did not write for this key
        assert await bench.load(first) == [CORRUPT, LOADED] and len(bench.stored) == 3

    run(test, SCRAMBLED)


def test_a_plugin_that_keeps_memory_stores_nothing_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async def test(bench: Bench) -> None:
        assert await bench.store(keys(2)) == [StoreOutcome.FAILED] * 2
        assert bench.released == 1 and not bench.stored

    run(test, {"type": "plugin", "factory": "unit.l2.plain_serdes:Greedy"})
    said = [record.getMessage() for record in caplog.records if record.name == "lmcache.serde"]
    assert said == ["The serde greedy failed: source or destination, or a part of one, was kept after the call"]


@pytest.mark.parametrize("more_bytes", [-1_000_000, 2**50, 2**63 - 100_000, 2**64 - 60_000, 2**70])
def test_a_plugin_that_wants_absurd_memory_stores_nothing(more_bytes: int) -> None:
    async def test(bench: Bench) -> None:
        assert await bench.store(keys(2)) == [StoreOutcome.FAILED] * 2
        assert await bench.load(keys(2)) == [LoadOutcome.FAILED] * 2
        assert bench.released == 2 and not bench.stored

    run(test, {**SCRAMBLED, "params": {"more_bytes": more_bytes}})


def test_a_serde_that_does_not_end_in_time_is_said_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(Scrambled, "gate", gate)

    async def test(bench: Bench) -> None:
        bench.be_impatient()
        for seed in (1, 2):
            assert await bench.store(keys(2, seed=seed)) == [StoreOutcome.FAILED] * 2
        assert bench.released == 0, "it may still read"
        assert bench.metrics.registry.get_sample_value("lmcache_mp_timeouts_total") == 2
        gate.set()
        assert await bench.runner.drain(10)
        assert bench.released == 2 and not bench.stored

    run(test, SCRAMBLED)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["mock_0: 2 objects were not encoded within the deadline (serde scrambled)"]


def test_names_of_serdes_that_others_wrote_into_a_backend_make_few_log_lines_and_no_own_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def whole() -> None:
        async with Bench(None) as bench:
            for number in range(40):
                forged = replace(namespace(), layout=f"{namespace().layout}+{number}\nERROR forged {'x' * 100}")
                bench.runner.found([(key, 4096) for key in keys(1, of=forged)])

    asyncio.run(whole())
    said = [record.getMessage() for record in caplog.records if "stored with the serde" in record.getMessage()]
    assert len(said) == MAX_SERDES_NAMED
    assert not any("\n" in sentence or "xxxxxxxxxxxxxxxxxxxx" in sentence for sentence in said)


def test_a_lossy_serde_and_the_namespaces_that_accept_it_are_apart_from_all_others() -> None:
    exact = keys(3)
    accepting = keys(3, of=replace(namespace(), layout=namespace().layout + "~scrambled"))
    of_another = keys(3, of=replace(namespace(), layout=namespace().layout + "~other"))
    lossy = {**SCRAMBLED, "params": {"lossy": True}}

    async def test(bench: Bench, taken: list[ObjectKey]) -> None:
        for wanted in (exact, accepting, of_another):
            is_taken = wanted is taken
            assert set(await bench.store(wanted)) == {STORED if is_taken else StoreOutcome.FAILED}
            assert await bench.runner.probe(wanted) == [is_taken] * 3
            assert set(await bench.load(wanted)) == {LOADED if is_taken else MISSING}
        mixed = [exact[0], accepting[0], of_another[0]]
        assert await bench.runner.probe(mixed) == [wanted in taken for wanted in mixed]
        assert len(bench.stored) == 3

    run(lambda bench: test(bench, accepting), lossy)
    run(lambda bench: test(bench, accepting), [lossy, {"type": "zstd"}])  # what follows is nothing to accept
    run(lambda bench: test(bench, exact), SCRAMBLED)
    run(lambda bench: test(bench, exact), None)


def test_what_a_lossy_serde_left_is_served_and_nothing_else_is() -> None:
    rounded = {"type": "plugin", "factory": "unit.l2.plain_serdes:Rounded"}
    serdes = [rounded, {"type": "exponent"}]
    accepting = keys(3, of=replace(namespace(), layout=namespace().layout + "~rounded"))

    async def served(bench: Bench) -> tuple[list[LoadOutcome], FrameMemory]:
        target = FrameMemory(3, PAYLOAD_BYTES)
        return await bench.runner.load(accepting, target.buffers, bench.release), target

    async def whole() -> None:
        async with Bench(serdes) as bench:
            assert await bench.store(accepting) == [STORED] * 3
            outcomes, target = await served(bench)
            assert outcomes == [LOADED] * 3
            for slot, key in enumerate(accepting):
                assert target.verify(slot, key) == ""
                payload = bytes(target.buffers[slot][FRAME_HEADER_BYTES : FRAME_HEADER_BYTES + PAYLOAD_BYTES])
                assert payload[1::2] == bfloats(key)[1::2] and payload[::2] == bytes(PAYLOAD_BYTES // 2)
            held = bench.stored
        async with Bench([{**rounded, "params": {"fill": 1}}, serdes[1]]) as other:  # it would decode to something else
            other.adapter.inner.objects = held
            assert (await served(other))[0] == [CORRUPT] * 3

    asyncio.run(whole())


@pytest.mark.parametrize("operation", ["store", "load"])
def test_a_late_backend_keeps_memory_of_the_layer_and_not_of_the_caller(operation: str) -> None:
    async def test(bench: Bench) -> None:
        wanted = keys(8)
        await bench.store(wanted)
        released = bench.released
        bench.be_impatient()
        bench.adapter.gate.clear()
        if operation == "load":
            assert await bench.load(wanted) == [LoadOutcome.FAILED] * 8
        else:
            assert await bench.store(keys(8, seed=5)) == [StoreOutcome.FAILED] * 8
        while bench.released == released:  # a thread of low priority may be at it
            await asyncio.sleep(0.001)
        assert bench.released == released + 1 and bench.adapter.stalled
        assert not await bench.runner.drain(0.01), "memory of the layer is still in use"
        bench.adapter.gate.set()
        assert await bench.runner.drain(10)
        bench.runner.check_idle()

    run(test, {"type": "zstd"})


def test_while_the_server_drains_nothing_begins() -> None:
    async def test(bench: Bench) -> None:
        wanted = keys(2)
        await bench.store(wanted)
        assert await bench.runner.drain(1)
        assert await bench.load(wanted) == [LoadOutcome.FAILED] * 2
        assert await bench.store(keys(2, seed=3)) == [StoreOutcome.FAILED] * 2

    run(test, {"type": "zstd"})


def test_the_capacity_counts_stored_bytes() -> None:
    async def test(bench: Bench) -> None:
        wanted = keys(6)
        outcomes = await bench.store(wanted)
        assert outcomes[:4] == [STORED] * 4 and StoreOutcome.FULL in outcomes
        assert bench.runner.ledger.used_bytes == sum(map(len, bench.stored.values()))

    frames = 3.3  # as many raw ones would have room
    run(test, {"type": "exponent"}, max_capacity_gb=frames * FrameMemory(1, PAYLOAD_BYTES).slot_bytes / GIB)


def test_what_a_server_stored_another_one_finds_in_the_folder(tmp_path: Path) -> None:
    async def whole() -> None:
        spec = {"type": "fs_native", "base_path": str(tmp_path)}
        wanted = [*keys(3), *keys(3, of=namespace("other", rank=1, salt="s"))]
        async with Bench({"type": "exponent"}, spec) as first:
            assert await first.store(wanted) == [STORED] * 6
        async with Bench({"type": "exponent"}, spec) as second:
            assert second.runner.knows(wanted) == [True] * 6
            assert await second.load(wanted) == [LOADED] * 6
        async with Bench(None, spec) as raw:
            assert await raw.load(wanted) == [MISSING] * 6

    asyncio.run(whole())


def test_raw_objects_and_encoded_ones_live_beside_each_other_at_once(tmp_path: Path) -> None:
    async def whole() -> None:
        spec = {"type": "fs_native", "base_path": str(tmp_path)}
        wanted = keys(4)
        async with Bench(None, spec) as raw, Bench({"type": "zstd"}, spec) as encoded:
            await asyncio.gather(raw.store(wanted), encoded.store(wanted))
            assert await raw.load(wanted) == await encoded.load(wanted) == [LOADED] * 4

    asyncio.run(whole())


@pytest.mark.parametrize(
    "serde, said",
    [
        ({}, 'the key "type" is required and must be one of zstd, exponent, aesgcm, fp8, cachegen, plugin'),
        ({"type": "zsdt"}, 'unknown serde type "zsdt" (did you mean zstd?)'),
        ({"type": "turboquant"}, 'the serde type "turboquant" is not built yet'),
        ({"type": "cachegen", "bins": 8}, '"bins" must be one of 16, 32; got 8'),
        ({"type": "fp8", "fp8_dtype": "e4m3"}, '"fp8_dtype" must be one of float8_e4m3fn, float8_e5m2; got'),
        (
            [{"type": "exponent"}, {"type": "fp8"}],
            "the \"serde\" type 'fp8' is lossy and must be the first of the list",
        ),
        ([{"type": "fp8"}, {"type": "fp8"}], "the \"serde\" type 'fp8' is lossy and must be the first of the list"),
        ({**SCRAMBLED, "params": {"name": "fp8-e5m2"}}, "'fp8-e5m2', which is that of another serde type"),
        ({"type": "zstd", "level": 20}, '"level" must be a whole number from 0 to 19; got 20'),
        ({"type": "exponent", "smallest_savings": 0}, "did you mean smallest_saving?"),
        ([], '"serde" must have 1 to 8 types'),
        ([{"type": "zstd"}, {"type": "nothing"}], 'unknown serde type "nothing"'),
        ({"type": "plugin"}, '"factory" is required'),
        ({"type": "plugin", "factory": "json"}, '"factory" must be a string such as package.module:factory'),
        ({"type": "plugin", "factory": "json:nothing"}, "gave no serde (AttributeError"),
        ({"type": "plugin", "factory": "json:dumps", "params": {"obj": 1}}, "lacks max_encoded_bytes, decode"),
        ({**SCRAMBLED, "params": {"name": "With Spaces"}}, "has the \"name\" 'With Spaces'"),
        ({**SCRAMBLED, "params": {"name": "zstd"}}, "has the \"name\" 'zstd', which is that of another serde type"),
        ({**SCRAMBLED, "params": {"name": "fp8"}}, "has the \"name\" 'fp8', which is that of another serde type"),
        ([{**SCRAMBLED, "params": {"name": "a" * 20}}, {**SCRAMBLED, "params": {"name": "b" * 20}}], "41 characters"),
        ("zstd", 'must be an object such as {"type": "zstd"}, or a list of them'),
    ],
)
def test_a_serde_that_cannot_be_is_refused_in_a_sentence(serde: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        build(parse_adapter({**MOCK, "serde": serde}, 0))
    assert said in str(refusal.value) and str(refusal.value).startswith("--l2-adapter 1 (mock)")


def test_the_memory_of_a_pool_is_bounded_used_again_and_given_in_order() -> None:
    async def test() -> None:
        pool, now = MemoryPool(10 * MIB), asyncio.get_running_loop().time()
        first = await pool.take(6 * MIB, now)
        assert first is not None and len(first) == 6 * MIB and await pool.take(5 * MIB, now) is None
        waiting = [asyncio.ensure_future(pool.take(size, now + 60)) for size in (20 * MIB, MIB)]
        given_up = asyncio.ensure_future(pool.take(MIB, now + 60))
        await asyncio.sleep(0)
        given_up.cancel()
        pool.give_back(first)
        large = await waiting[0]  # alone, though it is beyond the limit
        assert large is not None and len(large) == 20 * MIB and not waiting[1].done()
        pool.give_back(large)
        small = await waiting[1]
        assert small is not None and pool.lent_bytes == MIB
        again = await pool.take(6 * MIB, now)
        assert again is not None and len(again) == 6 * MIB
        for memory in (small, again):
            pool.give_back(memory)
        assert pool.lent_bytes == 0
        assert await pool.take(2**60, now) is None and await pool.take(2**70, now) is None
        assert pool.lent_bytes == 0

    asyncio.run(test())
