"""`resp` against the contract, on real servers: Valkey, Redis with TLS, over a Unix socket, a cluster of three."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lmcache.l2.adapter import Adapter
from lmcache.testing.adapter_contract import AdapterContract, build_from
from services.certificates import Certificates
from services.redis import Redis, Valkey, cluster

PASSWORD = "a password: with / signs"
_numbers = itertools.count()


class RespContract(AdapterContract):
    """Each test has a prefix of its own, so that one server serves all of them."""

    __test__ = False
    after_restart = "listed"
    keeps_prefix_order = False
    steps = 1000
    settings: ClassVar[dict[str, Any]] = {}
    where: ClassVar[dict[str, Any]] = {}  # the server, as the adapter's keys say it
    _prefixes: ClassVar[dict[Path, str]] = {}

    @classmethod
    @contextmanager
    def start(cls, folder: Path) -> Iterator[dict[str, Any]]:
        with Valkey(folder) as server:
            server.wait_ready()
            yield {"host": "127.0.0.1", "port": server.port}

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with cls.start(tmp_path_factory.mktemp("resp")) as cls.where:
            yield

    def build(self, folder: Path) -> Adapter:
        prefix = self._prefixes.setdefault(folder, f"test{next(_numbers)}")
        spec = {"type": "resp", "prefix": prefix, "timeout_seconds": 20, "num_workers": 4}
        return build_from({**spec, **self.where, **self.settings}, folder)


class TestValkey(RespContract):
    __test__ = True
    steps = 4000


class TestParts(RespContract):
    """Nearly every object is in parts."""

    __test__ = True
    settings = {"max_value_bytes": 8192}


class TestRedisWithTls(RespContract):
    __test__ = True

    @classmethod
    @contextmanager
    def start(cls, folder: Path) -> Iterator[dict[str, Any]]:
        certificates = Certificates(folder / "certificates")
        with Redis(folder, certificates=certificates, password=PASSWORD) as server:
            server.wait_ready()
            tls = {"tls": True, "tls_ca": str(certificates.ca)}
            yield {"host": "127.0.0.1", "port": server.tls_port, "password": PASSWORD, **tls}


class TestUnixSocket(RespContract):
    __test__ = True

    @classmethod
    @contextmanager
    def start(cls, folder: Path) -> Iterator[dict[str, Any]]:
        with Redis(folder) as server:
            server.wait_ready()
            yield {"url": f"unix://{server.unix_socket}", "database": 3}


class TestCluster(RespContract):
    __test__ = True

    @classmethod
    @contextmanager
    def start(cls, folder: Path) -> Iterator[dict[str, Any]]:
        with cluster(folder, password=PASSWORD) as nodes:
            yield {"host": "127.0.0.1", "port": nodes[1].port, "password": PASSWORD, "cluster": True}


class TestClusterParts(TestCluster):
    steps = 300
    settings = {"max_value_bytes": 8192}


class TestThatEnds(AdapterContract):
    """A server for one test, which ends it."""

    after_restart = "listed"
    keeps_prefix_order = False
    steps = 10

    def build(self, folder: Path) -> Adapter:
        if not hasattr(self, "server"):
            self.server = Valkey(folder)
            self.server.wait_ready()
        return build_from({"type": "resp", "host": "127.0.0.1", "port": self.server.port}, folder)

    @pytest.fixture(autouse=True)
    def ended(self) -> Iterator[None]:
        yield
        if hasattr(self, "server"):
            self.server.stop()

    def break_backend(self, folder: Path) -> bool:
        self.server.kill()
        return True
