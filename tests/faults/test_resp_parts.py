"""Objects of `resp` that are stored in parts: what is lost, left over or written by others, and what becomes of it."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from faults.test_resp import FULL, LOADED, MISSING, PARTS, STORED, THERE, Life, alive, at, name_of, run
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.testing.frames import FrameMemory, keys
from lmcache.testing.processes import LOOPBACK
from polling import STALL_SECONDS
from services.redis import Valkey

TIMEOUT_SECONDS = 2.5


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    with Valkey(tmp_path / "valkey") as server:
        server.wait_ready()
        yield server


def test_a_missing_or_foreign_part_is_a_miss_and_the_rest_goes(valkey: Valkey) -> None:
    async def test(life: Life) -> None:
        wanted = keys(4)
        assert await life.store(wanted) == [STORED] * 4
        parts = valkey.keys("lmcache/v1-parts/*")
        assert len(parts) == 16 and all(valkey.call("TTL", part) == -1 for part in parts)
        part_of = [[part for part in parts if key.chunk_hash.hex() in part] for key in wanted]
        valkey.call("DEL", part_of[1][2])
        valkey.call("SET", part_of[2][1], valkey.call("GET", part_of[3][1]))  # whole, of another
        valkey.call("SET", part_of[3][3], b"short")
        outcomes = await life.load(wanted)
        assert outcomes[:2] == [LOADED, MISSING] and LOADED not in outcomes[2:]
        assert await life.load(wanted) == [LOADED] + [MISSING] * 3
        assert len(valkey.keys()) == 5
        assert await life.store(wanted) == [THERE] + [STORED] * 3
        assert await life.load(wanted) == [LOADED] * 4
        assert await life.adapter.delete(wanted) == [True] * 4
        assert valkey.keys() == []

    run(at(valkey, **PARTS), test)


def test_parts_of_a_writer_that_died_expire_and_are_cleared(valkey: Valkey) -> None:
    async def test(life: Life) -> None:
        part = "lmcache/v1-parts/" + "a" * 64 + "/" + "b" * 64 + "/" + "c" * 32 + "/0"
        valkey.call("SET", part, "left")
        assert await life.store(keys(1)) == [STORED]
        assert await life.adapter.clear() == (1, FrameMemory(1).slot_bytes)
        assert valkey.keys() == []
        # One that dies before the manifest: the server refuses that, and the parts are taken back.
        valkey.call("CONFIG", "SET", "maxmemory", "1")
        assert await life.store(keys(1)) == [FULL]
        assert valkey.keys() == []

    run(at(valkey, **PARTS), test)


def test_servers_with_other_limits_read_each_other(valkey: Valkey) -> None:
    async def test(whole: Life) -> None:
        async with alive(at(valkey, **PARTS)) as parts:
            assert await whole.store(keys(2)) == [STORED] * 2 and await parts.store(keys(2, seed=2)) == [STORED] * 2
            assert await parts.load(keys(2)) == await whole.load(keys(2, seed=2)) == [LOADED] * 2
            sizes = [FrameMemory(1).slot_bytes] * 2
            assert await parts.adapter.probe(keys(2)) == await whole.adapter.probe(keys(2, seed=2)) == sizes
            assert await parts.store(keys(2)) == await whole.store(keys(2, seed=2)) == [THERE] * 2
        async with alive(at(valkey)) as later:
            assert set(later.inventory.objects.values()) == set(sizes) and len(later.inventory.order) == 4

    run(at(valkey), test)


def test_the_limit_of_the_server_is_learnt(tmp_path: Path) -> None:
    with Valkey(tmp_path, settings=["--proto-max-bulk-len", 1 << 20]) as server:
        server.wait_ready()

        async def test(life: Life) -> None:
            payload_bytes = (2 << 20) + 12_288
            assert await life.store(keys(1), payload_bytes) == [STORED]
            assert len(server.keys("lmcache/v1-parts/*")) == 3
            assert await life.load(keys(1), payload_bytes) == [LOADED]

        run(at(server), test)


class LosesOneAnswer:
    """Passes bytes on to a server. The connection of a request with `marker` is cut when the server has done it."""

    def __init__(self, port: int, marker: bytes) -> None:
        self._target, self._marker = port, marker
        self.is_armed = True
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection((LOOPBACK, self._target))
                threading.Thread(target=self._pass, args=(client, server), daemon=True).start()

    def _pass(self, client: socket.socket, server: socket.socket) -> None:
        with client, server, suppress(OSError):
            while True:
                for source in select.select([client, server], [], [])[0]:
                    if not (data := source.recv(1 << 20)):
                        return
                    (server if source is client else client).sendall(data)
                    if source is client and self.is_armed and self._marker in data:
                        self.is_armed = False
                        server.recv(1 << 16)
                        return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def test_a_manifest_whose_answer_is_lost_is_not_taken_for_that_of_another(valkey: Valkey) -> None:
    async def test(life: Life) -> None:
        assert await life.store(keys(1)) == [STORED]
        assert not between.is_armed
        assert await life.load(keys(1)) == [LOADED]

    between = LosesOneAnswer(valkey.port, b"$2\r\nNX\r\n")
    try:
        run({"host": LOOPBACK, "port": between.port, "num_workers": 1, **PARTS}, test)
    finally:
        between.close()


class Slow(LosesOneAnswer):
    """Loses nothing: each request with `marker` takes a while."""

    SECONDS = 1.0

    def _pass(self, client: socket.socket, server: socket.socket) -> None:
        with client, server, suppress(OSError):
            while True:
                for source in select.select([client, server], [], [])[0]:
                    if not (data := source.recv(1 << 20)):
                        return
                    if source is client and self._marker in data:
                        time.sleep(self.SECONDS)
                    (server if source is client else client).sendall(data)


@pytest.mark.parametrize("act", ["store", "load"])
def test_an_object_in_many_parts_takes_no_longer_than_any_other(valkey: Valkey, act: str) -> None:
    """Each of its parts comes in time, all of them do not."""
    parts = 15
    payload_bytes = parts * 4096

    async def test(life: Life) -> None:
        wanted = keys(1)
        if act == "load":
            async with alive(at(valkey, **PARTS)) as other:
                assert await other.store(wanted, payload_bytes) == [STORED]
        started = time.monotonic()
        if act == "load":
            assert await life.load(wanted, payload_bytes) == [LoadOutcome.FAILED]
        else:
            assert await life.store(wanted, payload_bytes) == [StoreOutcome.FAILED]
            assert valkey.keys("lmcache/v1/*") == []
        assert time.monotonic() - started < TIMEOUT_SECONDS + STALL_SECONDS < parts * Slow.SECONDS

    between = Slow(valkey.port, b"SETEX" if act == "store" else b"$3\r\nGET\r\n")
    try:
        run({"host": LOOPBACK, "port": between.port, "timeout_seconds": TIMEOUT_SECONDS, **PARTS}, test)
    finally:
        between.close()


def test_what_nobody_can_load_does_not_stand_in_the_way(valkey: Valkey) -> None:
    async def test(life: Life) -> None:
        wanted = keys(3)
        valkey.call("SET", name_of(wanted[0]), "x" * 64)
        valkey.call("LPUSH", name_of(wanted[1]), "a list")
        async with alive(at(valkey, **PARTS)) as other:
            assert await other.store(wanted[2:], 40_960) == [STORED]  # of another size
        assert await life.store(wanted) == [STORED] * 3
        assert await life.load(wanted) == [LOADED] * 3
        assert await life.adapter.delete(wanted) == [True] * 3 and valkey.keys() == []

    run(at(valkey, **PARTS), test)


def test_parts_of_no_object_go_and_all_others_stay(valkey: Valkey) -> None:
    """Such as those whose manifest the server evicted."""
    wanted = keys(3)
    folder = f"lmcache/v1-parts/{'a' * 64}/{'b' * 64}"
    unfinished, foreign = f"{folder}/{'c' * 32}/0", ["lmcache/v1-parts/theirs", f"{folder}/{'c' * 32}/x"]

    async def fill(life: Life) -> None:
        assert await life.store(wanted) == [STORED] * 3

    run(at(valkey, **PARTS), fill)
    valkey.call("SET", unfinished, "x", "EX", 600)
    for name in foreign:
        valkey.call("SET", name, "x")
    valkey.call("DEL", name_of(wanted[0]))
    valkey.call("SET", name_of(wanted[1]), "x" * 8192)

    async def look(life: Life) -> None:
        async def left() -> int:
            return len(valkey.keys("lmcache/v1-parts/*"))

        await life.eventually(left, 4 + 1 + 2)
        assert await life.load(wanted[2:]) == [LOADED]
        assert await life.adapter.clear() == (2, 8192 + FrameMemory(1).slot_bytes)
        assert valkey.keys() == sorted(foreign)

    run(at(valkey, **PARTS), look)


def test_a_prefix_below_that_of_parts_is_another_cache(valkey: Valkey) -> None:
    async def test(life: Life) -> None:
        async with alive(at(valkey, prefix="lmcache/v1-parts")) as other:
            assert await other.store(keys(2)) == [STORED] * 2 and await life.store(keys(1)) == [STORED]
            assert (await life.adapter.clear())[0] == 1
            assert await other.load(keys(2)) == [LOADED] * 2

    run(at(valkey), test)
