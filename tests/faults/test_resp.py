"""`resp` when its servers fail, change or lie: what it gives out is exact, or it is a miss; it never hangs; and it goes
on when they are well again."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import AdapterError, ConfigError, LMCacheError, ResourceError
from lmcache.l2.adapter import Adapter
from lmcache.l2.adapter_types import build, check, parse_adapter
from lmcache.l2.adapters.remote_names import RemoteNames
from lmcache.testing.contract_run import RecordingInventory
from lmcache.testing.frames import FrameMemory, keys, namespace
from lmcache.testing.processes import LOOPBACK, free_port
from polling import until
from services.certificates import Certificates
from services.redis import Redis, RespServer, Sentinel, Valkey

STORED, THERE, FULL = StoreOutcome.STORED, StoreOutcome.ALREADY_THERE, StoreOutcome.FULL
LOADED, MISSING, CORRUPT = LoadOutcome.LOADED, LoadOutcome.MISSING, LoadOutcome.CORRUPT
SECRET = "planted-secret"
PARTS = {"max_value_bytes": 4096}


class Life:
    """An open adapter, and what it said of the backend."""

    def __init__(self, adapter: Adapter, inventory: RecordingInventory) -> None:
        self.adapter = adapter
        self.inventory = inventory

    async def store(self, wanted: Sequence[ObjectKey], payload_bytes: int = 12_288) -> list[StoreOutcome]:
        memory = FrameMemory(len(wanted), payload_bytes)
        try:
            return await self.adapter.store(wanted, [memory.fill(slot, key) for slot, key in enumerate(wanted)])
        except AdapterError:
            return [StoreOutcome.FAILED] * len(wanted)

    async def load(self, wanted: Sequence[ObjectKey], payload_bytes: int = 12_288) -> list[LoadOutcome]:
        """LOADED only where every byte is right."""
        memory = FrameMemory(len(wanted), payload_bytes)
        try:
            outcomes = await self.adapter.load(wanted, memory.buffers)
        except AdapterError:
            return [LoadOutcome.FAILED] * len(wanted)
        assert all(memory.holds(slot, wanted[slot]) for slot, outcome in enumerate(outcomes) if outcome is LOADED)
        return outcomes

    async def eventually(self, act: Callable[[], Awaitable[object]], wanted: object, seconds: float = 30.0) -> None:
        end = asyncio.get_running_loop().time() + seconds
        while (got := await act()) != wanted:
            assert asyncio.get_running_loop().time() < end, f"still {got}"
            await asyncio.sleep(0.05)


@asynccontextmanager
async def alive(spec: dict[str, Any]) -> AsyncIterator[Life]:
    adapter, inventory = build(parse_adapter({"type": "resp", "timeout_seconds": 5, **spec}, 0)).adapter, None
    try:
        inventory = RecordingInventory()
        await asyncio.wait_for(adapter.open(inventory), 30)
        await asyncio.wait_for(inventory.completed.wait(), 30)
        yield Life(adapter, inventory)
    finally:
        await asyncio.wait_for(adapter.close(), 30)


def run(spec: dict[str, Any], test: Callable[[Life], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with alive(spec) as life:
            await asyncio.wait_for(test(life), 60)

    asyncio.run(whole())


def at(server: RespServer, **settings: Any) -> dict[str, Any]:
    return {"host": LOOPBACK, "port": server.port, **settings}


def name_of(key: ObjectKey) -> str:
    return RemoteNames().names([key])[0]


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    with Valkey(tmp_path / "valkey") as server:
        server.wait_ready()
        yield server


# ---- what lies in the server ----------------------------------------------------------------------------------------
def test_what_is_not_the_frame_of_its_key_is_corrupt_and_goes(valkey: Valkey) -> None:
    async def test(life: Life) -> None:
        wanted = keys(6)
        assert await life.store(wanted) == [STORED] * 6
        names = [name_of(key) for key in wanted]
        frame: bytes = valkey.call("GET", names[0])
        valkey.call("SET", names[1], frame)  # another's
        valkey.call("SET", names[2], frame[:-5000])  # truncated
        valkey.call("SET", names[3], b"")
        valkey.call("DEL", names[4])
        valkey.call("LPUSH", names[4], "a list")
        damaged: bytes = valkey.call("GET", names[5])
        valkey.call("SET", names[5], damaged[:5000] + bytes([damaged[5000] ^ 1]) + damaged[5001:])
        outcomes = await life.load(wanted)
        assert outcomes[0] is LOADED and LOADED not in outcomes[1:]
        assert await life.load(wanted) == [LOADED] + [MISSING] * 5
        assert await life.store(wanted) == [THERE] + [STORED] * 5
        assert await life.load(wanted) == [LOADED] * 6

    run(at(valkey), test)


def test_only_what_is_ours_is_found_and_cleared(valkey: Valkey) -> None:
    wanted = keys(3)
    foreign = ["user:1", "lmcache", "lmcache/v1/x", f"{name_of(wanted[0])}0", f"x{name_of(wanted[0])}", "lmcache/v2/y"]
    for name in foreign:
        valkey.call("SET", name, "theirs")

    async def fill(life: Life) -> None:
        assert await life.store(wanted) == [STORED] * 3

    async def clear(life: Life) -> None:
        assert sorted(life.inventory.order) == sorted(wanted)
        assert (await life.adapter.clear())[0] == 3

    run(at(valkey), fill)
    run(at(valkey), clear)
    assert valkey.keys() == sorted(foreign)


def test_two_prefixes_are_two_caches(valkey: Valkey) -> None:
    async def test(life: Life) -> None:
        async with alive(at(valkey, prefix="lmcache/other")) as other:
            assert await life.store(keys(2)) == [STORED] * 2
            assert await other.load(keys(2)) == [MISSING] * 2
            assert await other.store(keys(1)) == [STORED]
            assert await life.adapter.clear() == (2, 2 * FrameMemory(1).slot_bytes)
            assert await other.load(keys(1)) == [LOADED]

    run(at(valkey), test)


def test_what_another_server_stores_is_found_and_not_sent_again(valkey: Valkey) -> None:
    async def test(first: Life) -> None:
        async with alive(at(valkey)) as other:
            assert await first.store(keys(4)) == [STORED] * 4
            assert await other.store(keys(5)) == [THERE] * 4 + [STORED]
            assert await first.load(keys(5)) == [LOADED] * 5
            await asyncio.gather(*(life.store(keys(8, seed=2)) for life in (first, other)))
            assert await first.load(keys(8, seed=2)) == [LOADED] * 8
            assert await other.adapter.delete(keys(5)) == [True] * 5
            assert await first.load(keys(5)) == [MISSING] * 5

    run(at(valkey), test)


def test_the_inventory_is_youngest_first_and_names_what_only_digests_say(valkey: Valkey) -> None:
    old, new = keys(2, of=namespace("old", salt="a")), keys(2, of=namespace("new"))
    nameless = keys(1, of=namespace("nameless"))

    async def fill(life: Life) -> None:
        assert await life.store([*old, *nameless]) == [STORED] * 3
        valkey.call("SET", name_of(nameless[0]), b"x" * 5000)  # no header tells what it is
        until(lambda: valkey.call("OBJECT", "IDLETIME", name_of(old[1])) >= 1)
        assert await life.store(new) == [STORED] * 2

    async def look(life: Life) -> None:
        order = life.inventory.order
        assert sorted(order[:2]) == sorted(new) and sorted(order[2:4]) == sorted(old)
        assert (
            order[4].namespace.digest == nameless[0].namespace.digest and order[4].chunk_hash == nameless[0].chunk_hash
        )

    run(at(valkey), fill)
    run(at(valkey), look)
    assert valkey.call("OBJECT", "IDLETIME", name_of(old[1])) >= 1, "a search is no use"


# ---- servers that fail ----------------------------------------------------------------------------------------------
def test_a_full_server_is_full_and_has_room_again(valkey: Valkey) -> None:
    async def test(life: Life) -> None:
        valkey.call("CONFIG", "SET", "maxmemory", str(valkey.call("MEMORY", "STATS")[3] + (2 << 20)))
        outcomes = await life.store(keys(64), 100_000)
        assert set(outcomes) == {STORED, FULL}
        assert (await life.load(keys(64), 100_000)).count(LOADED) == outcomes.count(STORED)
        assert await life.adapter.delete(keys(64)) == [True] * 64
        await life.eventually(lambda: life.store(keys(2), 100_000), [STORED] * 2)

    run(at(valkey), test)


def test_a_killed_server_costs_misses_and_a_new_one_is_found(tmp_path: Path) -> None:
    server = Valkey(tmp_path / "one")
    server.wait_ready()

    async def test(life: Life) -> None:
        wanted = keys(64)
        assert await life.store(wanted, 100_000) == [STORED] * 64
        loading = asyncio.ensure_future(life.load(wanted, 100_000))
        storing = asyncio.ensure_future(life.store(keys(64, seed=2), 100_000))
        await asyncio.sleep(0)
        server.kill()
        assert set(await loading) <= {LOADED, LoadOutcome.FAILED}
        assert set(await storing) <= {STORED, StoreOutcome.FAILED}
        assert await life.load(wanted, 100_000) == [LoadOutcome.FAILED] * 64
        with Valkey(tmp_path / "two", port=server.port) as again:
            again.wait_ready()
            await life.eventually(lambda: life.store(keys(3)), [STORED] * 3)
            assert await life.load(keys(3)) == [LOADED] * 3
            assert await life.load(keys(3, seed=2)) == [MISSING] * 3

    try:
        run(at(server, timeout_seconds=10), test)
    finally:
        server.stop()


def test_cut_connections_are_made_again(valkey: Valkey) -> None:
    async def test(life: Life) -> None:
        assert await life.store(keys(8)) == [STORED] * 8
        for _ in range(3):
            valkey.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            assert await life.load(keys(8)) == [LOADED] * 8
            assert await life.store(keys(8)) == [THERE] * 8

    run(at(valkey), test)


def test_a_server_that_stands_still_costs_the_timeout_and_no_memory_afterwards(valkey: Valkey) -> None:
    async def test(life: Life) -> None:
        wanted = keys(4)
        assert await life.store(wanted) == [STORED] * 4
        valkey.pause()
        try:
            began = asyncio.get_running_loop().time()
            memory = FrameMemory(4)
            with pytest.raises(AdapterError):
                await life.adapter.load(wanted, memory.buffers)
            assert asyncio.get_running_loop().time() - began < 10
            for buffer in memory.buffers:
                buffer[:] = b"\xaa" * buffer.nbytes
        finally:
            valkey.resume()
        await life.eventually(lambda: life.load(wanted), [LOADED] * 4)
        assert all(bytes(buffer) == b"\xaa" * buffer.nbytes for buffer in memory.buffers)

    run(at(valkey, timeout_seconds=1), test)


def test_a_server_that_becomes_a_replica_takes_no_stores_and_still_loads(valkey: Valkey) -> None:
    async def test(life: Life) -> None:
        assert await life.store(keys(2)) == [STORED] * 2
        valkey.call("CONFIG", "SET", "replica-serve-stale-data", "yes")
        valkey.call("REPLICAOF", LOOPBACK, free_port())
        assert await life.store(keys(2, seed=2)) == [StoreOutcome.FAILED] * 2
        assert await life.load(keys(2)) == [LOADED] * 2
        valkey.call("REPLICAOF", "NO", "ONE")
        await life.eventually(lambda: life.store(keys(2, seed=2)), [STORED] * 2)

    run(at(valkey), test)


class Proxy:
    """Passes bytes on to a server, and cuts or damages the answers where a test says so."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port = int(self._listener.getsockname()[1])
        self.most_bytes: int | None = None  # of answers that one connection passes on before it is cut
        self.holds = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection((LOOPBACK, self._target))
                for source, sink, answers in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pass, args=(source, sink, answers), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(65536):
                if answers and self.most_bytes is not None:
                    data = data[: max(0, self.most_bytes - passed)]
                    passed += len(data)
                    if not data:
                        break
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextmanager
def proxy(server: RespServer) -> Iterator[Proxy]:
    between = Proxy(server.port)
    try:
        yield between
    finally:
        between.close()


def test_an_answer_that_ends_anywhere_is_no_hit(valkey: Valkey) -> None:
    async def test(life: Life) -> None:
        wanted = keys(2)
        assert await life.store(wanted) == [STORED] * 2
        for most_bytes in (0, 1, 4, 5, 9, 10, 5000, 16_390, 16_395, 20_000):
            between.most_bytes = most_bytes
            valkey.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            assert set(await life.load(wanted)) <= {LOADED, LoadOutcome.FAILED}
        between.most_bytes = None
        await life.eventually(lambda: life.load(wanted), [LOADED] * 2)

    with proxy(valkey) as between:
        run({"host": LOOPBACK, "port": between.port, "num_workers": 1}, test)


# ---- what an operator is told ---------------------------------------------------------------------------------------
def refusal(spec: dict[str, Any]) -> LMCacheError:
    """The same from `check` and from `open`."""
    spec = {"type": "resp", "timeout_seconds": 5, **spec}
    with pytest.raises((ConfigError, ResourceError)) as caught:
        check(parse_adapter(spec, 0))

    async def opened() -> None:
        async with alive(spec):
            pass

    with pytest.raises((ConfigError, ResourceError)) as again:
        asyncio.run(opened())
    sentence = str(caught.value)
    assert str(again.value) == sentence and sentence.startswith("--l2-adapter 1 (resp): ") and sentence.endswith(".")
    assert "\n" not in sentence and SECRET not in sentence
    return caught.value


def test_what_an_operator_can_mend_is_one_sentence(tmp_path: Path) -> None:
    certificates, others = Certificates(tmp_path / "certificates"), Certificates(tmp_path / "others")
    with Redis(tmp_path / "server", certificates=certificates, password=SECRET) as server:
        server.wait_ready()
        tls = {"host": LOOPBACK, "port": server.tls_port, "password": SECRET}
        ca = {"tls_ca": str(certificates.ca)}
        run({**tls, **ca, "tls": True}, _stores)
        run({"url": f"rediss://:{SECRET}@{LOOPBACK}:{server.tls_port}", **ca}, _stores)
        assert "refuses the login" in str(refusal(at(server)))
        assert "WRONGPASS" in str(refusal(at(server, password="planted-secret-2")))
        assert "refuses the login" in str(refusal(at(server, password=SECRET, username="nobody")))
        assert "refuses the login" in str(refusal(at(server, password=SECRET, database=9999)))
        assert "certificate" in str(refusal({**tls, "tls": True}))
        assert "certificate" in str(refusal({**tls, "tls": True, "tls_ca": str(others.ca)}))
        assert "certificate" in str(refusal({**tls, **ca, "tls": True, "tls_server_name": "elsewhere"}))
        assert "tls_ca" in str(refusal({**tls, "tls": True, "tls_ca": str(tmp_path / "none")}))
        bad_key = {"tls_cert": str(certificates.client_cert), "tls_key": str(others.client_key)}
        assert "tls_key" in str(refusal({**tls, **ca, **bad_key, "tls": True}))
        assert "TLS" in str(
            refusal(at(server, password=SECRET, tls=True, timeout_seconds=1, **ca))
        )  # the port for plain connections
        assert "in no cluster" in str(refusal(at(server, password=SECRET, cluster=True)))
        server.call("REPLICAOF", LOOPBACK, free_port())
        assert "is a replica" in str(refusal(at(server, password=SECRET)))
    assert isinstance(refusal({"host": LOOPBACK, "port": server.port}), ResourceError)
    assert "cannot connect" in str(refusal({"url": f"unix://{tmp_path}/none"}))
    assert "knows no master" in str(_sentinel_refusal(tmp_path))


def _sentinel_refusal(tmp_path: Path) -> LMCacheError:
    with Redis(tmp_path / "master") as master:
        master.wait_ready()
        with Sentinel(tmp_path / "sentinel", master) as sentinel:
            until(lambda: sentinel.master_port() == master.port)
            return refusal({"sentinel": {"master": "other", "nodes": [f"{LOOPBACK}:{sentinel.port}"]}})


async def _stores(life: Life) -> None:
    assert await life.store(keys(2)) == [STORED] * 2 and await life.load(keys(2)) == [LOADED] * 2
    assert (await life.adapter.clear())[0] == 2


def test_a_client_certificate_is_shown_where_one_is_asked_for(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certificates")
    with Redis(tmp_path / "server", certificates=certificates, tls_clients="yes") as server:
        server.wait_ready()
        tls = {"host": LOOPBACK, "port": server.tls_port, "tls": True, "tls_ca": str(certificates.ca)}
        pair = {"tls_cert": str(certificates.client_cert), "tls_key": str(certificates.client_key)}
        run({**tls, **pair}, _stores)
        assert isinstance(refusal(tls), (ConfigError, ResourceError))


def test_a_user_with_the_rights_of_the_guide_is_enough(valkey: Valkey) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "how-to" / "keep_kv_in_redis.md").read_text()
    command = guide[guide.index("ACL SETUSER") :].split("\n\n")[0]
    valkey.call(*command.replace(">PASSWORD", f">{SECRET}").split())
    for settings in ({}, PARTS):
        run(at(valkey, username="kv", password=SECRET, **settings), _stores)

    valkey.call("ACL", "SETUSER", "kv", "-set")

    async def refused(life: Life) -> None:
        assert await life.store(keys(1, seed=3)) == [StoreOutcome.FAILED]

    run(at(valkey, username="kv", password=SECRET), refused)


def test_what_a_server_repeats_of_a_login_is_not_said(tmp_path: Path) -> None:
    with Redis(tmp_path, settings=["--rename-command", "AUTH", ""]) as server:
        server.wait_ready()
        assert "unknown command" in str(refusal(at(server, password=SECRET)))  # which has no secret


def test_a_server_that_takes_no_more_clients_says_so(valkey: Valkey) -> None:
    with valkey.client() as first:
        first.call("CONFIG", "SET", "maxclients", 1)
        for settings in ({}, {"password": SECRET}):
            refused = refusal(at(valkey, **settings))
            assert isinstance(refused, ResourceError) and "max number of clients" in str(refused)


def test_the_reason_that_is_given_is_that_of_the_act_which_failed(valkey: Valkey) -> None:
    valkey.call("ACL", "SETUSER", "kv", "on", f">{SECRET}", "~*", "+@all")

    async def test(life: Life) -> None:
        assert await life.store(keys(1)) == [STORED]
        valkey.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert await life.adapter.probe(keys(1)) == [FrameMemory(1).slot_bytes]  # on a new connection
        valkey.call("ACL", "SETUSER", "kv", "-get")
        with pytest.raises(AdapterError, match="no permissions to run the 'get' command"):
            await life.adapter.load(keys(1), FrameMemory(1).buffers)

    run(at(valkey, username="kv", password=SECRET), test)


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    """The library would ask at the terminal, if the process has one, and wait for ever."""
    pair = tmp_path / "cert.pem", tmp_path / "key.pem"
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "2", "-subj", "/CN=x"]
    request += ["-passout", "pass:passphrase", "-out", str(pair[0]), "-keyout", str(pair[1])]
    subprocess.run(request, check=True, capture_output=True)
    spec = {"type": "resp", "host": LOOPBACK, "port": 1, "tls": True, "tls_cert": str(pair[0]), "tls_key": str(pair[1])}
    program = "import sys, json; from lmcache.l2.adapter_types import check, parse_adapter as parse\n"
    program += "check(parse(json.loads(sys.argv[1]), 0))"
    terminal, end = os.openpty()
    try:
        asked = subprocess.run(
            ["setsid", "--ctty", "--wait", sys.executable, "-c", program, json.dumps(spec)],
            stdin=end, stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
    finally:
        os.close(terminal)
        os.close(end)
    assert "without a passphrase, can be read" in asked.stderr


@pytest.mark.parametrize("source", ["key", "environment"])
def test_a_password_that_was_changed_is_read_for_the_next_connection(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "password"
    file.write_text("first\n")

    def change(server: Valkey, password: str) -> None:
        server.call("CONFIG", "SET", "requirepass", password)
        server.password = password
        server.call("CLIENT", "KILL", "TYPE", "normal")  # the test's own as well: it is answered first

    async def test(life: Life) -> None:
        assert await life.store(keys(2)) == [STORED] * 2
        file.write_text(f"{SECRET}\n")
        change(server, SECRET)
        assert await life.load(keys(2)) == [LOADED] * 2
        file.write_text("two\nlines\n")  # somebody is at it
        change(server, "third")
        with pytest.raises(AdapterError, match="must hold one line"):
            await life.adapter.probe(keys(2))
        file.write_text("third")
        await life.eventually(lambda: life.load(keys(2)), [LOADED] * 2)

    with Valkey(tmp_path / "valkey", password="first") as server:
        server.wait_ready()
        if source == "environment":
            monkeypatch.setenv("LMCACHE_RESP_PASSWORD_FILE", str(file))
        keyed = {"password_file": str(file)} if source == "key" else {}
        run(at(server, num_workers=1, **keyed), test)


def test_no_secret_is_logged(valkey: Valkey, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    valkey.call("ACL", "SETUSER", "kv", "on", f">{SECRET}", "~*", "+@all")

    async def test(life: Life) -> None:
        valkey.call("ACL", "SETUSER", "kv", "-@all")
        for act in (lambda: life.store(keys(1)), lambda: life.load(keys(1))):
            await act()
        valkey.call("ACL", "DELUSER", "kv")
        await life.load(keys(1))
        with pytest.raises(AdapterError) as caught:
            await life.adapter.clear()
        assert SECRET not in str(caught.value)

    run({"url": f"redis://kv:{SECRET}@{LOOPBACK}:{valkey.port}"}, test)
    assert "cannot" in caplog.text and SECRET not in caplog.text


def test_a_capacity_beyond_that_of_the_server_is_said(valkey: Valkey) -> None:
    valkey.call("CONFIG", "SET", "maxmemory", 1 << 30)
    (note,) = check(parse_adapter({"type": "resp", **at(valkey, max_capacity_gb=2)}, 0))
    assert "maxmemory of 1073741824" in note
    assert check(parse_adapter({"type": "resp", **at(valkey, max_capacity_gb=0.5)}, 0)) == []
