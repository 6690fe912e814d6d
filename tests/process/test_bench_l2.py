"""`lmcache bench l2` on remote adapters: each beside a plain program on the same service, and nothing stays there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmcache.cli.main import main
from lmcache.testing.processes import LOOPBACK
from services import nixl
from services.certificates import Certificates
from services.redis import Redis, Valkey
from services.seaweedfs import ACCESS_KEY, REGION, SECRET_KEY, SeaweedFS

SECRET = "planted-secret"


def bench(capsys: pytest.CaptureFixture[str], adapter: dict[str, Any]) -> dict[str, Any]:
    """The figures. The text names the plain program."""
    small = ["--objects", "20", "--object-mib", "0.06", "--rounds", "2"]
    command = ["bench", "l2", "--l2-adapter", json.dumps(adapter), *small]
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


def test_s3_beside_awscrt(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("awscrt", reason="awscrt is not installed")
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
