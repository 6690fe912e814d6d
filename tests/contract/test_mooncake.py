"""The adapter contract on Mooncake Store, in memory of another process."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache.l2.adapter import Adapter
from lmcache.l2.adapter_types import parse_adapter
from lmcache.l2.adapters import mooncake_client
from lmcache.l2.adapters.mooncake import MooncakeAdapter
from lmcache.l2.adapters.mooncake_config import MooncakeConfig
from lmcache.testing.adapter_contract import AdapterContract, build_from
from lmcache.testing.processes import free_port
from services import mooncake
from services.mooncake import Master, Peer
from support.encoded_adapter import EncodedContract


@pytest.fixture(scope="module", autouse=True, params=[False, True], ids=["handshake", "metadata server"])
def master(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    port = free_port() if request.param else 0
    with Master(tmp_path_factory.mktemp("mooncake"), metadata_port=port) as master:
        master.wait_ready()
        yield master


@pytest.fixture(scope="module")
def peer(master: Master, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    with Peer(tmp_path_factory.mktemp("peer"), master, 512 << 20) as peer:
        peer.wait_ready()
        yield peer


class KeptClient:
    """A real client that outlives the adapters that it is given to: its end takes a second or more, in which no other
    thread runs."""

    def __init__(self) -> None:
        self._client: Any = mooncake_client.load_package("a test")()
        self._is_set_up = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def setup(self, setup_keys: dict[str, str]) -> int:
        code = 0 if self._is_set_up else self._client.setup(setup_keys)
        self._is_set_up = not code
        return int(code)

    def close(self) -> int:
        return 0

    def end(self) -> None:
        if self._is_set_up:
            self._client.close()


@pytest.fixture(scope="module")
def kept(peer: Peer) -> Iterator[KeptClient]:
    assert peer.alive()
    client = KeptClient()
    mooncake_client.CLIENT_ENDS.may_end_all = False
    yield client
    client.end()
    mooncake_client.CLIENT_ENDS.may_end_all = True


class TestInAnotherProcess(AdapterContract):
    """Each folder is a prefix of its own. What is about the end of an adapter or what comes after has clients of its
    own."""

    after_restart = "found"
    keeps_prefix_order = False
    steps = 500
    master: Master
    kept: KeptClient | None

    @pytest.fixture(autouse=True)
    def _use(self, request: pytest.FixtureRequest, master: Master, kept: KeptClient) -> None:
        has_own = any(word in request.node.name for word in ("closing", "restart"))
        type(self).master, type(self).kept = master, None if has_own else kept

    def build(self, folder: Path) -> Adapter:
        prefix = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        spec = {"type": "mooncake_store", "prefix": prefix, **mooncake.setup_keys(self.master, 0)}
        if self.kept is None:
            return build_from(spec, folder)
        config = parse_adapter(spec, 0)
        assert isinstance(config, MooncakeConfig)
        kept = self.kept
        return MooncakeAdapter(config, lambda: kept)


@pytest.mark.slow
class TestWithSerde(EncodedContract, TestInAnotherProcess):
    steps = 100


COMPRESSION = """
import ctypes
from lmcache.l2.adapters.mooncake_client import load_package
load_package("test")
zstd = ctypes.CDLL("libzstd.so.1")
zstd.ZSTD_createCCtx.restype = ctypes.c_void_p
context, target = ctypes.c_void_p(zstd.ZSTD_createCCtx()), ctypes.create_string_buffer(1000)
assert 0 < zstd.ZSTD_compress2(context, target, 1000, bytes(500), 500) < 100
assert zstd.ZSTD_freeCCtx(context) == 0
"""


def test_the_machines_zstd_works_beside_the_one_that_mooncake_brings() -> None:
    """In a process of its own: otherwise what other tests did has loaded it before."""
    subprocess.run([sys.executable, "-c", COMPRESSION], check=True, timeout=60)
