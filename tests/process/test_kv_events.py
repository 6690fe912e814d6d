"""A real server's own KV events, read by a plain subscriber with vLLM's own classes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.kv_events.event_sockets import EventSockets
from lmcache.testing.processes import CacheServer, free_port
from polling import until
from process.support import SmallEngine, server_within

WAIT_MS = 20_000
TOPIC = b"kv@a@model"
kv_events = pytest.importorskip("vllm.distributed.kv_events")


class Subscriber:
    """Decodes as vLLM's consumers do, and fails where a number is missing."""

    def __init__(self, context: zmq.Context[Any], port: int, replay_port: int) -> None:
        self._batches = msgspec.msgpack.Decoder(type=kv_events.KVEventBatch)
        self._socket = context.socket(zmq.SUB)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self.listen()
        self._context = context
        self._replay_port = replay_port
        self.numbers: list[int] = []
        self.chunks: dict[tuple[str, bytes], list[int]] = {}  # by medium and hash: tokens
        self.parents: dict[bytes, bytes | None] = {}
        self.cleared = 0

    def listen(self, yes: bool = True) -> None:
        (self._socket.subscribe if yes else self._socket.unsubscribe)(b"kv@")

    def read(self, timeout_ms: int = WAIT_MS) -> bool:
        if not self._socket.poll(timeout_ms):
            return False
        topic, number, payload = self._socket.recv_multipart()
        assert topic == TOPIC
        self.take(int.from_bytes(number, "big"), payload)
        return True

    def take(self, number: int, payload: bytes) -> None:
        """What a replay has may come by subscription, too."""
        if number in self.numbers:
            return
        if self.numbers and number > self.numbers[-1] + 1:
            for missed, content in self.replay(self.numbers[-1] + 1):
                if missed < number:
                    self._apply(missed, content)
        self._apply(number, payload)

    def _apply(self, number: int, payload: bytes) -> None:
        self.numbers.append(number)
        batch = self._batches.decode(payload)
        assert batch.data_parallel_rank == 0
        for event in batch.events:
            if isinstance(event, kv_events.BlockStored):
                assert event.block_size == 256 and event.group_idx == 0
                parent = event.parent_block_hash
                for at, block in enumerate(event.block_hashes):
                    self.chunks[event.medium, block] = event.token_ids[at * 256 : (at + 1) * 256]
                    self.parents[block], parent = parent, block
            elif isinstance(event, kv_events.BlockRemoved):
                for block in event.block_hashes:
                    self.chunks.pop((event.medium, block), None)
            else:
                assert isinstance(event, kv_events.AllBlocksCleared)
                self.chunks.clear()
                self.cleared += 1

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        with self._context.socket(zmq.DEALER) as socket:
            socket.connect(f"tcp://127.0.0.1:{self._replay_port}")
            socket.send_multipart((b"", first.to_bytes(8, "big")))
            found: list[tuple[int, bytes]] = []
            while True:
                assert socket.poll(WAIT_MS)
                _, topic, number, payload = socket.recv_multipart()
                if number == kv_events.ZmqEventPublisher.END_SEQ:
                    return found
                assert topic == TOPIC
                found.append((int.from_bytes(number, "big"), payload))

    def become(self, wanted: set[tuple[str, bytes]]) -> None:
        def is_so() -> bool:
            while self.read(0):
                pass
            return set(self.chunks) == wanted

        until(is_so, tell=lambda: set(self.chunks) ^ wanted)


def split(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + CHUNK_HASH_BYTES] for at in range(0, len(hashes), CHUNK_HASH_BYTES)]


@contextmanager
def publishing(folder: Path, *extra: str, l1_size_gb: float = 0.05) -> Iterator[tuple[CacheServer, int, int]]:
    port, replay_port = free_port(), free_port()
    options = ["--instance-id", "a", "--kv-events-endpoint", f"tcp://127.0.0.1:{port}"]
    options += ["--kv-events-replay-endpoint", f"tcp://127.0.0.1:{replay_port}", *extra]
    with CacheServer(folder, l1_size_gb=l1_size_gb, extra=options) as server:
        server.wait_ready()
        yield server, port, replay_port
        assert "Traceback" not in server.log()
        assert server.stop() == 0


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


def test_what_is_stored_and_evicted_is_published(tmp_path: Path, context: zmq.Context[Any]) -> None:
    disk = f'{{"type": "fs_native", "base_path": "{tmp_path}/disk", "serde": {{"type": "exponent"}}}}'
    with publishing(tmp_path, "--l2-adapter", disk) as (server, *ports), SmallEngine(server.port) as engine:
        subscriber = Subscriber(context, *ports)
        tokens = engine.tokens(1, 2, 3)
        engine.store(tokens)
        hashes = split(engine.hashes(tokens))
        for number, content in subscriber.replay(0):  # a subscriber that comes late asks for what was before
            subscriber.take(number, content)
        both = {(medium, chunk) for medium in ("CPU", "STORAGE") for chunk in hashes}
        subscriber.become(both)
        assert subscriber.parents[hashes[1]] == hashes[0] and subscriber.parents[hashes[0]] is None
        assert all(subscriber.chunks["CPU", chunk] == [number] * 256 for number, chunk in enumerate(hashes, 1))
        engine.store(engine.tokens(7, 8), salt="tenant")
        server.clear("l1")
        subscriber.become({(medium, chunk) for medium, chunk in both if medium == "STORAGE"})
        assert subscriber.cleared == 1  # at the beginning
        assert server.metric("lmcache_mp_kv_events_published_chunks_total", 'type="stored"') == 6
        assert server.metric("lmcache_mp_kv_events_published_chunks_total", 'type="removed"') == 3


def test_what_the_server_evicts_is_taken_back(tmp_path: Path, context: zmq.Context[Any]) -> None:
    """Many times what fits into L1."""
    with publishing(tmp_path, l1_size_gb=0.005) as (server, *ports):
        subscriber = Subscriber(context, *ports)
        with SmallEngine(server.port, payload_bytes=1 << 16) as engine:
            for first in range(0, 400, 10):
                engine.store(engine.tokens(*range(first, first + 10)))
                while subscriber.read(0):
                    pass
            assert server.metric("lmcache_mp_l1_evicted_chunks_total") > 200
            entries = server.ask(server.http_port, "GET", "/cache/objects?tier=l1&page_size=10000")[1]["entries"]
            subscriber.become({("CPU", bytes.fromhex(entry["key"].split("/")[1])) for entry in entries})
        assert subscriber.numbers == list(range(subscriber.numbers[0], subscriber.numbers[-1] + 1))


def test_a_gap_is_filled_from_what_the_server_kept(tmp_path: Path, context: zmq.Context[Any]) -> None:
    with publishing(tmp_path) as (server, *ports), SmallEngine(server.port) as engine:
        subscriber = Subscriber(context, *ports)

        def store(chunk: int) -> bytes:
            tokens = engine.tokens(chunk)
            engine.store(tokens)
            return engine.hashes(tokens)

        wanted: set[tuple[str, bytes]] = set()
        until(lambda: wanted.add(("CPU", store(len(wanted)))) or subscriber.read(0))  # until it listens
        subscriber.become(wanted)
        subscriber.listen(False)
        before = len(subscriber.numbers)
        wanted |= {("CPU", store(chunk)) for chunk in range(100, 105)}
        until(lambda: subscriber.replay(subscriber.numbers[-1] + 1))
        assert not subscriber.read(0) and len(subscriber.numbers) == before
        subscriber.listen()
        chunks = iter(range(200, 1000))
        until(lambda: wanted.add(("CPU", store(next(chunks)))) or subscriber.read(0))
        subscriber.become(wanted)
        assert subscriber.numbers == list(range(subscriber.numbers[0], subscriber.numbers[-1] + 1))


def test_a_subscriber_that_hangs_costs_nothing(tmp_path: Path, context: zmq.Context[Any]) -> None:
    """Nor do some that ask for everything and never read it: another one gets all, in its order."""
    with publishing(tmp_path, l1_size_gb=0.005) as (server, *ports):
        hanging = [context.socket(zmq.SUB)] + [context.socket(zmq.DEALER) for _ in range(8)]
        for number, socket in enumerate(hanging):
            socket.rcvhwm, socket.rcvbuf = 1, 4096
            socket.connect(f"tcp://127.0.0.1:{ports[min(number, 1)]}")
        hanging[0].subscribe(b"")
        hanging[1].send_multipart((b"not a number",))
        subscriber = Subscriber(context, *ports)
        with SmallEngine(server.port, payload_bytes=1 << 16) as engine:
            for first in range(0, 4000, 20):
                if first == 2000:
                    for socket in hanging[2:]:
                        socket.send_multipart((b"", bytes(8)))
                engine.store(engine.tokens(*range(first, first + 20)))
                while subscriber.read(0):
                    pass
            entries = server.ask(server.http_port, "GET", "/cache/objects?tier=l1&page_size=10000")[1]["entries"]
            subscriber.become({("CPU", bytes.fromhex(entry["key"].split("/")[1])) for entry in entries})
            assert subscriber.numbers == list(range(subscriber.numbers[0], subscriber.numbers[-1] + 1))
            assert "was not understood" in server.log()


def test_a_server_that_starts_again_says_so(tmp_path: Path, context: zmq.Context[Any]) -> None:
    """Its numbers are higher, and it tells what its tiers kept, as far as it knows: the tokens are with the engines."""
    disk = f'{{"type": "fs_native", "base_path": "{tmp_path}/disk"}}'
    with publishing(tmp_path, "--l2-adapter", disk) as (server, *ports), SmallEngine(server.port) as engine:
        engine.store(engine.tokens(1, 2))
        hashes = split(engine.hashes(engine.tokens(1, 2)))
        until(lambda: server.metric("lmcache_mp_kv_events_published_chunks_total", 'type="stored"') == 4)
        before = Subscriber(context, *ports).replay(0)[-1][0]
    with publishing(tmp_path, "--l2-adapter", disk) as (server, *ports):
        subscriber = Subscriber(context, *ports)
        until(lambda: server.metric("lmcache_mp_kv_events_published_chunks_total", 'type="undescribed"') == 2)
        for number, content in subscriber.replay(0):
            subscriber.take(number, content)
        assert subscriber.chunks == {("STORAGE", chunk): [] for chunk in hashes}
        assert subscriber.numbers[0] > before and subscriber.cleared == 1


def test_the_sockets_are_closed_by_the_thread_that_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    closed_by, close = [], EventSockets.close

    def note(sockets: EventSockets) -> None:
        closed_by.append(threading.current_thread().name)
        close(sockets)

    monkeypatch.setattr(EventSockets, "close", note)
    with server_within(kv_events_endpoint=f"tcp://127.0.0.1:{free_port()}"):
        assert not closed_by
    assert closed_by == ["lmcache-kv-events"]


def test_the_subscriber_of_the_guide_follows(tmp_path: Path) -> None:
    """It begins late, and asks for what it missed."""
    guide = (Path(__file__).parents[2] / "docs" / "how-to" / "publish_kv_events.md").read_text()
    (tmp_path / "subscriber.py").write_text(guide.split("```python\n")[1].split("```")[0])
    with publishing(tmp_path, "--instance-id", "cache-a") as (server, *ports), SmallEngine(server.port) as engine:
        engine.store(engine.tokens(1, 2, 3))
        until(lambda: server.metric("lmcache_mp_kv_events_published_chunks_total", 'type="stored"') == 3)
        urls = [f"tcp://127.0.0.1:{port}" for port in ports]
        command = [sys.executable, str(tmp_path / "subscriber.py"), *urls]
        log, chunks = tmp_path / "told", iter(range(100, 10_000))

        def told() -> list[str]:
            engine.store(engine.tokens(next(chunks)))
            return log.read_text().splitlines()

        with log.open("w") as out, subprocess.Popen(command, stdout=out) as process:
            try:
                until(told, 60.0)
                assert log.read_text().splitlines()[0] == "kv@cache-a@model 3"  # from the replay
                server.clear("l1")
                until(lambda: log.read_text().endswith("kv@cache-a@model 0\n"), tell=log.read_text)
            finally:
                process.kill()
