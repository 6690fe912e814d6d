"""Cache servers that share one Redis: what one stored the other hits, under one capacity, and no secret is shown."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lmcache.clock import SystemClock
from lmcache.core.key import ObjectKey
from lmcache.core.outcome import HELD, LoadOutcome
from lmcache.l2.adapter_types import build, parse_adapter
from lmcache.l2.runner import Runner
from lmcache.telemetry.metrics import Metrics
from lmcache.testing.frames import FrameMemory, keys
from lmcache.testing.processes import LOOPBACK, CacheServer
from polling import until
from process.support import SmallEngine
from services.redis import Redis, Valkey

SECRET = "planted-secret"
PAYLOAD_BYTES = 61_440
FRAME_BYTES = PAYLOAD_BYTES + 4096
CAPACITY_GB = 4 * 2**20 / 2**30


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    with Valkey(tmp_path / "valkey", password=SECRET) as server:
        server.wait_ready()
        yield server


async def open_runner(server: Valkey) -> Runner:
    spec = {"type": "resp", "host": LOOPBACK, "port": server.port, "password": SECRET, "max_capacity_gb": CAPACITY_GB}
    spec["eviction"] = {"eviction_policy": "LRU", "trigger_watermark": 0.9, "eviction_ratio": 0.3}
    runner = Runner(build(parse_adapter(spec, 0)), Metrics().l2, SystemClock(), rng=random.Random(1))
    await runner.open()
    assert await runner.wait_for_inventory(20)
    return runner


async def stored(runner: Runner, wanted: list[ObjectKey]) -> None:
    memory = FrameMemory(len(wanted), PAYLOAD_BYTES)
    outcomes = await runner.store(wanted, [memory.fill(slot, key) for slot, key in enumerate(wanted)], lambda: None)
    assert set(outcomes) <= set(HELD)


def test_a_capacity_is_kept_by_eviction_and_a_new_server_goes_on_with_it(valkey: Valkey) -> None:
    limit_bytes = round(CAPACITY_GB * 2**30)

    async def whole() -> None:
        first = await open_runner(valkey)
        for seed in range(20):
            await stored(first, keys(8, seed=seed))
            assert valkey.call("DBSIZE") * FRAME_BYTES <= limit_bytes
        target = FrameMemory(8, PAYLOAD_BYTES)
        assert await first.load(keys(8, seed=19), target.buffers, lambda: None) == [LoadOutcome.LOADED] * 8
        assert all(target.holds(slot, key) for slot, key in enumerate(keys(8, seed=19)))
        assert not any(await first.probe(keys(8, seed=0)))
        held = first.ledger.held_bytes
        first.check_idle()
        assert await first.drain(10) and await first.close(10)
        other = await open_runner(valkey)
        assert other.ledger.held_bytes == held
        for seed in range(20, 30):
            await stored(other, keys(8, seed=seed))
            assert valkey.call("DBSIZE") * FRAME_BYTES <= limit_bytes
        objects = valkey.call("DBSIZE")
        assert await other.clear() == (objects, objects * FRAME_BYTES)
        assert valkey.call("DBSIZE") == len(other.ledger) == 0
        assert await other.drain(10) and await other.close(10)

    asyncio.run(whole())


def resp_server(folder: Path, name: str, valkey: Valkey, password_file: Path) -> CacheServer:
    adapter = {"type": "resp", "host": LOOPBACK, "port": valkey.port}
    return CacheServer(
        folder,
        l1_size_gb=0.0625,
        extra=["--l2-adapter", json.dumps(adapter)],
        environment={"LMCACHE_RESP_PASSWORD_FILE": str(password_file), "LMCACHE_LOG_LEVEL": "DEBUG"},
        log_name=f"{name}.log",
    )


def in_l2(server: CacheServer, objects: int) -> bool:
    (adapter,) = server.status()["l2"]["adapters"]
    return bool(adapter["objects"] >= objects and not adapter["stores_in_flight"])


def test_what_one_server_stored_the_other_hits_and_no_secret_is_shown(tmp_path: Path, valkey: Valkey) -> None:
    password_file = tmp_path / "password"
    password_file.write_text(SECRET + "\n")
    with ExitStack() as stack:
        servers = [stack.enter_context(resp_server(tmp_path, name, valkey, password_file)) for name in ("one", "other")]
        for server in servers:
            server.wait_ready()
        first, other = (stack.enter_context(SmallEngine(server.port)) for server in servers)
        for salt in ("a", "b"):
            assert first.store(first.tokens(1, 2, 3), salt=salt) == 3
        until(lambda: in_l2(servers[0], 6))
        found = other.lookup("r", other.tokens(1, 2, 3), salt="a")
        assert found.chunks == 3 and other.read(found, salt="a") and not other.read(found, salt="b")
        other.end("r")
        # Both at once on the same prompt.
        for engine in (first, other):
            engine.store(engine.tokens(7, 8), salt="a")
        until(lambda: in_l2(servers[0], 8) and in_l2(servers[1], 5))
        for server in servers:
            server.clear("l1")
        for engine in (first, other):
            found = engine.lookup("s", engine.tokens(7, 8), salt="a")
            assert found.chunks == 2 and engine.read(found, salt="a")
            engine.end("s")
            assert engine.lookup("t", engine.tokens(7, 8), salt="c").chunks == 0
        valkey.kill()  # misses, and the server goes on
        servers[1].clear("l1")
        assert other.lookup("u", other.tokens(1, 2, 3), salt="a").chunks == 0
        other.end("u")
        assert other.store(other.tokens(5), salt="a") == 1 and other.lookup("v", other.tokens(5), salt="a").chunks == 1
        for server in servers:
            shown: list[Any] = [
                server.ask(server.http_port, "GET", path) for path in ("/config", "/status", "/metrics")
            ]
            shown += [server.log(), Path(f"/proc/{server.pid}/cmdline").read_bytes().decode()]
            assert "resp" in str(shown) and SECRET not in str(shown)


def test_the_order_of_use_is_unknown_where_the_server_counts_uses(tmp_path: Path) -> None:
    with Redis(tmp_path / "redis", settings=["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lfu"]) as server:
        server.wait_ready()

        async def life() -> int:
            spec = {"type": "resp", "host": LOOPBACK, "port": server.port}
            runner = Runner(build(parse_adapter(spec, 0)), Metrics().l2, SystemClock(), rng=random.Random(1))
            await runner.open()
            assert await runner.wait_for_inventory(20)
            await stored(runner, keys(3))
            known = len(runner.ledger)
            await runner.close(10)
            return known

        assert asyncio.run(life()) == 3
        assert asyncio.run(life()) == 3
