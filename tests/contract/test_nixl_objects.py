"""`nixl_store` on object stores against the contract: SeaweedFS, which checks signatures, and Azurite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache.l2.adapter import Adapter
from lmcache.testing.adapter_contract import AdapterContract, build_from
from services import nixl
from services.azurite import Azurite
from services.seaweedfs import SeaweedFS


class ObjectContract(AdapterContract):
    after_restart = "told"
    steps = 60

    def specification(self, prefix: str) -> dict[str, Any]:
        raise NotImplementedError

    def build(self, folder: Path) -> Adapter:
        return build_from(self.specification(folder.name), folder)


class TestNixlPoolAzure(ObjectContract):
    server: Azurite

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        nixl.need()
        with Azurite(tmp_path_factory.mktemp("azurite")) as server:
            server.wait_ready()
            server.make_container("cache")
            cls.server = server
            yield

    def specification(self, prefix: str) -> dict[str, Any]:
        params = {
            "connection_string": self.server.connection_string,
            "container_name": "cache",
            "object_prefix": prefix,
        }
        return {"type": "nixl_store", "backend": "AZURE_BLOB", "pool_size": 128, "backend_params": params}


class TestNixlPoolS3(ObjectContract):
    server: SeaweedFS

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        nixl.need()
        with SeaweedFS(tmp_path_factory.mktemp("seaweedfs")) as server:
            server.wait_ready()
            server.make_bucket("cache")
            cls.server = server
            yield

    def specification(self, prefix: str) -> dict[str, Any]:
        return {
            "type": "nixl_store",
            "backend": "OBJ",
            "pool_size": 128,
            "backend_params": {**nixl.s3_params(self.server, "cache"), "object_prefix": prefix},
        }
