"""Adapters from outside: what is refused, and that a mistake in one is its own fault only."""

from __future__ import annotations

import asyncio
import os
import textwrap
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from lmcache.core import limits
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import AdapterError, ConfigError, LMCacheError, ResourceError
from lmcache.l2.adapter_types import build, parse_adapter
from lmcache.l2.adapters.plugin import PluginAdapter
from lmcache.l2.runner import Runner
from lmcache.telemetry.metrics import Metrics
from lmcache.testing.frames import FrameMemory, keys, namespace
from manual_clock import ManualClock

CLIENT = str(Path(__file__).parents[2] / "contract" / "native_client.py")
NATIVE = {"type": "native_plugin", "module_path": CLIENT, "class_name": "DeletingClient"}

MODULE = textwrap.dedent(
    """
    from dataclasses import dataclass
    from typing import Annotated, Literal
    import msgspec
    from lmcache.l2.adapters.mock import MockAdapter
    from lmcache.l2.adapter import Capacity
    from lmcache.errors import AdapterError

    @dataclass
    class Settings:
        speed: float
        label: str = ""

    class DictSettings(Settings):
        @classmethod
        def from_dict(cls, values):
            return cls(values["speed"], "from_dict")

    class StructSettings(msgspec.Struct):
        speed: Annotated[float, msgspec.Meta(gt=0, le=1e9)]
        label: Literal["slow", "fast"] = "slow"

    class Configured(MockAdapter):
        def __init__(self, config):
            super().__init__(Capacity(), config.speed)
            self.config = config

    class Plain(MockAdapter):
        def __init__(self, speed=1e9):
            super().__init__(Capacity(), speed)

    class Sloppy(Plain):
        async def store(self, keys, buffers):
            return []
        async def load(self, keys, buffers):
            return ["loaded"] * len(keys)
        async def probe(self, keys):
            return None
        async def delete(self, keys, *, corrupt=False):
            raise KeyError("oops")

    class Bounded(Plain):
        def __init__(self, **capacity):
            super().__init__()
            self.capacity = Capacity(**capacity)
        def overhead_bytes(self):
            return 4096 * 0.5

    class NeverOpens(Plain):
        async def open(self, inventory):
            raise OSError("no route to host")

    class Half:
        async def open(self, inventory): ...
        async def store(self, keys, buffers): ...

    class OldStyle(Plain):
        def event_fd(self):
            return "three"
        def submit_batch_get(self, keys, buffers): ...
        submit_batch_set = submit_batch_exists = drain_completions = submit_batch_get
    """
)


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "mine.py").write_text(MODULE)
    return {"type": "plugin", "module_path": str(tmp_path / "mine.py"), "class_name": "Plain"}


def opened(spec: dict[str, Any]) -> Runner:
    async def test() -> Runner:
        runner = Runner(build(parse_adapter(spec, 0)), Metrics().l2, ManualClock())
        await runner.open()
        await runner.close(10)
        return runner

    return asyncio.run(test())


def test_parameters_reach_the_class(spec: dict[str, Any]) -> None:
    def inner(**more: Any) -> Any:
        adapter = build(parse_adapter({**spec, **more}, 0)).adapter
        assert isinstance(adapter, PluginAdapter)
        return adapter.inner

    assert inner(adapter_params={"speed": 5}).bytes_per_second == 5
    configured = inner(class_name="Configured", config_class_name="Settings", adapter_params={"speed": 7})
    assert configured.config.speed == 7 and configured.config.label == ""
    configured = inner(class_name="Configured", config_class_name="DictSettings", adapter_params={"speed": 7})
    assert configured.config.label == "from_dict"
    configured = inner(class_name="Configured", config_class_name="StructSettings", adapter_params={"speed": 7})
    assert (configured.config.speed, configured.config.label) == (7.0, "slow")


def test_a_struct_refuses_its_keys_as_the_adapters_of_this_package_do(spec: dict[str, Any]) -> None:
    parameters = {"speed": 0, "lable": "x", "label": "fas"}
    configured = {"class_name": "Configured", "config_class_name": "StructSettings", "adapter_params": parameters}
    with pytest.raises(ConfigError) as caught:
        build(parse_adapter({**spec, **configured}, 0))
    where = '--l2-adapter 1 (plugin), "adapter_params"'
    assert list(caught.value.problems) == [
        f'{where}: unknown key "lable" (did you mean label?); allowed are label, speed.',
        f'{where}: "speed" must be a number above 0 and up to 1000000000; got 0.',
        f"{where}: \"label\" must be one of slow, fast (did you mean fast?); got 'fas'.",
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"module_path": "no.such.module"}, ['"module_path"', "No module named 'no'"]),
        ({"module_path": "/no/such/file.py"}, ['"module_path"', "No such file"]),
        ({"class_name": "Plane"}, ['"class_name"', "did you mean Plain?"]),
        ({"config_class_name": "Setting"}, ['"config_class_name"', "did you mean Settings?"]),
        ({"adapter_params": {"sped": 1}}, ['"adapter_params"', "sped"]),
        ({"adapter_params": [1]}, ['"adapter_params" must be a JSON object']),
        ({"class_name": "Half"}, ["Half lacks load, probe, delete, clear, close", "write-an-adapter.md"]),
        ({"type": "native_plugin"}, ["Plain lacks event_fd, submit_batch_get"]),
        ({"type": "native_plugin", "class_name": "Nothing"}, ['"class_name"']),
        ({"eviction": {"eviction_policy": "LRU"}}, ['"eviction" needs "max_capacity_gb"']),
        ({"type": "native_plugin", "eviction": {"eviction_policy": "LRU"}}, ['"eviction" needs "max_capacity_gb"']),
        ({"config_class": "Settings"}, ["did you mean config_class_name?"]),
    ],
)
def test_what_is_wrong_is_refused_in_one_sentence(
    spec: dict[str, Any], change: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        opened({**spec, **change})
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert message.startswith("--l2-adapter 1") and message.endswith(".") and "\n" not in message


def test_a_backend_that_is_not_there_is_a_resource_error(spec: dict[str, Any]) -> None:
    with pytest.raises(ResourceError, match=r"^--l2-adapter 1 \(plugin\): open\(\) raised OSError: no route to host$"):
        opened({**spec, "class_name": "NeverOpens"})
    with pytest.raises(ResourceError, match=r"event_fd\(\) of OldStyle gave 'three'"):
        opened({**spec, "type": "native_plugin", "class_name": "OldStyle"})


def test_a_sloppy_plugin_fails_alone(spec: dict[str, Any]) -> None:
    async def test() -> None:
        runner = Runner(build(parse_adapter({**spec, "class_name": "Sloppy"}, 0)), Metrics().l2, ManualClock())
        await runner.open()
        wanted, memory = keys(2), FrameMemory(2)
        assert await runner.store(wanted, memory.buffers, lambda: None) == [StoreOutcome.FAILED] * 2
        assert await runner.load(wanted, memory.buffers, lambda: None) == [LoadOutcome.FAILED] * 2
        assert await runner.probe(wanted) == [False, False]
        await runner.corrupted(wanted, "test")
        await runner.close(10)

    asyncio.run(test())


@pytest.mark.parametrize("size", [True, False, -4096, 1 << 70])
def test_a_probe_that_does_not_give_sizes_finds_nothing(spec: dict[str, Any], size: int) -> None:
    async def test() -> None:
        runner = Runner(build(parse_adapter({**spec, "class_name": "Plain"}, 0)), Metrics().l2, ManualClock())
        await runner.open()

        async def probe(wanted: list[Any]) -> list[int]:
            return [size] * len(wanted)

        inner: Any = runner.adapter
        inner.inner.probe = probe
        assert await runner.probe(keys(2)) == [False, False]
        assert runner.ledger.used_bytes == 0
        await runner.close(10)

    asyncio.run(test())


def test_a_configured_capacity_bounds_what_has_none(spec: dict[str, Any]) -> None:
    runner = opened({**spec, "max_capacity_gb": 2, "eviction": {"eviction_policy": "LRU"}})
    assert runner.ledger.capacity.limit_bytes == 2 << 30


def test_a_capacity_computed_as_a_float_is_whole_bytes(spec: dict[str, Any]) -> None:
    async def test() -> None:
        parameters = {"limit_bytes": 0.5 * 2**30, "unit_bytes": 512.0}
        bounded = {**spec, "class_name": "Bounded", "adapter_params": parameters}
        runner = Runner(build(parse_adapter(bounded, 0)), Metrics().l2, ManualClock())
        await runner.open()
        assert runner.ledger.capacity.limit_bytes == 1 << 29
        assert await runner.store(keys(2), FrameMemory(2).buffers, lambda: None) == [StoreOutcome.STORED] * 2
        assert runner.ledger.held_bytes == 2 * FrameMemory(1).slot_bytes + 2048
        await runner.close(10)

    asyncio.run(test())


@pytest.mark.parametrize("capacity", [{"unit_bytes": 0}, {"limit_bytes": -1}, {"folder_bytes": None}])
def test_a_capacity_of_no_size_is_refused_in_one_sentence(spec: dict[str, Any], capacity: dict[str, Any]) -> None:
    (name, size), *_ = capacity.items()
    with pytest.raises(ResourceError, match=rf"adapter 1.*: capacity\.{name} must be at least \d bytes, got {size}$"):
        opened({**spec, "class_name": "Bounded", "adapter_params": capacity})


@pytest.mark.parametrize("more", [{"persist_enabled": False}, {"eviction": {"eviction_policy": "LRU"}}])
def test_what_cannot_delete_cannot_evict(more: dict[str, Any]) -> None:
    spec = {**NATIVE, "class_name": "Client", "adapter_params": {"space": "x"}, "max_capacity_gb": 1, **more}
    with pytest.raises(LMCacheError, match="Client lacks submit_batch_delete"):
        opened(spec)


def test_a_native_plugin_that_fails_says_why_and_goes_on(tmp_path: Path) -> None:
    async def test() -> None:
        adapter: Any = build(parse_adapter({**NATIVE, "adapter_params": {"space": str(tmp_path)}}, 0)).adapter
        runner = Runner(build(parse_adapter({**NATIVE, "adapter_params": {"space": str(tmp_path)}}, 0)), Metrics().l2,
                        ManualClock())  # fmt: skip
        await runner.open()
        adapter = runner.adapter
        client: Any = adapter.client
        wanted, memory = keys(3), FrameMemory(3)
        buffers = [memory.fill(slot, key) for slot, key in enumerate(wanted)]
        client.fails = {"set"}
        assert await runner.store(wanted, buffers, lambda: None) == [StoreOutcome.FAILED] * 3
        client.fails = set()
        assert await runner.store(wanted, buffers, lambda: None) == [StoreOutcome.STORED] * 3
        client.fails = {"get"}
        assert await runner.load(wanted, buffers, lambda: None) == [LoadOutcome.FAILED] * 3
        client.fails = set()
        name = next(iter(client.objects))
        client.objects[name] = b"x" * len(client.objects[name])  # certainly no frame
        assert await runner.load(wanted, buffers, lambda: None) == [
            LoadOutcome.CORRUPT,
            LoadOutcome.LOADED,
            LoadOutcome.LOADED,
        ]
        assert name not in client.objects

        def breaks() -> None:
            raise RuntimeError("drain broke")

        client.drain_completions = breaks
        assert await runner.load(wanted, buffers, lambda: None) == [LoadOutcome.FAILED] * 3
        assert await runner.close(10)

    asyncio.run(test())


@pytest.mark.parametrize("asks", [True, False])
def test_a_native_plugin_whose_backend_evicts_by_itself_is_not_remembered_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    """`asks`: what was stored is looked for later, and is gone."""
    for limit in ("MAX_L2_KNOWN_OBJECTS", "MAX_L2_SIZES_REMEMBERED", "MAX_NAMESPACES_REMEMBERED"):
        monkeypatch.setattr(limits, limit, 1000 if not asks or limit == "MAX_L2_KNOWN_OBJECTS" else 1 << 24)
    if not asks:
        monkeypatch.setattr(limits, "MAX_NAMESPACES_REMEMBERED", 50)
    spec = {**NATIVE, "class_name": "EvictingClient", "adapter_params": {"space": str(tmp_path)}}
    memory = FrameMemory(64)

    async def test() -> None:
        runner = Runner(build(parse_adapter(spec, 0)), Metrics().l2, ManualClock())
        await runner.open()

        async def store(rounds: range) -> None:
            for number in rounds:
                wanted = keys(64, number, namespace(salt=f"tenant {0 if asks else number}"))
                assert await runner.store(wanted, memory.buffers, lambda: None) == [StoreOutcome.STORED] * 64
                if asks:
                    assert await runner.adapter.probe(wanted) == [None] * 64

        await store(range(40))
        tracemalloc.start()
        try:
            await store(range(40, 160))
            kept_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert kept_bytes < 100 * 64 * 120  # a hundred for each object
        await runner.close(10)

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_native_plugin_is_cleared_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this server knows of, also where the adapter remembers less."""
    monkeypatch.setattr(limits, "MAX_L2_SIZES_REMEMBERED", 100)
    spec = {**NATIVE, "class_name": "EvictingClient", "adapter_params": {"space": str(tmp_path)}}
    memory = FrameMemory(1)

    async def test() -> None:
        runner = Runner(build(parse_adapter(spec, 0)), Metrics().l2, ManualClock())
        await runner.open()
        for start in range(0, 10_000, 500):
            await runner.store(keys(500, start), memory.buffers * 500, lambda: None)
        assert await runner.clear() == (10_000, 10_000 * memory.slot_bytes)
        client: Any = cast(Any, runner.adapter).client
        assert client.largest_batch["delete"] < 5000
        assert len(runner.ledger) == 0
        await runner.close(10)

    asyncio.run(asyncio.wait_for(test(), 60))


class Unanswerable:
    def __bool__(self) -> bool:
        raise RuntimeError("neither")


async def eventually(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


class LateNative:
    """A runner over a client whose loads wait at a gate, and whose drain can break. `given_back`: the buffers that the
    client was lent may be used for something else."""

    def __init__(self, space: Path) -> None:
        spec = {**NATIVE, "class_name": "LateClient", "adapter_params": {"space": str(space)}}
        self.runner = Runner(build(parse_adapter(spec, 0)), Metrics().l2, ManualClock())
        self.adapter: Any = self.runner.adapter
        self.memory = FrameMemory(2)
        self.given_back = 0

    async def open_with_objects(self) -> None:
        await self.runner.open()
        self.client = self.adapter.client
        buffers = [self.memory.fill(slot, key) for slot, key in enumerate(keys(2))]
        assert await self.runner.store(keys(2), buffers, lambda: None) == [StoreOutcome.STORED] * 2
        self.clean()

    def clean(self) -> None:
        for buffer in self.memory.buffers:
            buffer[:] = bytes(buffer.nbytes)

    async def load_late(self) -> None:
        """The client has taken the buffers, its drain breaks, and the load runs into its deadline."""
        self.client.gate.clear()
        self.runner.context.config = replace(self.runner.context.config, timeout_seconds=0.3)
        loading = asyncio.get_running_loop().create_task(self.load())
        await eventually(lambda: self.client.at_the_gate)
        self.client.breaks = 1
        os.eventfd_write(self.client.event_fd(), 1)
        assert await loading == [LoadOutcome.FAILED] * 2
        assert self.client.breaks == 0
        self.runner.context.config = replace(self.runner.context.config, timeout_seconds=30)

    async def load(self) -> list[LoadOutcome]:
        def released() -> None:
            self.given_back += 1

        return await self.runner.load(keys(2), self.memory.buffers, released)

    @property
    def is_written(self) -> bool:
        return all(self.memory.holds(slot, key) for slot, key in enumerate(keys(2)))


def test_what_a_native_plugin_still_writes_into_is_not_given_back(tmp_path: Path) -> None:
    async def test() -> None:
        late = LateNative(tmp_path)
        await late.open_with_objects()
        await late.load_late()
        assert late.given_back == 0 and not late.is_written  # the client may write at any time
        assert late.runner.status()["abandoned"] == 1
        late.client.gate.set()
        await eventually(lambda: late.given_back)
        assert late.is_written  # it has reported: nothing is written any more
        await eventually(lambda: late.runner.status()["abandoned"] == 0)
        late.clean()
        late.runner.layers.loads.breaker.resume()
        assert await late.load() == [LoadOutcome.LOADED] * 2 and late.given_back == 2
        assert await late.runner.close(10)

    asyncio.run(asyncio.wait_for(test(), 60))


def test_what_is_never_reported_is_given_back_when_the_client_has_closed(tmp_path: Path) -> None:
    async def test() -> None:
        late = LateNative(tmp_path)
        await late.open_with_objects()
        await late.load_late()
        late.client.breaks = 1 << 60  # for ever
        closing = asyncio.get_running_loop().create_task(late.runner.close(20))
        await eventually(lambda: late.client.closing)
        assert late.given_back == 0 and not closing.done()
        late.client.gate.set()
        assert await closing
        await eventually(lambda: late.given_back)
        assert late.is_written

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_drain_that_breaks_is_said_once_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        late = LateNative(tmp_path)
        await late.open_with_objects()
        late.client.breaks = 1 << 60
        late.runner.context.config = replace(late.runner.context.config, timeout_seconds=0.1)
        assert await late.runner.probe(keys(1, seed=9)) == [False]  # it was lent nothing: it fails at once
        tried = late.client.drains
        await eventually(lambda: late.client.drains >= tried + 2)
        assert await late.load() == [LoadOutcome.FAILED] * 2
        late.client.breaks = 0
        await eventually(lambda: late.given_back)
        late.runner.layers.loads.breaker.resume()
        late.runner.context.config = replace(late.runner.context.config, timeout_seconds=30)
        assert await late.load() == [LoadOutcome.LOADED] * 2
        assert await late.runner.close(10)

    asyncio.run(asyncio.wait_for(test(), 60))
    assert sum("drain_completions failed" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    "report",
    [
        "nonsense",
        lambda number: (number,),
        lambda number: (number, True, ""),
        lambda number: (number, True, "", 5),
        lambda number: (number, True, "", [True] * 7),
        lambda number: ([], True, "", None),
        lambda number: (number, True, "", [Unanswerable()] * 2),
    ],
)
def test_a_report_that_is_malformed_concerns_its_batch_alone(tmp_path: Path, report: Any) -> None:
    async def test() -> None:
        late = LateNative(tmp_path)
        await late.open_with_objects()
        late.client.mangle = lambda reported: [
            report(reported[0]) if callable(report) else report,
            *([reported] if report == "nonsense" or not isinstance(report(1)[0], int) else []),
        ]
        late.runner.context.config = replace(late.runner.context.config, timeout_seconds=0.2)
        outcomes = await late.load()
        assert outcomes in ([LoadOutcome.FAILED] * 2, [LoadOutcome.LOADED] * 2)
        await eventually(lambda: late.given_back)
        late.client.mangle = None
        late.runner.layers.loads.breaker.resume()
        late.runner.context.config = replace(late.runner.context.config, timeout_seconds=30)
        assert await late.load() == [LoadOutcome.LOADED] * 2
        assert await late.runner.close(10)

    asyncio.run(asyncio.wait_for(test(), 60))


def test_numbers_given_twice_end_with_the_client(tmp_path: Path) -> None:
    """Nobody can tell which of the two has been reported, so neither gets its buffers back on a report."""

    async def test() -> None:
        late = LateNative(tmp_path)
        await late.open_with_objects()
        submit_get = late.client.submit_batch_get
        late.client.submit_batch_get = lambda names, buffers: submit_get(names, buffers) and 1000
        previous = late.client.submitted
        loads = [late.adapter.load(keys(1), late.memory.buffers[:1]) for _ in range(2)]
        tasks = [asyncio.get_running_loop().create_task(load) for load in loads]
        await eventually(lambda: late.client.submitted == late.client.reported == previous + 4)  # exists, get of each
        await eventually(lambda: late.memory.holds(0, keys(1)[0]))
        assert not any(task.done() for task in tasks)
        assert await late.runner.close(10)
        assert all(isinstance(fault, AdapterError) for fault in await asyncio.gather(*tasks, return_exceptions=True))

    asyncio.run(asyncio.wait_for(test(), 60))
