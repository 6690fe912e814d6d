"""Mixed traffic for a while: memory stays flat, and in the end nothing is held for anybody.

TEST_SOAK_SECONDS sets how long (a minute unless set; see `make soak`). One engine maps the memory, one uses the
socket, and a third is killed and started again all the time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lmcache.testing.processes import CacheServer
from polling import until
from process.memory_watch import MemoryWatch, private_bytes

SECONDS = float(os.environ.get("TEST_SOAK_SECONDS", "60"))
L1_GB = 0.008  # 250 of the 480 objects of a salt, of which there are three
L2 = {"type": "fs_native", "max_capacity_gb": 0.02, "eviction": {"eviction_policy": "LRU"}}
LIFE_SECONDS = 5.0
SCRIPT = Path(__file__).with_name("soak_engine.py")


class EngineProcess:
    def __init__(self, server: CacheServer, name: str, seed: int, mode: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(server.port), name, str(seed), mode],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(SCRIPT.parents[1])])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def leave(self) -> dict[str, int]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        did = json.loads(self._line())
        self.process.communicate()
        return dict(did)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_memory_is_flat_and_nothing_stays_held(tmp_path: Path) -> None:
    adapter = json.dumps({**L2, "base_path": str(tmp_path / "l2")})
    with CacheServer(tmp_path, l1_size_gb=L1_GB, extra=["--l2-adapter", adapter]) as server:
        server.wait_ready()
        shm = Path("/dev/shm") / server.shm_name
        steady = [EngineProcess(server, "mapped", 1, "auto"), EngineProcess(server, "socket", 2, "socket")]
        watch = MemoryWatch(
            server=lambda: private_bytes(server.pid),
            mapped=lambda: private_bytes(steady[0].process.pid),
            socket=lambda: private_bytes(steady[1].process.pid),
            shared=lambda: shm.stat().st_blocks * 512,
        )
        began = time.monotonic()
        starts = 0
        while time.monotonic() < began + SECONDS:
            starts += 1
            mortal = EngineProcess(server, "mortal", 100 + starts, "auto")
            born = time.monotonic()
            while time.monotonic() < min(born + LIFE_SECONDS, began + SECONDS):
                watch.sample()
                time.sleep(0.25)
            mortal.kill()
        did = [engine.leave() for engine in steady]
        until(lambda: not held(server), 90.0, tell=lambda: held(server))
        print(watch.check(), f"{starts} engines killed", *did, sep="\n")
        for counts in did:
            assert not any(name.startswith("ended by") for name in counts), counts
            assert counts["wrong"] == counts["calls without an answer"] == 0
            assert counts["chunks hit"] > 0
        status = server.status()
        assert status["l1"]["evicted_objects"] > 0
        assert server.metric("lmcache_mp_lookup_hit_l2_tokens_total") > 0
        assert server.stop() == 0
    assert not shm.exists()


def held(server: CacheServer) -> dict[str, Any]:
    status = server.status()
    counters = {name: status[name] for name in ("instances", "sessions", "session_bytes", "leases", "reservations")}
    for name in ("leases", "leased_objects", "reservations", "staged", "quarantined_bytes"):
        counters["l1 " + name] = status["l1"][name]
    for number, adapter in enumerate(status["l2"]["adapters"]):
        counters[f"l2 {number} stores"] = adapter["stores_in_flight"]
    return {name: value for name, value in counters.items() if value}
