"""`lmcache bench l2` on remote adapters: each beside a plain program on the same service, and nothing stays there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmcache.cli.main import main
from lmcache.testing.processes import LOOPBACK
from polling import until
from services import mooncake, need_package, nixl
from services.azurite import Azurite
from services.certificates import Certificates
from services.mooncake import Master, Peer
from services.redis import Redis, Sentinel, Valkey, cluster
from services.seaweedfs import ACCESS_KEY, REGION, SECRET_KEY, SeaweedFS

SECRET = "planted-secret"
SMALL = ["--objects", "20", "--object-mib", "0.06", "--rounds", "2"]


def bench(capsys: pytest.CaptureFixture[str], adapter: dict[str, Any]) -> dict[str, Any]:
    """The figures. The text names the plain program."""
    command = ["bench", "l2", "--l2-adapter", json.dumps(adapter), *SMALL]
    assert main(command) == 0, capsys.readouterr().err
    text = capsys.readouterr().out
    assert main([*command, "--format", "json"]) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)["metrics"]
    assert figures["same_bytes"] == "identical" and SECRET not in text
    for act, plain in (("store", "plain_write"), ("load", "plain_read")):
        assert figures[f"{act}_share_of_limit"] == pytest.approx(
            figures[f"{act}_mb_per_second"] / figures[f"{plain}_mb_per_second"], rel=0.05
        )
    return {**figures, "text": text}


def test_resp_beside_set_and_get(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with Valkey(tmp_path / "valkey", password=SECRET) as server:
        server.wait_ready()
        server.call("SET", "mine", "stays")
        for adapter in (
            {"type": "resp", "host": LOOPBACK, "port": server.port, "password": SECRET, "num_workers": 3},
            {"type": "resp", "url": f"unix://{server.unix_socket}", "password": SECRET, "database": 2},
        ):
            figures = bench(capsys, adapter)
            assert f"Plain SET and GET, write, {adapter.get('num_workers', 8)} connections" in figures["text"]
        assert server.keys() == ["mine"] and b"db2" not in server.call("INFO", "keyspace")


def test_resp_over_tls(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certificates")
    with Redis(tmp_path / "redis", certificates=certificates) as server:
        server.wait_ready()
        adapter = {"type": "resp", "host": LOOPBACK, "port": server.tls_port, "tls": True}
        assert "Plain SET and GET" in bench(capsys, {**adapter, "tls_ca": str(certificates.ca)})["text"]
        assert server.keys() == []


def test_resp_in_a_cluster_and_behind_sentinels(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with cluster(tmp_path / "cluster") as nodes:
        adapter = {"type": "resp", "host": LOOPBACK, "port": nodes[0].port, "cluster": True, "num_workers": 2}
        text = bench(capsys, adapter)["text"]
        assert "Plain SET and GET, write, 2 connections to each of 3 servers" in text
        assert not any(node.keys() for node in nodes)
    with Redis(tmp_path / "redis") as server:
        server.wait_ready()
        with Sentinel(tmp_path / "sentinel", server) as sentinel:
            until(lambda: sentinel.master_port() == server.port)
            named = {"master": "kv", "nodes": [f"{LOOPBACK}:{sentinel.port}"]}
            assert "Plain SET and GET" in bench(capsys, {"type": "resp", "sentinel": named})["text"]
            assert server.keys() == []


def test_mooncake_beside_its_client(tmp_path: Path) -> None:
    """In a process of its own: Mooncake's clients end for good."""
    with Master(tmp_path) as master, Peer(tmp_path, master) as peer:
        master.wait_ready()
        peer.wait_ready()
        adapter = json.dumps({"type": "mooncake_store", **mooncake.setup_keys(master, 0)})
        command = [sys.executable, "-m", "lmcache.cli.main", "bench", "l2", "--l2-adapter", adapter, *SMALL]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "Plain Mooncake, write, one batch, tcp" in done.stdout and "identical" in done.stdout


def test_nixl_object_stores_beside_plain_transfers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nixl.need()
    with SeaweedFS(tmp_path / "server") as server:
        server.wait_ready()
        server.make_bucket("shared")
        params = {**nixl.s3_params(server, "shared"), "object_prefix": "kv"}
        adapter = {"type": "nixl_store", "backend": "OBJ", "pool_size": 32, "backend_params": params}
        assert "Plain NIXL, read, OBJ, all objects at once" in bench(capsys, adapter)["text"]
        # NIXL cannot delete: what stays is below a name that no server uses.
        assert {name.rpartition("/")[0].rpartition("/")[0] for name in server.names("shared")} == {"kv/bench"}
    with Azurite(tmp_path / "azurite") as azure:
        azure.wait_ready()
        azure.make_container("cache")
        params = {"connection_string": azure.connection_string, "container_name": "cache"}
        adapter = {"type": "nixl_store", "backend": "AZURE_BLOB", "pool_size": 32, "backend_params": params}
        assert "Plain NIXL, read, AZURE_BLOB, all objects at once" in bench(capsys, adapter)["text"]


def test_s3_beside_awscrt(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    need_package("awscrt")
    with SeaweedFS(tmp_path / "server") as server:
        server.wait_ready()
        server.make_bucket("shared")
        endpoint = f"{LOOPBACK}:{server.port}/shared/folder"
        adapter = {"type": "s3", "s3_endpoint": endpoint, "s3_region": REGION, "disable_tls": True}
        adapter |= {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY}
        assert "Plain awscrt, write, 64 threads" in bench(capsys, adapter)["text"]
        assert server.names("shared") == []


@pytest.mark.parametrize("kind", ["nixl_store", "nixl_store_dynamic"])
@pytest.mark.parametrize("direct", ["true", "false"])
def test_nixl_beside_a_plain_transfer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str, direct: str
) -> None:
    nixl.need()
    params = {"file_path": str(tmp_path), "use_direct_io": direct}
    adapter: dict[str, Any] = {"type": kind, "backend": "POSIX", "backend_params": params}
    adapter |= {"pool_size": 32} if kind == "nixl_store" else {}
    how = "O_DIRECT" if direct == "true" else "page cache"
    assert f"Plain NIXL, read, POSIX, files open already, {how}" in bench(capsys, adapter)["text"]
    assert list(tmp_path.iterdir()) == []
