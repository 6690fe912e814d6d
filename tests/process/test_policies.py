"""A real server with policies of the operator: the example of the guide, selected by its flags."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache.testing.processes import CacheServer
from polling import until
from process.support import SmallEngine

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "write-a-policy.md"
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
FAULTY = """
class Faulty:
    drops_from_l1 = retains = False
    def targets(self, keys, adapters):
        return [[7]] * len(keys)
    def order(self, namespaces, adapters):
        raise OSError("no table of tenants")
"""
CHUNKS = 20


def folders(path: Path) -> list[str]:
    spec = [json.dumps({"type": "fs_native", "base_path": str(path / name)}) for name in ("first", "second")]
    return ["--l2-adapter", spec[0], "--l2-adapter", spec[1]]


def objects(server: CacheServer) -> list[int]:
    return [adapter["objects"] for adapter in server.status()["l2"]["adapters"]]


def store_and_load(server: CacheServer, salt: str, held: list[int]) -> None:
    with SmallEngine(server.port) as engine:
        tokens = engine.tokens(*range(CHUNKS))
        assert engine.store(tokens, salt=salt) == CHUNKS
        until(lambda: objects(server) == held, tell=lambda: objects(server))
        server.clear("l1")
        reply = engine.lookup("request", tokens, salt=salt, deadline_seconds=20.0)
        assert reply.chunks == CHUNKS and engine.read(reply, salt=salt)
        engine.end("request")


def test_the_guides_policies_decide(tmp_path: Path) -> None:
    (tmp_path / "tenant_policies.py").write_text(EXAMPLE)
    flags = ["--l2-store-policy", "tenant_policies:keep_private", "--l2-prefetch-policy", "tenant_policies:InTurns"]
    extra = ["--chunk-size", "16", *flags, *folders(tmp_path)]
    with CacheServer(tmp_path, l1_size_gb=0.0625, extra=extra, environment={"PYTHONPATH": str(tmp_path)}) as server:
        server.wait_ready()
        store_and_load(server, "bank", [CHUNKS, 0])
        store_and_load(server, "", [2 * CHUNKS, CHUNKS])
        assert server.stop() == 0, server.log()
        assert "Traceback" not in server.log() and "policy" not in server.log()


def test_faulty_policies_stop_nothing(tmp_path: Path) -> None:
    (tmp_path / "faulty_policies.py").write_text(FAULTY)
    name = f"{tmp_path}/faulty_policies.py:Faulty"
    extra = ["--chunk-size", "16", "--l2-store-policy", name, "--l2-prefetch-policy", name, *folders(tmp_path)]
    with CacheServer(tmp_path, l1_size_gb=0.0625, extra=extra) as server:
        server.wait_ready()
        store_and_load(server, "", [CHUNKS, CHUNKS])
        store_and_load(server, "bank", [2 * CHUNKS, 2 * CHUNKS])
        assert server.metric('lmcache_mp_policy_faults_total{policy="store"}') >= 2
        assert server.metric('lmcache_mp_policy_faults_total{policy="prefetch"}') == 2
        assert server.stop() == 0, server.log()
        said = [line for line in server.log().splitlines() if "the default decides whenever that happens" in line]
        assert len(said) == 2, said
        assert "targets() named the adapter 7; there are 2, counted from 0" in said[0]
        assert "OSError: no table of tenants" in said[1]


@pytest.mark.parametrize("flag", ["--l2-store-policy", "--l2-prefetch-policy"])
def test_the_check_of_a_configuration_names_the_flag(tmp_path: Path, flag: str) -> None:
    (tmp_path / "half.py").write_text("class Half:\n    drops_from_l1 = retains = False\n")
    command = [
        sys.executable,
        "-m",
        "lmcache.cli.main",
        "config",
        "check",
        "--l1-size-gb",
        "1",
        "--eviction-policy",
        "LRU",
    ]
    done = subprocess.run([*command, flag, f"{tmp_path}/half.py:Half"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(f"lmcache: {flag}: Half has no usable "), done.stderr
    assert len(done.stderr.splitlines()) == 1
