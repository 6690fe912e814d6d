"""Several adapters of a real server, one of them on a disk that fails."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from faults.disk import DEADLINE_SECONDS, FaultyDisk
from lmcache.core.limits import GIB, L2_BREAKER_OPEN_SECONDS
from lmcache.testing.processes import CacheServer
from polling import until
from process.support import SmallEngine, split, unpack_slots

FRAME_BYTES = 8192
CHUNKS = 30


def start_server(folder: Path, *adapters: dict[str, Any], flags: tuple[str, ...] = (), slots: int = 256) -> CacheServer:
    extra = [part for spec in adapters for part in ("--l2-adapter", json.dumps(spec))]
    return CacheServer(folder, extra=["--chunk-size", "16", *extra, *flags], l1_size_gb=slots * FRAME_BYTES / GIB)


def fs(folder: Path, **settings: Any) -> dict[str, Any]:
    return {"type": "fs", "base_path": str(folder), **settings}


def hold(server: CacheServer, objects: int, *indices: int) -> None:
    """Until these adapters have that many objects."""

    def held() -> list[int]:
        return [server.status()["l2"]["adapters"][index]["objects"] for index in indices]

    until(lambda: held() == [objects] * len(indices), DEADLINE_SECONDS, tell=held)


def hits(engine: SmallEngine, request: str, tokens: bytes) -> int:
    """Chunks, each exactly what was stored."""
    reply = engine.lookup(request, tokens, deadline_seconds=DEADLINE_SECONDS)
    assert engine.read(reply)
    engine.end(request)
    return reply.chunks


def test_a_disk_that_stands_still_costs_one_deadline(disk: FaultyDisk, tmp_path: Path) -> None:
    adapters = fs(disk.path, timeout_seconds=1, use_odirect=True), fs(tmp_path / "second"), fs(tmp_path / "third")
    with start_server(tmp_path, *adapters) as server:
        server.wait_ready()
        with SmallEngine(server.port) as engine:
            tokens = engine.tokens(*range(CHUNKS))
            assert engine.store(tokens) == CHUNKS
            hold(server, CHUNKS, 0, 1, 2)
            late = server.metric("lmcache_mp_timeouts_total")
            disk.tell(read={"stall": True})
            since = time.monotonic()
            for number in range(6):
                server.clear("l1")
                assert hits(engine, f"stalled{number}", tokens) == CHUNKS
                if number == 0:
                    assert server.status()["l2"]["adapters"][0]["loads_suspended"]
                    assert server.metric("lmcache_mp_timeouts_total") > late
            trials = (time.monotonic() - since) // L2_BREAKER_OPEN_SECONDS  # behind the back of requests
            assert server.metric("lmcache_mp_timeouts_total") <= late + 1 + trials
            _, stalled = disk.tell()
            assert stalled > 0

            def goes_on() -> bool:
                server.clear("l1")
                assert hits(engine, "well", tokens) == CHUNKS
                return not server.status()["l2"]["adapters"][0]["loads_suspended"]

            until(goes_on, DEADLINE_SECONDS, tell=server.log)
            until(lambda: server.status()["l1"]["quarantined_bytes"] == 0, DEADLINE_SECONDS, tell=server.status)
        assert server.stop() == 0, server.log()
        assert "Traceback" not in server.log()


def test_a_dead_disk_is_left_alone(disk: FaultyDisk, tmp_path: Path) -> None:
    with start_server(tmp_path, fs(disk.path), fs(tmp_path / "second")) as server:
        server.wait_ready()
        with SmallEngine(server.port) as engine:
            tokens = engine.tokens(*range(CHUNKS))
            assert engine.store(tokens) == CHUNKS
            hold(server, CHUNKS, 0, 1)
            disk.tell(**{operation: {"error": "EIO"} for operation in ("read", "write", "open", "create", "lookup")})
            for number in range(8):
                server.clear("l1")
                assert hits(engine, f"dead{number}", tokens) == CHUNKS
                assert engine.store(engine.tokens(1000 + number)) == 1
            hold(server, CHUNKS + 8, 1)
            adapter = server.status()["l2"]["adapters"][0]
            assert adapter["loads_suspended"] and adapter["stores_suspended"]
            disk.tell()
        assert server.stop() == 0, server.log()
        assert "Traceback" not in server.log()


def test_a_prefix_comes_from_several_kinds_of_adapters(tmp_path: Path) -> None:
    """Each holds another part of it, none a whole prefix."""
    for name in ("raw", "dax"):
        (tmp_path / name).touch()
    with (tmp_path / "raw").open("r+b") as file:
        file.truncate(4 << 20)
    slots = {"slot_bytes": FRAME_BYTES}
    kinds = (
        {"type": "raw_block", "device_path": str(tmp_path / "raw"), "meta_total_bytes": 65536, **slots},
        {"type": "dax", "device_path": str(tmp_path / "dax"), "max_dax_size_gb": 4 / 1024, **slots},
        fs(tmp_path / "files"),
    )
    for number, kind in enumerate(kinds):
        with start_server(tmp_path, kind) as server:
            server.wait_ready()
            with SmallEngine(server.port) as engine:
                own = split(engine.hashes(engine.tokens(*range(CHUNKS))))[number::3]
                reply = engine.reserve(b"".join(own))
                engine.fill(b"".join(own), unpack_slots(reply.slots))
                assert engine.commit(reply.reservation) == CHUNKS // 3
                hold(server, CHUNKS // 3, 0)
            assert server.stop() == 0, server.log()
    with start_server(tmp_path, *kinds) as server:
        server.wait_ready()
        with SmallEngine(server.port) as engine:
            hold(server, CHUNKS // 3, 0, 1, 2)
            assert hits(engine, "all", engine.tokens(*range(CHUNKS))) == CHUNKS
        assert server.stop() == 0, server.log()


def filled(server: CacheServer, adapter: int) -> float:
    """Part of an adapter's capacity."""
    status = server.status()["l2"]["adapters"][adapter]
    return float(status["used_bytes"] / status["capacity_bytes"])


def test_a_disk_that_does_not_delete_holds_up_neither_l1_nor_the_other_adapter(
    disk: FaultyDisk, tmp_path: Path
) -> None:
    """Each tier is above its watermark, and the first adapter's deletes stand still."""
    evicting = {
        "max_capacity_gb": 64 * FRAME_BYTES / GIB,
        "eviction": {"eviction_policy": "LRU", "trigger_watermark": 0.6, "eviction_ratio": 0.5},
    }
    flags = ("--eviction-trigger-watermark", "0.5")
    with start_server(
        tmp_path, fs(disk.path, **evicting), fs(tmp_path / "second", **evicting), flags=flags, slots=128
    ) as server:
        server.wait_ready()
        disk.tell(unlink={"stall": True})
        with SmallEngine(server.port) as engine:
            assert engine.store(engine.tokens(*range(40))) == 40
            until(lambda: filled(server, 0) > 0.6, 10, tell=server.status)
            for number in range(1, 4):
                engine.store(engine.tokens(*range(100 * number, 100 * number + 30)))
                until(lambda: server.status()["l1"]["objects"] <= 64, 10, tell=server.status)
                until(lambda: filled(server, 1) <= 0.6, 10, tell=server.status)
            assert disk.tell()[1] > 0
            until(lambda: filled(server, 0) <= 0.6, DEADLINE_SECONDS, tell=server.status)
        assert server.stop() == 0, server.log()
        assert "Traceback" not in server.log()


@pytest.mark.parametrize("fault", ["EIO", "ENOSPC"])
def test_what_a_failing_disk_did_not_take_stays_in_l1_and_is_stored_later(
    disk: FaultyDisk, tmp_path: Path, fault: str
) -> None:
    flags = ("--eviction-policy", "noop", "--l2-store-policy", "skip_l1")
    with start_server(tmp_path, fs(disk.path), flags=flags, slots=512) as server:
        server.wait_ready()
        with SmallEngine(server.port) as engine:
            prompts = [engine.tokens(*range(100 * number, 100 * number + 40)) for number in range(6)]
            assert engine.store(prompts[0]) == 40
            until(lambda: server.status()["l1"]["objects"] == 0, DEADLINE_SECONDS, tell=server.status)
            disk.tell(write={"error": fault}, create={"error": fault})
            for tokens in prompts[1:]:
                assert engine.store(tokens) == 40
            until(lambda: server.metric("lmcache_mp_l2_store_unstored") == 200, DEADLINE_SECONDS, tell=server.status)
            assert server.metric("lmcache_mp_l2_store_lost_chunks_total") == 0
            assert [hits(engine, f"r{number}", tokens) for number, tokens in enumerate(prompts)] == [40] * 6
            disk.tell()
            until(lambda: server.status()["l1"]["objects"] == 0, DEADLINE_SECONDS, tell=server.status)
            assert server.metric("lmcache_mp_l2_store_unstored") == 0
            assert server.metric("lmcache_mp_l2_store_lost_chunks_total") == 0
            assert server.status()["l2"]["adapters"][0]["objects"] == 6 * 40
            assert [hits(engine, f"s{number}", tokens) for number, tokens in enumerate(prompts)] == [40] * 6
            status = server.status()["l1"]
            assert (status["leases"], status["staged"], status["quarantined_bytes"]) == (0, 0, 0)
        assert server.stop() == 0, server.log()
        assert "Traceback" not in server.log()


@pytest.mark.parametrize("policy", ["noop", "LRU"])
def test_skip_l1_neither_leaks_nor_loses_in_silence(disk: FaultyDisk, tmp_path: Path, policy: str) -> None:
    """Where L2 takes nothing for long, there is room for what is new all the same, and what went for it is counted."""
    flags = ("--eviction-policy", policy, "--l2-store-policy", "skip_l1", "--eviction-trigger-watermark", "0.3")
    with start_server(tmp_path, fs(disk.path), flags=flags, slots=128) as server:
        server.wait_ready()
        with SmallEngine(server.port) as engine:
            disk.tell(write={"error": "EIO"}, create={"error": "EIO"})
            acknowledged = 0
            for number in range(6):
                acknowledged += engine.store(engine.tokens(*range(100 * number, 100 * number + 40)))
                until(lambda: server.status()["l1"]["objects"] <= 0.3 * 128, DEADLINE_SECONDS, tell=server.status)
            assert acknowledged == 6 * 40  # there always was room

            def lost() -> int:
                return int(server.metric("lmcache_mp_l2_store_lost_chunks_total"))

            until(lambda: lost() + server.status()["l1"]["objects"] == acknowledged, DEADLINE_SECONDS, tell=lost)
            until(lambda: "objects were lost" in server.log())
            kept = acknowledged - lost()
            disk.tell()
            until(lambda: server.status()["l1"]["objects"] == 0, DEADLINE_SECONDS, tell=server.status)
            assert server.status()["l2"]["adapters"][0]["objects"] == kept
            assert acknowledged - lost() == kept
        assert server.stop() == 0, server.log()
        assert "Traceback" not in server.log()


def test_a_server_whose_disk_stands_still_does_not_start(disk: FaultyDisk, tmp_path: Path) -> None:
    disk.tell(create={"stall": True}, mkdir={"stall": True})
    with start_server(tmp_path, fs(disk.path, timeout_seconds=2)) as server:
        until(lambda: "the backend did not answer within 2 s" in server.log(), DEADLINE_SECONDS, tell=server.log)
        assert disk.tell()[1] > 0  # the kernel lets no process go before a FUSE file system has answered it
        assert server.popen.wait(DEADLINE_SECONDS) == 1
        assert len(server.log().splitlines()) == 1, server.log()


@pytest.mark.slow  # it waits for the disk, in vain
@pytest.mark.parametrize("stalls", ["write", "lookup"])
def test_a_server_whose_disk_stands_still_ends_all_the_same(disk: FaultyDisk, tmp_path: Path, stalls: str) -> None:
    with start_server(tmp_path, fs(disk.path), fs(tmp_path / "second")) as server:
        server.wait_ready()
        with SmallEngine(server.port) as engine:
            tokens = engine.tokens(*range(CHUNKS))
            disk.tell(**{stalls: {"stall": True}})
            assert engine.store(tokens) == CHUNKS
            hold(server, CHUNKS, 1)
        server.popen.terminate()
        until(lambda: "Stopped" in server.log(), DEADLINE_SECONDS, tell=server.log)
        assert disk.tell()[1] > 0
        assert server.popen.wait(DEADLINE_SECONDS) == 1
        assert "Traceback" not in server.log()
