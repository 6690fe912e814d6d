"""`resp` when its servers change: a cluster whose slots move, nodes that fail, join and take over, Sentinels."""

from __future__ import annotations

import itertools
import socket
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from faults.test_resp import LOADED, SECRET, STORED, Life, alive, at, name_of, refusal, run
from lmcache import _native
from lmcache.core.outcome import LoadOutcome
from lmcache.errors import AdapterError
from lmcache.l2.adapters import resp_inventory, scan_order
from lmcache.l2.native_resp import Page
from lmcache.testing.frames import keys
from lmcache.testing.processes import LOOPBACK, free_port
from manual_clock import ManualClock
from polling import until
from services.redis import SLOTS, Redis, Sentinel, Valkey, cluster


def test_a_cluster_is_found_by_one_node_and_slots_may_move(tmp_path: Path) -> None:
    with cluster(tmp_path) as nodes:

        async def test(life: Life) -> None:
            wanted = keys(48)
            assert await life.store(wanted) == [STORED] * 48
            assert all(node.call("DBSIZE") for node in nodes)
            # The slot of one object moves: first ASK, then MOVED.
            name = name_of(wanted[0])
            slot = nodes[0].call("CLUSTER", "KEYSLOT", name)
            owner = next(node for node in nodes if node.call("CLUSTER", "COUNTKEYSINSLOT", slot))
            other = next(node for node in nodes if node is not owner)
            ids = {node.port: node.call("CLUSTER", "MYID") for node in nodes}
            other.call("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[owner.port])
            owner.call("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[other.port])
            for moved in owner.call("CLUSTER", "GETKEYSINSLOT", slot, 100):
                owner.call("MIGRATE", LOOPBACK, other.port, moved, 0, 5000)
            assert await life.load(wanted) == [LOADED] * 48
            for node in (other, owner):
                node.call("CLUSTER", "SETSLOT", slot, "NODE", ids[other.port])
            assert await life.load(wanted) == [LOADED] * 48
            assert (await life.adapter.clear())[0] == 48

        run(at(nodes[2]), test)


def test_a_part_of_a_cluster_that_is_away_costs_its_objects_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with cluster(tmp_path) as nodes:
        for node in nodes:
            node.call("CONFIG", "SET", "cluster-require-full-coverage", "no")

        async def test(life: Life) -> None:
            wanted = keys(48)
            assert await life.store(wanted) == [STORED] * 48
            nodes[1].kill()
            outcomes = await life.load(wanted)
            assert set(outcomes) == {LOADED, LoadOutcome.FAILED}
            assert await life.load(wanted) == outcomes
            loadable = [key for key, outcome in zip(wanted, outcomes, strict=True) if outcome is LOADED]
            caplog.clear()
            for _ in range(20):  # what works does not make what fails news
                assert await life.load(wanted) == outcomes and await life.load(loadable) == [LOADED] * len(loadable)
            assert len(caplog.records) <= 2  # refused, and left alone for a while

        run(at(nodes[0]), test)


def test_a_replica_of_a_cluster_takes_over_and_is_found_without_the_configured_node(tmp_path: Path) -> None:
    bus_port = free_port()
    settings = ("--cluster-enabled", "yes", "--cluster-port", bus_port, "--cluster-node-timeout", 2000)
    with cluster(tmp_path) as nodes, Redis(tmp_path / "replica", settings=settings) as replica:
        replica.wait_ready()
        nodes[0].call("CLUSTER", "MEET", LOOPBACK, replica.port, bus_port)
        until(lambda: all(b"cluster_known_nodes:4" in node.call("CLUSTER", "INFO") for node in (*nodes, replica)))
        replica.call("CLUSTER", "REPLICATE", nodes[0].call("CLUSTER", "MYID"))
        until(lambda: b"master_link_status:up" in replica.call("INFO", "replication"))

        async def test(life: Life) -> None:
            wanted = keys(24)
            assert await life.store(wanted) == [STORED] * 24
            until(lambda: replica.call("DBSIZE") == nodes[0].call("DBSIZE"))
            nodes[0].kill()
            await life.eventually(lambda: life.load(wanted), [LOADED] * 24)
            await life.eventually(lambda: life.store(keys(24, seed=2)), [STORED] * 24)

        run(at(nodes[0]), test)


def test_sentinels_lead_to_the_next_master(tmp_path: Path) -> None:
    with Redis(tmp_path / "one", password=SECRET) as first, Redis(tmp_path / "two", password=SECRET) as second:
        first.wait_ready()
        second.wait_ready()
        second.call("REPLICAOF", LOOPBACK, first.port)
        until(lambda: b"master_link_status:up" in second.call("INFO", "replication"))
        with Sentinel(tmp_path / "sentinel", first) as sentinel:
            until(lambda: sentinel.master_port() == first.port)
            until(lambda: sentinel.call("SENTINEL", "replicas", "kv"))

            async def test(life: Life) -> None:
                wanted = keys(6)
                assert await life.store(wanted) == [STORED] * 6
                until(lambda: second.call("DBSIZE") == first.call("DBSIZE"))
                first.kill()
                await life.eventually(lambda: life.store(keys(2, seed=2)), [STORED] * 2)
                assert await life.load(wanted) == [LOADED] * 6
                assert (await life.adapter.clear())[0] == 8 and second.keys() == []

            nodes = [f"{LOOPBACK}:{free_port()}", f"{LOOPBACK}:{sentinel.port}"]
            run({"sentinel": {"master": "kv", "nodes": nodes}, "password": SECRET}, test)


def test_what_lies_in_a_node_that_joined_is_found_and_cleared_though_no_fault_told_of_it(tmp_path: Path) -> None:
    """Another cache server stored it; this one has asked for nothing of that node."""
    bus_port = free_port()
    settings = ("--cluster-enabled", "yes", "--cluster-port", bus_port, "--cluster-node-timeout", 2000)
    with cluster(tmp_path, size=1) as (first,), Redis(tmp_path / "joined", settings=settings) as joined:
        joined.wait_ready()

        async def test(life: Life) -> None:
            first.call("CLUSTER", "MEET", LOOPBACK, joined.port, bus_port)
            until(lambda: b"cluster_known_nodes:2" in joined.call("CLUSTER", "INFO"))
            half = (0, SLOTS // 2 - 1)
            first.call("CLUSTER", "DELSLOTSRANGE", *half)
            joined.call("CLUSTER", "ADDSLOTSRANGE", *half)
            until(lambda: all(b"cluster_state:ok" in node.call("CLUSTER", "INFO") for node in (first, joined)))
            until(lambda: len(first.call("CLUSTER", "SLOTS")) == 2)

            async with alive(at(first)) as other:
                assert await other.store(keys(24)) == [STORED] * 24
            assert joined.call("DBSIZE")
            assert (await life.adapter.clear())[0] == 24 and not joined.call("DBSIZE")

        run(at(first), test)


@contextmanager
def lying_server(answers: Mapping[bytes, bytes | Callable[[], bytes]]) -> Iterator[int]:
    """Its port; it answers by the first word of a command, +OK to others."""

    def serve(peer: socket.socket) -> None:
        with peer, peer.makefile("rb") as file, suppress(OSError):
            while line := file.readline():
                words = [file.read(int(file.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))]
                answer = answers.get(words[0], b"+OK\r\n")
                peer.sendall(answer if isinstance(answer, bytes) else answer())

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server((LOOPBACK, 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    "entry", [(-1, 5, 6379), (5, 4, 6379), (0, 16_384, 6379), (0, 5, 0), (0, 5, 65_536), (0, 1 << 40, 6379)]
)
def test_slots_that_are_none_are_said(entry: tuple[int, int, int]) -> None:
    info = b"cluster_enabled:1\r\n"
    first, last, port = entry
    slots = b"*1\r\n*3\r\n:%d\r\n:%d\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % (first, last, port)
    with lying_server({b"INFO": b"$%d\r\n%s\r\n" % (len(info), info), b"CLUSTER": slots}) as listening:
        assert "CLUSTER SLOTS cannot be read" in str(refusal({"host": LOOPBACK, "port": listening}))


def test_a_master_whose_port_is_none_is_not_taken() -> None:
    master = b"*2\r\n$9\r\n127.0.0.1\r\n$30\r\n%s\r\n" % (b"9" * 30)
    with lying_server({b"SENTINEL": master}) as listening:
        nodes = [f"{LOOPBACK}:{listening}"]
        assert "knows no master" in str(refusal({"sentinel": {"master": "kv", "nodes": nodes}}))


def test_a_limit_of_values_that_nothing_fits_in_is_not_believed() -> None:
    async def test(life: Life) -> None:
        assert life.adapter.capacity.largest_object_bytes == 4096 * 4096

    told = b"*2\r\n$18\r\nproto-max-bulk-len\r\n$2\r\n64\r\n"
    page = b"*2\r\n$1\r\n0\r\n*0\r\n"
    with lying_server({b"INFO": b"$0\r\n\r\n", b"CONFIG": told, b"SCAN": page}) as listening:
        run({"host": LOOPBACK, "port": listening}, test)


def scan_page(cursor: int, *names: str) -> bytes:
    listed = b"".join(b"$%d\r\n%s\r\n" % (len(name), name.encode()) for name in names)
    return b"*2\r\n$%d\r\n%d\r\n*%d\r\n%s" % (len(str(cursor)), cursor, len(names), listed)


@pytest.mark.parametrize("cursors", [[7], [1, 2, 3], [9, 8, 1, 2, 3]])
def test_cursors_that_go_round_end_a_search(cursors: list[int], caplog: pytest.LogCaptureFixture) -> None:
    """Of which those before the circle come once."""
    tail, circle = cursors[:-3], cursors[-3:]
    endless = itertools.chain(tail, itertools.cycle(circle))

    async def test(life: Life) -> None:
        with pytest.raises(AdapterError, match=r"answers SCAN with the cursor \d again"):
            await life.adapter.clear()

    with lying_server({b"INFO": b"$0\r\n\r\n", b"SCAN": lambda: scan_page(next(endless))}) as listening:
        run({"host": LOOPBACK, "port": listening}, test)
    assert caplog.text.count("answers SCAN with the cursor") == 1


def test_a_search_that_does_not_end_is_left_and_its_memory_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resp_inventory, "MAX_L2_LISTED_PAGES", 40)
    cursors, asked = itertools.count(1), itertools.count()

    def page() -> bytes:
        next(asked)
        return scan_page(next(cursors))

    async def test(life: Life) -> None:
        with pytest.raises(AdapterError, match="without an end: it was left after 40 pages"):
            await life.adapter.clear()

    with lying_server({b"INFO": b"$0\r\n\r\n", b"SCAN": page}) as listening:
        run({"host": LOOPBACK, "port": listening}, test)
    assert "without an end" in caplog.text and next(asked) <= 120  # of the scan, the sweep and clear()


def test_the_loop_goes_on_while_what_a_search_found_is_sorted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four million objects take two seconds."""
    sorters: set[str] = set()

    class Watched:
        @staticmethod
        def youngest_first(times: memoryview) -> bytes:
            sorters.add(threading.current_thread().name)
            return _native.youngest_first(times)

    async def fill(life: Life) -> None:
        assert await life.store(keys(3)) == [STORED] * 3

    async def test(life: Life) -> None:
        assert set(life.inventory.objects) == set(keys(3))

    with Valkey(tmp_path) as server:
        server.wait_ready()
        run(at(server), fill)
        monkeypatch.setattr(scan_order, "_native", Watched)
        run(at(server), test)
    assert sorters == {"l2-order"}


def test_objects_and_namespaces_of_a_search_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resp_inventory, "MAX_L2_LISTED_OBJECTS", 100)
    monkeypatch.setattr(resp_inventory, "MAX_L2_LISTED_NAMESPACES", 3)
    objects, numbers = resp_inventory.Objects(ManualClock()), itertools.count()

    def page(namespaces: int) -> Page:
        packed = b"".join(bytes([number % namespaces]) * 32 + next(numbers).to_bytes(32, "big") for number in range(30))
        figures = memoryview(array("Q", [4096] * 30))
        return Page(1, packed, figures, figures)

    assert objects.add(page(10)) and len(objects.first) == 3 and len(objects.sizes) == len(objects.positions) == 9
    assert [objects.add(page(1)) for _ in range(4)] == [True, True, True, False]
    assert len(objects.hashes) == 32 * len(objects.sizes) == 32 * len(objects.used_ns) == 32 * (9 + 120)
