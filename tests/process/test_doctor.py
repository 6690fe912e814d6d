"""`lmcache doctor` beside a real server, and with the options of one whose backend is dead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmcache.cli.main import main
from lmcache.testing.processes import CacheServer, free_port
from process.support import SmallEngine


def doctor(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the checks by their names."""
    code = main(["doctor", "--skip-import", "--format", "json", *words])
    return code, {check["name"]: check for check in json.loads(capsys.readouterr().out)["metrics"]["checks"]}


def test_a_running_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with CacheServer(tmp_path, l1_size_gb=0.0625, l2_folder=tmp_path / "l2") as server:
        server.wait_ready()
        url = f"http://127.0.0.1:{server.http_port}"
        code, checks = doctor(capsys, "--url", url)
        assert code == 0
        assert (
            checks[f"server {url}"]["level"] == checks["versions"]["level"] == checks["chunk hashes"]["level"] == "ok"
        )
        assert checks["engines"]["found"] == "none is registered"
        (adapter,) = server.status()["l2"]["adapters"]
        assert checks[f"adapter {adapter['name']}"]["level"] == "ok"
        with SmallEngine(server.port, instance_id="engine-a"):
            assert doctor(capsys, "--url", url)[1]["engine engine-a"]["level"] == "ok"
    code, checks = doctor(capsys, "--url", url, "--timeout", "2")
    assert code == 1
    assert "is the server running there?" in checks[f"server {url}"]["found"]


def test_options_whose_backend_is_dead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = json.dumps({"type": "resp", "host": "127.0.0.1", "port": free_port()})
    words = ("--l1-size-gb", "0.1", "--eviction-policy", "LRU", "--port", "0", "--http-port", "0")
    words = (*words, "--prometheus-port", "0", "--l2-adapter", adapter)
    code, checks = doctor(capsys, *words)
    assert code == 1
    assert "does not answer" in checks["options"]["details"][0]
    assert not any(name.startswith("port ") for name in checks)
