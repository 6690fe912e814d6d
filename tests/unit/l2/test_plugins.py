"""Adapters from outside: what is refused, and that a mistake in one is its own fault only."""

from __future__ import annotations

import asyncio
import textwrap
from pathlib import Path
from typing import Any

import pytest

from lmcache.clock import ManualClock
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import ConfigError, LMCacheError, ResourceError
from lmcache.l2.adapters.plugin import PluginAdapter
from lmcache.l2.registry import build, parse_adapter
from lmcache.l2.runner import Runner
from lmcache.telemetry.metrics import Metrics
from lmcache.testing.frames import FrameMemory, keys

CLIENT = str(Path(__file__).parents[2] / "contract" / "native_client.py")
NATIVE = {"type": "native_plugin", "module_path": CLIENT, "class_name": "DeletingClient"}

MODULE = textwrap.dedent(
    """
    from dataclasses import dataclass
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
        runner = Runner(build(parse_adapter(spec, 0)), Metrics(), ManualClock())
        await runner.open()
        await runner.close(10)
        return runner

    return asyncio.run(test())


def test_parameters_reach_the_class(spec: dict[str, Any]) -> None:
    def inner(**more: Any) -> Any:
        adapter = build(parse_adapter({**spec, **more}, 0)).adapter
        assert isinstance(adapter, PluginAdapter)
        return adapter.inner

    assert inner(adapter_params={"speed": 5})._bytes_per_second == 5
    configured = inner(class_name="Configured", config_class_name="Settings", adapter_params={"speed": 7})
    assert configured.config.speed == 7 and configured.config.label == ""
    configured = inner(class_name="Configured", config_class_name="DictSettings", adapter_params={"speed": 7})
    assert configured.config.label == "from_dict"


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
        runner = Runner(build(parse_adapter({**spec, "class_name": "Sloppy"}, 0)), Metrics(), ManualClock())
        await runner.open()
        wanted, memory = keys(2), FrameMemory(2)
        assert await runner.store(wanted, memory.buffers, lambda: None) == [StoreOutcome.FAILED] * 2
        assert await runner.load(wanted, memory.buffers, lambda: None) == [LoadOutcome.FAILED] * 2
        assert await runner.probe(wanted) == [False, False]
        await runner.corrupted(wanted, "test")
        await runner.close(10)

    asyncio.run(test())


def test_a_configured_capacity_bounds_what_has_none(spec: dict[str, Any]) -> None:
    runner = opened({**spec, "max_capacity_gb": 2, "eviction": {"eviction_policy": "LRU"}})
    assert runner.ledger.capacity.limit_bytes == 2 << 30


@pytest.mark.parametrize("more", [{"persist_enabled": False}, {"eviction": {"eviction_policy": "LRU"}}])
def test_what_cannot_delete_cannot_evict(more: dict[str, Any]) -> None:
    spec = {**NATIVE, "class_name": "Client", "adapter_params": {"space": "x"}, "max_capacity_gb": 1, **more}
    with pytest.raises(LMCacheError, match="Client lacks submit_batch_delete"):
        opened(spec)


def test_a_native_plugin_that_fails_says_why_and_goes_on(tmp_path: Path) -> None:
    async def test() -> None:
        adapter: Any = build(parse_adapter({**NATIVE, "adapter_params": {"space": str(tmp_path)}}, 0)).adapter
        runner = Runner(build(parse_adapter({**NATIVE, "adapter_params": {"space": str(tmp_path)}}, 0)), Metrics(),
                        ManualClock())  # fmt: skip
        await runner.open()
        adapter = runner._adapter
        client: Any = adapter._client  # type: ignore[attr-defined]
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
