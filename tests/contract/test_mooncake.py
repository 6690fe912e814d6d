"""The adapter contract on Mooncake Store: in memory of this process, and in that of another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache.l2.adapter import Adapter
from lmcache.testing.adapter_contract import AdapterContract, build_from
from services import mooncake
from services.mooncake import Master, Peer


@pytest.fixture(scope="module", autouse=True)
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    with Master(tmp_path_factory.mktemp("mooncake")) as master:
        master.wait_ready()
        yield master


@pytest.fixture(scope="module")
def peer(master: Master, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    with Peer(tmp_path_factory.mktemp("peer"), master, 512 << 20) as peer:
        peer.wait_ready()
        yield peer


class MooncakeContract(AdapterContract):
    """Each folder is a prefix of its own."""

    __test__ = False
    after_restart = "found"
    keeps_prefix_order = False
    steps = 500
    segment_bytes = 0
    master: Master

    @pytest.fixture(autouse=True)
    def _use(self, master: Master) -> None:
        type(self).master = master

    def build(self, folder: Path) -> Adapter:
        prefix = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        keys = mooncake.setup_keys(self.master, self.segment_bytes)
        return build_from({"type": "mooncake_store", "prefix": prefix, **keys}, folder)


class TestInAnotherProcess(MooncakeContract):
    __test__ = True

    @pytest.fixture(autouse=True)
    def _use_peer(self, peer: Peer) -> None:
        assert peer.alive()
