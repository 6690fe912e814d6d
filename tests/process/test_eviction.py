"""Eviction policies of a real server: quotas of tenants, ages as metrics, the lookup log and its simulator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache.core.limits import GIB
from lmcache.testing.processes import CacheServer, http_json
from polling import until
from process.support import SmallEngine

FRAME_BYTES = 8192


def quota(server: CacheServer, method: str, salt: str, limit_bytes: int | None = None) -> dict[str, object]:
    body = None if limit_bytes is None else {"limit_gb": limit_bytes / GIB}
    status, answer = http_json(server.http_port, method, f"/quota/{salt}", body)
    assert status == 200 and isinstance(answer, dict), answer
    return answer


def is_in_l1(server: CacheServer, salt: str, chunks: int) -> bool:
    return quota(server, "GET", salt)["current_usage_gb"] == chunks * FRAME_BYTES / GIB


def test_tenants_keep_to_their_quotas(tmp_path: Path) -> None:
    with CacheServer(tmp_path, extra=("--eviction-policy", "IsolatedLRU"), l1_size_gb=0.0625) as server:
        server.wait_ready()
        with SmallEngine(server.port) as engine:
            assert engine.store(engine.tokens(1, 2), salt="a") == 2  # nobody gave it a quota
            until(lambda: quota(server, "GET", "a")["current_usage_gb"] == 0)
            assert quota(server, "PUT", "a", 3 * FRAME_BYTES)["enforced"] is True
            quota(server, "PUT", "_default", 100 * FRAME_BYTES)
            assert engine.store(engine.tokens(1, 2), salt="a") == 2
            assert engine.store(engine.tokens(*range(50, 90))) == 40
            assert engine.store(engine.tokens(5, 6), salt="a") == 2
            until(lambda: quota(server, "GET", "a")["current_usage_gb"] == 3 * FRAME_BYTES / GIB)  # an older one went
            reply = engine.lookup("r", engine.tokens(5, 6), salt="a")
            assert reply.chunks == 2 and engine.read(reply, salt="a")
            engine.end("r")
            assert engine.lookup("s", engine.tokens(*range(50, 90))).chunks == 40  # the other tenant lost nothing
            engine.end("s")
            quota(server, "DELETE", "a")
            assert quota(server, "GET", "a") == {
                "cache_salt": "a",
                "limit_gb": 0.0,
                "current_usage_gb": 0.0,
                "exists": False,
                "enforced": True,
            }
            assert engine.lookup("t", engine.tokens(5, 6), salt="a").chunks == 0
            engine.end("t")
        assert server.stop() == 0, server.log()
        assert "Traceback" not in server.log()
        assert server.log().count("Cache salt 'a' has no quota") == 1


def test_what_is_beyond_a_quota_passes_through_to_l2(tmp_path: Path) -> None:
    flags = ["--eviction-policy", "IsolatedLRU"]
    with CacheServer(tmp_path, extra=flags, l1_size_gb=0.0625, l2_folder=tmp_path / "l2") as server:
        server.wait_ready()
        quota(server, "PUT", "small", 4 * FRAME_BYTES)
        with SmallEngine(server.port) as engine:
            for salt, kept in (("none", 0), ("small", 4)):
                tokens = engine.tokens(*range(10))
                assert engine.store(tokens, salt=salt) == 10
                until(
                    lambda salt=salt, kept=kept: (
                        quota(server, "GET", salt)["current_usage_gb"] == kept * FRAME_BYTES / GIB
                    )
                )
                for _ in range(2):  # from L2, as what came from there for one request is beyond the quota as well
                    reply = engine.lookup("r", tokens, salt=salt)
                    assert (reply.chunks, reply.chunks_l1) == (10, kept)
                    assert engine.read(reply, salt=salt)
                    engine.end("r")
                    until(
                        lambda salt=salt, kept=kept: (
                            quota(server, "GET", salt)["current_usage_gb"] <= kept * FRAME_BYTES / GIB
                        )
                    )
        assert server.stop() == 0, server.log()
        log = server.log()
    assert log.count("Cache salt 'none' has no quota") == 1 == log.count("Cache salt 'small' goes beyond its quota")


def test_who_keeps_to_a_quota_loses_nothing_to_who_does_not(tmp_path: Path) -> None:
    """L1 is smaller than what a tenant without a quota stores."""
    flags = ["--eviction-policy", "IsolatedLRU"]
    with CacheServer(tmp_path, extra=flags, l1_size_gb=100 * FRAME_BYTES / GIB) as server:
        server.wait_ready()
        quota(server, "PUT", "good", 60 * FRAME_BYTES)
        with SmallEngine(server.port) as engine:
            tokens = engine.tokens(*range(60))
            assert engine.store(tokens, salt="good") == 60
            stored = 0
            for first in range(1000, 1400, 20):
                stored += engine.store(engine.tokens(*range(first, first + 20)), salt="guest")
            assert stored > 300  # each had room, at the cost of what the guest had stored before
            reply = engine.lookup("r", tokens, salt="good")
            assert reply.chunks == 60 and engine.read(reply, salt="good")
            engine.end("r")
            until(lambda: quota(server, "GET", "guest")["current_usage_gb"] == 0)
            assert engine.lookup("s", tokens, salt="good").chunks == 60
            engine.end("s")
        assert server.stop() == 0, server.log()


def test_quotas_outlive_the_server_and_come_before_what_it_recovers(tmp_path: Path) -> None:
    file, name = tmp_path / "quotas.json", f"lmcache-test-{os.getpid()}-quotas"
    flags = ["--eviction-policy", "IsolatedLRU", "--quota-file", str(file), "--l1-persist"]
    try:
        with CacheServer(tmp_path, extra=flags, l1_size_gb=0.0625, shm_name=name) as server:
            server.wait_ready()
            quota(server, "PUT", "a", 8 * FRAME_BYTES)
            quota(server, "PUT", "b", 8 * FRAME_BYTES)
            quota(server, "PUT", "c", 8 * FRAME_BYTES)
            quota(server, "DELETE", "c")
            with SmallEngine(server.port) as engine:
                for salt in "ab":
                    assert engine.store(engine.tokens(*range(6)), salt=salt) == 6
            server.kill()
        assert json.loads(file.read_text()) == {"a": 8 * FRAME_BYTES / GIB, "b": 8 * FRAME_BYTES / GIB}
        file.write_text(json.dumps({"a": 8 * FRAME_BYTES / GIB, "b": 4 * FRAME_BYTES / GIB}))  # by its operator
        with CacheServer(tmp_path, extra=flags, l1_size_gb=0.0625, shm_name=name, log_name="second.log") as server:
            server.wait_ready()
            quota(server, "PUT", "c", FRAME_BYTES)
            with SmallEngine(server.port) as engine:
                for salt, chunks in (("a", 6), ("b", 4)):
                    reply = engine.lookup(salt, engine.tokens(*range(6)), salt=salt)
                    assert reply.chunks == chunks and engine.read(reply, salt=salt)
                    engine.end(salt)
            assert server.stop() == 0, server.log()
            assert "Traceback" not in server.log()
    finally:
        Path("/dev/shm", name).unlink(missing_ok=True)


@pytest.mark.parametrize("policy", ["LRU", "S3FIFO"])
def test_ages_are_metrics_and_lookups_can_be_simulated(tmp_path: Path, policy: str) -> None:
    logs = tmp_path / "lookups"
    flags = ["--eviction-policy", policy, "--metrics-sample-rate", "1", "--lookup-hash-log-dir", str(logs)]
    flags += ["--eviction-trigger-watermark", "1"]  # room is made when asked for, never in the background
    with CacheServer(tmp_path, extra=flags, l1_size_gb=64 * FRAME_BYTES / GIB) as server:
        server.wait_ready()
        with SmallEngine(server.port) as engine:
            for start in range(100, 300, 20):
                tokens = engine.tokens(*range(start, start + 20))
                engine.lookup(f"r{start}", tokens)
                engine.store(tokens)
                engine.end(f"r{start}")
            tokens = engine.tokens(*range(280, 300))
            assert engine.lookup("again", tokens).chunks == 20
            engine.end("again")
            assert server.metric("lmcache_mp_l1_chunk_reuse_gap_seconds_count") == 20
            evicted = server.metric("lmcache_mp_l1_evicted_chunks_total")
            assert evicted >= 200 - 64
            assert server.metric("lmcache_mp_l1_chunk_lifetime_seconds_count") == evicted
        assert server.stop() == 0, server.log()
    command = [sys.executable, "-m", "lmcache.cli.main", "tool", "cache-simulator", str(logs), "--format", "json"]
    command += ["--policy", policy, "--size-gb", "1", "--chunk-mb", "1"]
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["metrics"]
    assert (report["lookups"], report["requested_chunks"]) == (11, 220)
    assert report["results"][0]["hit_rate"] == report["ceiling"] == 20 / 220
