"""A salt a user, for months: what was looked up is not remembered, what was stored is remembered while it is there."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache import _native
from lmcache.client import Client
from lmcache.core.frame import header_template
from lmcache.core.key import Namespace
from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.protocol import messages as m
from lmcache.testing.processes import CacheServer
from polling import until
from process.memory_watch import MIB, private_bytes
from process.support import CALL_SECONDS, SmallEngine, unpack_slots

SALTS = int(os.environ.get("TEST_SALTS", "60000"))
STORES = 2000  # as many of them store a chunk, too
WARM_SALTS = 15_000
GROUPS = 6
PAYLOAD_BYTES = 64
CALLS_AT_ONCE = 256
LAYOUTS = [f"{group:032x}" for group in range(GROUPS)]
CHUNK_TOKENS = 16
HEARTBEAT_SECONDS = 600.0  # none while a test runs: one that a busy machine answers late ends all calls
FOLDER_SALTS = 4000  # of which the empty folders alone took all of SMALL_FOLDER_GB where they stayed
SMALL_FOLDER_GB = 0.03
OWN_FOLDERS = {".lmcache", "quarantine"}
MOST_GROWTH_BYTES = 16 * MIB  # what 8,000 salts of six namespaces take where each is remembered


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    device = tmp_path / "device"
    with device.open("wb") as file:
        file.truncate(64 * MIB)
    adapter = {
        "type": "raw_block",
        "device_path": str(device),
        "slot_bytes": 8192,
        "meta_total_bytes": 4 * MIB,
        "max_capacity_gb": 0.05,
        "eviction": {"eviction_policy": "IsolatedLRU", "trigger_watermark": 0.8, "eviction_ratio": 0.2},
    }
    extra = ["--eviction-policy", "IsolatedLRU", "--chunk-size", str(CHUNK_TOKENS), "--l2-adapter", json.dumps(adapter)]
    with CacheServer(tmp_path, l1_size_gb=0.0625, extra=extra) as server:
        server.wait_ready()
        yield server


class Users:
    """An engine that sees every salt once."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.tokens = bytes(4 * 2 * CHUNK_TOKENS)
        self.waiting: deque[Any] = deque()
        client.register(m.RegisterInstance("engine", "model", 1, GROUPS, HEARTBEAT_SECONDS, "users"), CALL_SECONDS)
        worker = m.RegisterWorker("engine", 0, 0, LAYOUTS, [PAYLOAD_BYTES] * GROUPS, True, HEARTBEAT_SECONDS)
        client.register(worker, CALL_SECONDS)

    def send(self, method: str, message: Any) -> None:
        self.waiting.append(self.client.submit(method, message, CALL_SECONDS))
        while len(self.waiting) > CALLS_AT_ONCE:
            self.waiting.popleft().result()

    def look_up(self, user: int) -> None:
        self.send("lookup", m.Lookup("engine", f"request {user}", f"user {user}", 0, self.tokens, deadline_seconds=0.0))
        self.send("end_session", m.EndSession("engine", f"request {user}"))

    def store(self, user: int) -> int:
        salt, chunk_hash = f"user {user}", user.to_bytes(32, "little")
        reply = self.client.call("reserve", m.Reserve("engine", 0, salt, chunk_hash), CALL_SECONDS)
        memory = self.client.memory
        assert memory is not None
        for group, slot in enumerate(unpack_slots(reply.slots)):
            template = header_template(Namespace("model", 1, 0, group, LAYOUTS[group], salt), PAYLOAD_BYTES)
            memory.view(slot + FRAME_HEADER_BYTES, PAYLOAD_BYTES)[:] = self.payload(user)
            _native.frame_seal(memory.address + slot, template, chunk_hash)
        return int(self.client.call("commit", m.Commit("engine", 0, reply.reservation, b""), CALL_SECONDS).committed)

    @staticmethod
    def payload(user: int) -> bytes:
        return user.to_bytes(8, "little") * (PAYLOAD_BYTES // 8)

    def end(self) -> None:
        while self.waiting:
            self.waiting.popleft().result()


def test_the_memory_for_salts_is_bounded(server: CacheServer) -> None:
    client = Client(f"tcp://127.0.0.1:{server.port}", heartbeat_interval_seconds=HEARTBEAT_SECONDS)
    try:
        users = Users(client)
        warm_bytes = 0
        for user in range(SALTS):
            users.look_up(user)
            if user % (SALTS // STORES) == 0:
                assert users.store(user) == GROUPS
            if user == WARM_SALTS:
                users.end()
                warm_bytes = private_bytes(server.pid)
        users.end()
        # Every salt is beyond its quota of nothing, so L1 is empty at the end of the next cycle.
        until(lambda: server.status()["l1"]["objects"] == 0, 30)
        status = server.status()
        assert (status["l1"]["namespaces"], status["l1"]["salts"]) == (0, 0)
        assert status["l2"]["adapters"][0]["objects"] > 100
        growth_bytes = private_bytes(server.pid) - warm_bytes
        print(f"{SALTS} salts: {warm_bytes / MIB:.0f} MiB, then {growth_bytes / MIB:.1f} more")
        assert growth_bytes < MOST_GROWTH_BYTES
    finally:
        client.close()


def test_a_small_folder_has_room_for_salts_without_end(tmp_path: Path) -> None:
    """What was evicted leaves no folder behind; a second server shares the folder while both still store."""
    folder = tmp_path / "shared"
    adapter = {"type": "fs_native", "base_path": str(folder), "max_capacity_gb": SMALL_FOLDER_GB}
    extra = ["--chunk-size", str(CHUNK_TOKENS), "--l2-adapter"]
    extra += [json.dumps({**adapter, "eviction": {"eviction_policy": "LRU"}})]

    def store(server: CacheServer, engine: SmallEngine, salts: list[str]) -> None:
        """And the last of them is found again in the folder."""
        tokens = engine.tokens(1)
        hashes = engine.hashes(tokens)
        for salt in salts:
            reply = engine.reserve(hashes, salt=salt)
            engine.fill(hashes, unpack_slots(reply.slots), salt=salt)
            assert engine.commit(reply.reservation) == 1
        server.clear("l1")
        found = engine.lookup("last", tokens, salt=salts[-1])
        assert found.chunks == 1 and engine.read(found, salt=salts[-1])
        engine.end("last")
        shown = adapter_status(server)
        assert not shown["full"] and shown["objects"] > 100, shown

    with CacheServer(tmp_path, l1_size_gb=0.0625, extra=extra) as first:
        first.wait_ready()
        with SmallEngine(first.port, payload_bytes=PAYLOAD_BYTES) as engine:
            store(first, engine, [f"user {number}" for number in range(FOLDER_SALTS)])
            until(lambda: len(folders_of_objects(folder)) == 2 * adapter_status(first)["objects"])
            with CacheServer(tmp_path, l1_size_gb=0.0625, extra=extra, log_name="second.log") as second:
                second.wait_ready()
                with SmallEngine(second.port, payload_bytes=PAYLOAD_BYTES) as other:
                    store(second, other, [f"guest {number}" for number in range(200)])
                    store(first, engine, [f"late user {number}" for number in range(200)])
                assert second.stop() == 0
            first.clear("all")
            until(lambda: not folders_of_objects(folder))
            store(first, engine, [f"new user {number}" for number in range(200)])


def adapter_status(server: CacheServer) -> dict[str, Any]:
    (shown,) = server.status()["l2"]["adapters"]
    return dict(shown)


def folders_of_objects(base: Path) -> list[Path]:
    """Those that go meanwhile may be among them or not."""
    found = [Path(place) / name for place, names, _ in os.walk(base) for name in names]
    return [path for path in found if path.relative_to(base).parts[0] not in OWN_FOLDERS]
