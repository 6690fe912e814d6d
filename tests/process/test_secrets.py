"""What grants access to a remote tier is shown nowhere: not in the log, on a page, among the arguments of the process,
or by a crash."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest
import yaml

from lmcache.testing.processes import LOOPBACK, CacheServer, http_json
from polling import until
from process.support import SmallEngine
from services import azurite, mooncake, need_package, nixl
from services.azurite import Azurite
from services.mooncake import Master, Peer
from services.redis import Redis, Sentinel, Valkey
from services.seaweedfs import ACCESS_KEY, REGION, SECRET_KEY, SeaweedFS

PASSWORD = "planted-password"
ODD_PASSWORD = "planted password: with / signs"
TOKEN = "planted-token"
CHUNKS = 4
LOUD = {"LMCACHE_LOG_LEVEL": "DEBUG", "PYTHONFAULTHANDLER": "1"}


class Planted(NamedTuple):
    """An adapter at a real service, and the words that are to be seen nowhere."""

    adapter: dict[str, Any]
    secrets: tuple[str, ...]


Start = Callable[[Path, ExitStack], Planted]


def valkey(folder: Path, running: ExitStack, password: str = PASSWORD) -> Valkey:
    server = running.enter_context(Valkey(folder / "valkey", password=password))
    server.wait_ready()
    return server


def resp_by_password(folder: Path, running: ExitStack) -> Planted:
    server = valkey(folder, running)
    return Planted({"type": "resp", "host": LOOPBACK, "port": server.port, "password": PASSWORD}, (PASSWORD,))


def resp_by_url(folder: Path, running: ExitStack) -> Planted:
    server = valkey(folder, running)
    return Planted({"type": "resp", "url": f"redis://:{PASSWORD}@{LOOPBACK}:{server.port}"}, (PASSWORD,))


def resp_by_url_with_spaces(folder: Path, running: ExitStack) -> Planted:
    """In a URL spaces may stand as they are."""
    server = valkey(folder, running, ODD_PASSWORD)
    written = quote(ODD_PASSWORD, safe=" ")
    adapter = {"type": "resp", "url": f"redis://:{written}@{LOOPBACK}:{server.port}"}
    return Planted(adapter, (ODD_PASSWORD, written, "/ signs", "%2F signs"))


def resp_by_sentinel(folder: Path, running: ExitStack) -> Planted:
    """The password of Sentinels is not that of the server."""
    server = running.enter_context(Redis(folder / "redis", password=PASSWORD))
    server.wait_ready()
    sentinel = running.enter_context(Sentinel(folder / "sentinel", server, password=TOKEN))
    until(lambda: sentinel.master_port() == server.port, tell=sentinel.log)
    where = {"master": "kv", "nodes": [f"{LOOPBACK}:{sentinel.port}"], "password": TOKEN}
    return Planted({"type": "resp", "sentinel": where, "password": PASSWORD}, (PASSWORD, TOKEN))


def seaweedfs(folder: Path, running: ExitStack) -> SeaweedFS:
    server = running.enter_context(SeaweedFS(folder / "seaweedfs"))
    server.wait_ready()
    server.make_bucket("cache")
    return server


def s3(folder: Path, running: ExitStack) -> Planted:
    need_package("awscrt")
    server = seaweedfs(folder, running)
    place = {"s3_endpoint": f"{LOOPBACK}:{server.port}/cache", "s3_region": REGION, "disable_tls": True}
    keys = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY}
    return Planted({"type": "s3", **place, **keys}, (ACCESS_KEY, SECRET_KEY))


def nixl_pool(backend: str, params: dict[str, str]) -> dict[str, Any]:
    return {"type": "nixl_store", "backend": backend, "pool_size": 16, "backend_params": params}


def nixl_s3(folder: Path, running: ExitStack) -> Planted:
    nixl.need()
    params = nixl.s3_params(seaweedfs(folder, running), "cache")
    return Planted(nixl_pool("OBJ", params), (ACCESS_KEY, SECRET_KEY))


def nixl_azure(folder: Path, running: ExitStack) -> Planted:
    nixl.need()
    server = running.enter_context(Azurite(folder / "azurite"))
    server.wait_ready()
    server.make_container("cache")
    params = {"connection_string": server.connection_string, "container_name": "cache"}
    return Planted(nixl_pool("AZURE_BLOB", params), (azurite.KEY,))


def mooncake_store(folder: Path, running: ExitStack) -> Planted:
    master = running.enter_context(Master(folder))
    master.wait_ready()
    running.enter_context(Peer(folder, master)).wait_ready()
    adapter = {"type": "mooncake_store", **mooncake.setup_keys(master, 0), "auth_token": TOKEN}
    return Planted(adapter, (TOKEN,))


STARTS = [resp_by_password, resp_by_url, resp_by_url_with_spaces, resp_by_sentinel, s3]
STARTS += [nixl_s3, nixl_azure, mooncake_store]


@pytest.mark.parametrize("start", STARTS)
def test_no_secret_is_shown_and_none_by_a_crash(tmp_path: Path, start: Start) -> None:
    with ExitStack() as running:
        adapter, secrets = start(tmp_path, running)
        path = tmp_path / "server.yaml"
        path.write_text(yaml.safe_dump({"l2_adapter": [adapter]}))
        extra = ["--config", str(path)]
        server = running.enter_context(CacheServer(tmp_path, l1_size_gb=0.0625, extra=extra, environment=LOUD))
        server.wait_ready()
        with SmallEngine(server.port) as engine:
            tokens = engine.tokens(*range(CHUNKS))
            assert engine.store(tokens) == CHUNKS
            until(lambda: server.status()["l2"]["adapters"][0]["objects"] == CHUNKS)
            server.clear("l1")
            assert engine.lookup("again", tokens).chunks == CHUNKS
            seen = Path(f"/proc/{server.pid}/cmdline").read_text()
            for page in ("/config", "/status", "/metrics", "/healthcheck"):
                status, body = http_json(server.http_port, "GET", page)
                assert status == 200
                seen += json.dumps(body)
            server.signal_group(signal.SIGABRT)
            # Python writes down the stacks of threads that go on meanwhile, which may end it by another signal.
            assert server.popen.wait(30) in (-signal.SIGABRT, -signal.SIGSEGV)
        seen += server.log()
    assert adapter["type"] in seen and "Fatal Python error: Aborted" in seen
    assert not [secret for secret in secrets if secret in seen]
