"""What precedes a start, where a real machine cannot be made to show it."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache import startup
from lmcache.errors import ResourceError
from lmcache.l2 import adapter_types
from lmcache.l2.adapter_config import AdapterConfig

OPTIONS = ["--l1-size-gb", "0.01", "--eviction-policy", "LRU", "--host", "127.0.0.1", "--http-host", "127.0.0.1"]


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Looking at the backend of `mock` takes for ever."""
    never = threading.Event()

    def check(config: AdapterConfig) -> list[str]:
        never.wait()
        return []

    monkeypatch.setitem(adapter_types.TYPES, "mock", dataclasses.replace(adapter_types.TYPES["mock"], check=check))
    yield
    never.set()


def test_a_backend_that_does_not_answer_holds_nothing_up(stuck: None) -> None:
    adapter = '{"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 1, "timeout_seconds": 0.05}'
    with pytest.raises(ResourceError, match=r"mock\): the backend did not answer within 0.05 s"):
        startup.plan([*OPTIONS, "--l2-adapter", adapter], {})


def test_notes_of_adapters_are_reported_with_the_others(tmp_path: Path) -> None:
    eviction = {"eviction_policy": "noop", "eviction_ratio": 0.5}
    adapter = json.dumps({"type": "fs", "base_path": str(tmp_path), "max_capacity_gb": 1, "eviction": eviction})
    planned = startup.plan([*OPTIONS, "--l2-adapter", adapter, "--max-cpu-workers", "3"], {})
    assert [note.split(" has no effect")[0] for note in planned.notes] == [
        "--max-cpu-workers",
        '--l2-adapter 1 (fs): "eviction_ratio"',
    ]
    planned.discard()
    assert list(tmp_path.iterdir()) == []


def test_secrets_that_everybody_can_read_are_noted(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    for mode, count in ((0o600, 0), (0o640, 0), (0o644, 1), (0o602, 1)):
        token.chmod(mode)
        planned = startup.plan([*OPTIONS, "--admin-token-file", str(token)], {})
        planned.discard()
        assert len(planned.notes) == count, planned.notes
    assert f"--admin-token-file {token} is open to everybody on this machine (mode 0602)" in planned.notes[0]


def test_where_events_go_is_noted_where_it_may_not_be_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache.kv_events.endpoint._is_own", lambda host: host == "192.0.2.2")

    def notes(*endpoints: str) -> list[str]:
        flags = ("--kv-events-endpoint", "--kv-events-replay-endpoint")
        planned = startup.plan([*OPTIONS, *(text for pair in zip(flags, endpoints, strict=False) for text in pair)], {})
        planned.discard()
        return list(planned.notes)

    assert notes("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558") == []
    assert notes("tcp://198.51.100.77:5557") == []
    (own,) = notes("tcp://192.0.2.2:5557")
    assert own.startswith("--kv-events-endpoint tcp://192.0.2.2:5557 is an address of this host: the server connects ")
    assert "tcp://*:PORT" in own
    opened = notes("tcp://*:5557", "tcp://192.0.2.2:5558")
    assert [note.split(" is open: ")[0] for note in opened] == [
        "--kv-events-endpoint tcp://*:5557",
        "--kv-events-replay-endpoint tcp://192.0.2.2:5558",
    ]


def test_a_folder_of_tokenizers_that_is_not_there_is_noted(tmp_path: Path) -> None:
    options = [*OPTIONS, "--tokenizer-dir", str(tmp_path / "models")]
    (note,) = startup.plan(options, {}).notes
    assert note == f"--tokenizer-dir {tmp_path}/models is no folder: over HTTP text is refused until it is one."
    (tmp_path / "models").mkdir()
    assert startup.plan(options, {}).notes == []


def test_a_buffer_in_front_of_l2_has_a_watermark(tmp_path: Path) -> None:
    """What no adapter took makes room there, although the policy evicts nothing."""
    adapter = json.dumps({"type": "fs", "base_path": str(tmp_path / "l2")})
    options = [*OPTIONS, "--eviction-policy", "noop", "--eviction-trigger-watermark", "0.9", "--l2-adapter", adapter]
    for policy, count in (("skip_l1", 0), ("default", 2)):
        planned = startup.plan([*options, "--l2-store-policy", policy], {})
        planned.discard()
        assert len(planned.notes) == count, planned.notes


def test_an_adapter_that_evicts_by_salt_uses_the_quotas(tmp_path: Path) -> None:
    quotas = tmp_path / "quotas.json"
    for policy, count in (("IsolatedLRU", 0), ("LRU", 1)):
        spec = {
            "type": "fs",
            "base_path": str(tmp_path / "l2"),
            "max_capacity_gb": 1,
            "eviction": {"eviction_policy": policy},
        }
        options = ["--l1-persist", "--quota-file", str(quotas), "--l2-adapter", json.dumps(spec)]
        planned = startup.plan([*OPTIONS, *options], {})
        planned.discard()
        assert sum("--quota-file has no effect" in note for note in planned.notes) == count, planned.notes


def test_two_adapters_in_one_folder_are_reported(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    folders = (tmp_path, tmp_path / "other", tmp_path / "link")
    adapters = [json.dumps({"type": "fs", "base_path": str(folder)}) for folder in folders]
    planned = startup.plan([*OPTIONS, "--l2-adapter", *adapters], {})
    planned.discard()
    (note,) = planned.notes
    assert note.startswith(f'--l2-adapter 3 (fs): "base_path" {tmp_path} is that of --l2-adapter 1 (fs): ')


PLUGIN = """
class Recording:
    closed = 0
    async def open(self, inventory): raise AssertionError
    async def store(self, keys, buffers): ...
    async def load(self, keys, buffers): ...
    async def probe(self, keys): ...
    async def delete(self, keys, *, corrupt=False): ...
    async def clear(self): ...
    async def close(self):
        Recording.closed += 1
        raise OSError("was never open")
"""


def plugin(folder: Path) -> list[str]:
    module = folder / "recording.py"
    module.write_text(PLUGIN)
    spec = {"type": "plugin", "module_path": str(module), "class_name": "Recording"}
    return ["--l2-adapter", json.dumps(spec)]


def test_adapters_of_a_plan_that_is_not_carried_out_are_closed(tmp_path: Path) -> None:
    planned = startup.plan([*OPTIONS, *plugin(tmp_path)], {})
    (configured,) = planned.adapters
    kind = type(configured.adapter.inner)  # type: ignore[attr-defined]
    assert kind.closed == 0
    planned.discard()  # although it raises
    assert kind.closed == 1
    missing = json.dumps({"type": "dax", "device_path": str(tmp_path / "none"), "max_dax_size_gb": 1, "slot_bytes": 1})
    with pytest.raises(ResourceError, match="does not exist"):
        startup.plan([*OPTIONS, *plugin(tmp_path), "--l2-adapter", missing], {})
    assert kind.closed == 2
