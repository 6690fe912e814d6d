"""The adapters on NIXL against the contract: its real plugins."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar

from lmcache.l2.adapter import Adapter
from lmcache.testing.adapter_contract import AdapterContract, build_from
from services import nixl
from support.encoded_adapter import EncodedContract

DYNAMIC: dict[str, Any] = {
    "type": "nixl_store_dynamic",
    "backend": "POSIX",
    "backend_params": {"file_path": "{folder}/base", "use_direct_io": "false", "max_capacity_gb": "1"},
}
DIRECT = {**DYNAMIC, "backend_params": {**DYNAMIC["backend_params"], "use_direct_io": "true"}}


class TestNixlDynamic(AdapterContract):
    after_restart = "told"
    steps = 200
    specification: ClassVar[dict[str, Any]] = DYNAMIC

    def build(self, folder: Path) -> Adapter:
        nixl.need()
        return build_from(self.specification, folder)

    def break_backend(self, folder: Path) -> bool:
        shutil.rmtree(folder / "base")
        (folder / "base").write_text("a file now")
        return True


class TestNixlDynamicDirect(TestNixlDynamic):
    specification = DIRECT
    steps = 200


def pool(**params: str) -> dict[str, Any]:
    given = {"file_path": "{folder}/base", "use_direct_io": "false", **params}
    return {"type": "nixl_store", "backend": "POSIX", "pool_size": 128, "backend_params": given}


class TestNixlPool(TestNixlDynamic):
    specification = pool()
    steps = 200

    def break_backend(self, folder: Path) -> bool:
        return False  # its files are open


class TestNixlPoolDirect(TestNixlPool):
    specification = pool(use_direct_io="true")
    steps = 200


class TestNixlPoolWithSerde(EncodedContract, TestNixlPool):
    steps = 200
