"""The services behind remote adapters, for tests that do the same to each: a process that can be stopped, the ports
that everything goes through, and the adapter there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lmcache.testing.processes import LOOPBACK, ManagedProcess
from services import mooncake, need_package, nixl
from services.azurite import Azurite
from services.mooncake import Master, Peer
from services.network import listening_ports
from services.redis import Valkey
from services.seaweedfs import ACCESS_KEY, REGION, SECRET_KEY, SeaweedFS

POOL_OBJECTS = 512
BUCKET = "cache"


@dataclass
class Remote:
    process: ManagedProcess
    adapter_at: Callable[[int], dict[str, Any]]  # that asks at another port in place of the first one
    ports: list[int]
    again: Callable[[], Any]  # the same service, after its process has ended
    prepare: Callable[[Any], None] = lambda service: service.wait_ready()  # what was started again

    @property
    def adapter(self) -> dict[str, Any]:
        return self.adapter_at(self.ports[0])

    def restart(self, running: ExitStack) -> None:
        """Returns as soon as the process runs: it may not answer yet."""
        self.process = running.enter_context(self.again())

    def wait_ready(self) -> None:
        self.prepare(self.process)


Start = Callable[[Path, ExitStack], Remote]


def valkey(folder: Path, running: ExitStack) -> Remote:
    """Empty after a restart."""
    server = running.enter_context(Valkey(folder / "valkey"))
    server.wait_ready()
    return Remote(
        *(server, lambda port: {"type": "resp", "host": LOOPBACK, "port": port}, [server.port]),
        lambda: Valkey(folder / "valkey", port=server.port),
    )


def s3(folder: Path, running: ExitStack) -> Remote:
    need_package("awscrt")
    server = _seaweedfs(folder, running)
    credentials = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY}

    def adapter_at(port: int) -> dict[str, Any]:
        endpoint = {"s3_endpoint": f"{LOOPBACK}:{port}/{BUCKET}", "s3_region": REGION, "disable_tls": True}
        return {"type": "s3", **endpoint, **credentials}

    return Remote(server, adapter_at, [server.port], server.restarted)


def s3_behind_nixl(folder: Path, running: ExitStack) -> Remote:
    nixl.need()
    server = _seaweedfs(folder, running)

    def adapter_at(port: int) -> dict[str, Any]:
        params = {**nixl.s3_params(server, BUCKET), "endpoint_override": f"http://{LOOPBACK}:{port}"}
        return {"type": "nixl_store", "backend": "OBJ", "pool_size": POOL_OBJECTS, "backend_params": params}

    return Remote(server, adapter_at, [server.port], server.restarted)


def azure_behind_nixl(folder: Path, running: ExitStack) -> Remote:
    nixl.need()
    server = running.enter_context(Azurite(folder / "azurite"))
    server.wait_ready()
    server.make_container(BUCKET)

    def adapter_at(port: int) -> dict[str, Any]:
        connection = server.connection_string.replace(f":{server.port}/", f":{port}/")
        params = {"connection_string": connection, "container_name": BUCKET}
        return {"type": "nixl_store", "backend": "AZURE_BLOB", "pool_size": POOL_OBJECTS, "backend_params": params}

    def prepare(again: Azurite) -> None:
        """Azurite writes down every few seconds which containers there are."""
        again.wait_ready()
        assert again.call("PUT", f"/{BUCKET}?restype=container") in (201, 409)

    return Remote(server, adapter_at, [server.port], server.restart, prepare)


def mooncake_master(folder: Path, running: ExitStack) -> Remote:
    """With a machine that has the objects. The master is empty after a restart."""
    master = running.enter_context(Master(folder))
    master.wait_ready()
    peer = running.enter_context(Peer(folder, master))
    peer.wait_ready()

    def adapter_at(port: int) -> dict[str, Any]:
        keys = {**mooncake.setup_keys(master, 0), "master_server_addr": f"{LOOPBACK}:{port}"}
        return {"type": "mooncake_store", **keys}

    return Remote(master, adapter_at, [master.port, *listening_ports(peer.pid)], master.restarted)


def _seaweedfs(folder: Path, running: ExitStack) -> SeaweedFS:
    server = running.enter_context(SeaweedFS(folder / "seaweedfs"))
    server.wait_ready()
    server.make_bucket(BUCKET)
    return server


ALL = (valkey, s3, s3_behind_nixl, azure_behind_nixl, mooncake_master)
# The others are slow.
FIRST_QUICK = [start if start is valkey else pytest.param(start, marks=pytest.mark.slow) for start in ALL]
