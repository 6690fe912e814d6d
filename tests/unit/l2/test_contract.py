"""Every adapter against the contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache.l2.adapter import Adapter
from lmcache.l2.registry import build, parse_adapter
from lmcache.testing.adapter_contract import AdapterContract
from lmcache.testing.faults import FaultyAdapter


class TestMock(AdapterContract):
    def build(self) -> Adapter:
        return build(parse_adapter({"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 100}, 0)).adapter


class TestFsNative(AdapterContract):
    persists = True
    settings: dict[str, object] = {}

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def build(self) -> Adapter:
        spec = {"type": "fs_native", "base_path": str(self.folder), **self.settings}
        return build(parse_adapter(spec, 0)).adapter


class TestFsNativeDirect(TestFsNative):
    settings = {"use_odirect": True, "num_workers": 2, "relative_tmp_dir": "tmp/here"}


class TestFsNativeReadAhead(TestFsNative):
    settings = {"read_ahead_size": 5000, "max_capacity_gb": 0.01}


class TestFaultyAdapterPassesOn(AdapterContract):
    def build(self) -> Adapter:
        return FaultyAdapter(
            build(parse_adapter({"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 100}, 0)).adapter
        )
