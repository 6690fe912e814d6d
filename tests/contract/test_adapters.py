"""Every adapter against the contract."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from lmcache.l2.adapter import Adapter
from lmcache.testing.adapter_contract import AdapterContract, adapter_contract, build_from
from support.encoded_adapter import EncodedContract
from support.faults import FaultyAdapter

MOCK = {"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 100}
FS_NATIVE = {"type": "fs_native", "base_path": "{folder}/base"}

NATIVE = {"type": "native_plugin", "module_path": str(Path(__file__).with_name("native_client.py"))}

TestMock = adapter_contract(MOCK)
TestFaultyAdapterPassesOn = adapter_contract(lambda folder: FaultyAdapter(build_from(MOCK, folder)), steps=1000)


class TestFsNative(AdapterContract):
    after_restart = "told"

    def build(self, folder: Path) -> Adapter:
        return build_from(FS_NATIVE, folder)

    def break_backend(self, folder: Path) -> bool:
        shutil.rmtree(folder / "base")
        (folder / "base").write_text("a file now")
        return True


TestFsNativeDirect = adapter_contract(
    {**FS_NATIVE, "use_odirect": True, "num_workers": 2, "relative_tmp_dir": "tmp/here"},
    after_restart="told",
    steps=1000,
)
TestFsNativeIoUring = adapter_contract(
    {**FS_NATIVE, "use_odirect": True, "io_engine": "io_uring"}, after_restart="told", steps=1000
)
TestFsNativeReadAhead = adapter_contract(
    {**FS_NATIVE, "read_ahead_size": 5000, "max_capacity_gb": 0.01}, after_restart="told", steps=1000
)


class TestDax(AdapterContract):
    after_restart = "told"
    settings: dict[str, Any] = {}

    def build(self, folder: Path) -> Adapter:
        (folder / "device").touch()
        spec = {"type": "dax", "device_path": "{folder}/device", "max_dax_size_gb": 0.03125, "slot_bytes": 1 << 18}
        return build_from({**spec, **self.settings}, folder)


class TestDaxWithManyWorkers(TestDax):
    settings = {"num_store_workers": 3, "num_lookup_workers": 2, "num_load_workers": 8}
    steps = 1000


class TestDaxWithSerde(EncodedContract, TestDax):
    steps = 1000


TestFs = adapter_contract(
    {"type": "fs", "base_path": "{folder}", "relative_tmp_dir": "tmp"}, after_restart="told", steps=1000
)


class TestNativePlugin(AdapterContract):
    after_restart = "found"

    def build(self, folder: Path) -> Adapter:
        spec = {**NATIVE, "class_name": "DeletingClient", "adapter_params": {"space": "{folder}"}}
        self.adapter = build_from(spec, folder)
        return self.adapter

    def break_backend(self, folder: Path) -> bool:
        client: Any = self.adapter.client  # type: ignore[attr-defined]
        client.fails |= {"set", "get", "exists", "delete"}
        return True


TestNativePluginThatSaysLittle = adapter_contract(
    {
        **NATIVE,
        "class_name": "DeletingClient",
        "adapter_params": {"space": "{folder}", "says_each": False, "resets": False},
    },
    after_restart="found",
    steps=1000,
)
TestNativePluginWithoutDelete = adapter_contract(
    {**NATIVE, "class_name": "Client", "adapter_params": {"space": "{folder}"}},
    after_restart="found",
    can_delete=False,
    steps=1000,
)


def test_an_adapter_that_cannot_be_built_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="must say how to build its adapter"):
        AdapterContract().build(tmp_path)
