"""Whatever bytes arrive, the server answers the next honest call, executes nothing, and keeps what it holds."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
import zmq

from lmcache.core import limits
from lmcache.protocol import messages as m
from lmcache.testing.processes import CacheServer
from polling import until
from process.memory_watch import MemoryWatch, private_bytes
from process.support import CALL_SECONDS, SmallEngine, held
from seeds import SEED

GOLDEN = Path(__file__).parents[1] / "golden" / "wire_v1.json"
MESSAGES = int(os.environ.get("TEST_HOSTILE_MESSAGES", "8000"))
BATCH = 400
LONGEST_WAIT_SECONDS = (
    1.0  # of an honest call beside refused ones; 3.5 where lists were decoded before they were refused
)
GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + b"\0" * 48
READY = b"\4\x29\5READY\x0bSocket-Type\0\0\0\6DEALER\x08Identity\0\0\0\0"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheServer]:
    with CacheServer(tmp_path_factory.mktemp("hostile"), l1_size_gb=0.0625) as server:
        server.wait_ready()
        yield server
        assert server.alive(), server.log()
        assert "Traceback" not in server.log()
        until(lambda: not server.status()["instances"] and not held(server))
        assert server.stop() == 0


@pytest.fixture
def honest(server: CacheServer) -> Iterator[SmallEngine]:
    """An engine whose stored chunk must survive whatever the test does."""
    with SmallEngine(server.port) as engine:
        engine.store(engine.tokens(1, 2))
        yield engine
        reply = engine.lookup("after", engine.tokens(1, 2))
        assert reply.chunks == 2
        assert engine.read(reply)


@contextlib.contextmanager
def dealer(server: CacheServer) -> Iterator[Any]:
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 2000)
    client.setsockopt(zmq.RCVTIMEO, 10_000)
    client.connect(f"tcp://127.0.0.1:{server.port}")
    try:
        yield client
    finally:
        client.close()
        context.term()


def errors(server: CacheServer) -> float:
    return server.metric("lmcache_mp_protocol_errors_total")


class Explosive:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


def test_pickles_are_never_executed(server: CacheServer, honest: SmallEngine, tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    before = errors(server)
    with dealer(server) as client:
        count = 0
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            bomb = pickle.dumps(Explosive(trap), protocol)
            client.send_multipart([bomb])
            client.send_multipart([bytes(8), bomb, b""])
            for method in m.METHODS:
                client.send_multipart([struct.pack("<Q", count), method.encode(), bomb])
                client.send_multipart([struct.pack("<Q", count), method.encode(), msgspec.msgpack.encode([bomb, bomb])])
                count += 2
        answers = [client.recv_multipart() for _ in range(count)]
        # An empty message has no field that the pickle could be.
        assert {status for _, status, _ in answers} <= {b"bad_request", b"unknown_method", b"ok"}
    assert not trap.exists()
    assert errors(server) > before


def test_random_frames(server: CacheServer, honest: SmallEngine) -> None:
    random_ = random.Random(SEED)
    with dealer(server) as client:
        for _ in range(3000):
            frames = [random_.randbytes(random_.choice((0, 1, 7, 8, 9, 40))) for _ in range(random_.randint(1, 6))]
            client.send_multipart(frames)
    wait_for_an_answer(honest)


def test_random_payloads_for_every_method(server: CacheServer, honest: SmallEngine) -> None:
    random_ = random.Random(SEED + 1)
    with dealer(server) as client:
        sent = 0
        for method in m.METHODS:
            for _ in range(150):
                client.send_multipart(
                    [struct.pack("<Q", sent), method.encode(), random_.randbytes(random_.randint(0, 60))]
                )
                sent += 1
        statuses = {client.recv_multipart()[1] for _ in range(sent)}
    assert b"internal" not in statuses
    assert b"bad_request" in statuses


def test_well_formed_nonsense_for_every_method(server: CacheServer, honest: SmallEngine) -> None:
    """Right types, wild values: nothing may be answered with a fault of the server."""
    random_ = random.Random(SEED + 2)
    wild_integers = (-(2**63), -1, 0, 1, 2, 255, 2**31, 2**32, 2**53, 2**63 - 1)
    wild_texts = ("", "\0", "engine-x", "../../etc/passwd", "é" * 200, "x" * 600, honest.instance_id)
    wild_floats = (0.0, -1.0, 1e308, float("inf"), float("-inf"), float("nan"), 1e-300)

    def wild(kind: Any) -> Any:
        if kind is int:
            return random_.choice(wild_integers)
        if kind is str:
            return random_.choice(wild_texts)
        if kind in (bytes, memoryview):
            return random_.randbytes(random_.choice((0, 1, 4, 31, 32, 64, 1024)))
        if kind is float:
            return random_.choice(wild_floats)
        if kind is bool:
            return random_.random() < 0.5
        if kind == list[str]:
            return [random_.choice((*wild_texts, "ab" * 16)) for _ in range(random_.randint(0, 3))]
        if kind == list[int]:
            return [random_.choice(wild_integers) for _ in range(random_.randint(0, 3))]
        return [(random_.choice(wild_integers), random_.randbytes(random_.choice((0, 32)))) for _ in range(2)]

    with dealer(server) as client:
        sent = 0
        for method, (request, _) in m.METHODS.items():
            if method == "clear":  # would rightly remove the honest engine's chunks
                continue
            kinds = [kind for name, kind in get_type_hints(request).items() if name in request.__struct_fields__]
            for _ in range(300):
                values = [wild(kind) for kind in kinds]
                # The honest engine's own registration is its business; anybody may name it, as on any trusted port.
                if method in ("register_instance", "register_worker", "unregister") and values[0] == honest.instance_id:
                    values[0] = "somebody else"
                client.send_multipart([struct.pack("<Q", sent), method.encode(), msgspec.msgpack.encode(values)])
                sent += 1
        answers = [client.recv_multipart() for _ in range(sent)]
        assert sorted(struct.unpack("<Q", call_id)[0] for call_id, _, _ in answers) == list(range(sent))
        faults = [msgspec.msgpack.decode(payload) for _, status, payload in answers if status == b"internal"]
        assert not faults
        unregister_all_but(honest.instance_id, server, client)
    honest.end("")


def unregister_all_but(kept: str, server: CacheServer, client: Any) -> None:
    for shown in server.status()["instances"]:
        if shown["instance_id"] != kept:
            for worker in (-1, *shown["workers"]):
                payload = msgspec.msgpack.encode([shown["instance_id"], worker])
                client.send_multipart([bytes(8), b"unregister", payload])
                assert client.recv_multipart()[1] == b"ok"


def test_messages_that_are_nearly_right(server: CacheServer) -> None:
    """Those of a real engine with a fault in each, as many as TEST_HOSTILE_MESSAGES says; nothing grows by them."""
    random_ = random.Random(SEED + 3)
    golden = json.loads(GOLDEN.read_text())
    right = {method: bytes.fromhex(golden[request.__name__]) for method, (request, _) in m.METHODS.items()}
    watch = MemoryWatch(server=lambda: private_bytes(server.pid))
    with dealer(server) as client:
        for _ in range(0, MESSAGES, BATCH):
            for number in range(BATCH):
                method = random_.choice(list(right))
                payload = with_a_fault(random_, random_.choice((right[method], random_.choice(list(right.values())))))
                client.send_multipart([struct.pack("<Q", number), method.encode(), payload])
            answers = [client.recv_multipart() for _ in range(BATCH)]
            assert sorted(struct.unpack("<Q", call_id)[0] for call_id, _, _ in answers) == list(range(BATCH))
            assert not [payload for _, status, payload in answers if status == b"internal"]
            unregister_all_but("", server, client)
            watch.sample()
    print(watch.check())
    with SmallEngine(server.port) as honest:
        honest.store(honest.tokens(1, 2))
        reply = honest.lookup("after", honest.tokens(1, 2))
        assert reply.chunks == 2 and honest.read(reply)


def with_a_fault(random_: random.Random, payload: bytes) -> bytes:
    at = random_.randrange(len(payload))
    kind = random_.randrange(4)
    if kind == 0:
        return payload[:at] + bytes([payload[at] ^ 1 << random_.randrange(8)]) + payload[at + 1 :]
    if kind == 1:
        return payload[:at] + random_.randbytes(random_.randrange(1, 6)) + payload[at:]
    if kind == 2:
        return payload[:at]
    fields = msgspec.msgpack.decode(payload) or [0]
    fields[random_.randrange(len(fields))] = random_.choice((None, -1, 2**63, 0.5, "", "é", b"", [], [[]], {}, True))
    return msgspec.msgpack.encode(fields)


def test_raw_bytes_on_the_port(server: CacheServer, honest: SmallEngine) -> None:
    random_ = random.Random(SEED + 3)
    blasts = [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + bytes(200),
        b"\0" * 100_000,
        b"\xff" * 100_000,
        GREETING,
        GREETING[:20],
        GREETING + READY,
        GREETING + READY + b"\2" + b"\xff" * 8 + b"x" * 1000,  # a frame of 2^64 - 1 bytes
        GREETING + READY + b"\2" + struct.pack(">Q", 1 << 40) + b"x" * 1000,
        GREETING + READY + b"\4\xff" + b"x" * 10,
        GREETING + READY + b"\1\0" * 50_000,  # a message of empty frames that does not end
        *(GREETING + READY + random_.randbytes(random_.randint(1, 300)) for _ in range(60)),
        *(random_.randbytes(random_.randint(1, 300)) for _ in range(60)),
    ]
    for number, blast in enumerate(blasts):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10.0) as raw, contextlib.suppress(OSError):
            raw.sendall(blast)
            if number % 7 == 0:  # the others vanish at once
                wait_for_an_answer(honest)
    wait_for_an_answer(honest)


@pytest.mark.parametrize("frame_bytes", [0, 1, 1 << 20])
def test_a_message_that_does_not_end_is_not_held(server: CacheServer, honest: SmallEngine, frame_bytes: Any) -> None:
    """Frames that all announce another one: what has arrived of one message is limited as a whole."""
    frame = (b"\1" + bytes([frame_bytes]) if frame_bytes < 256 else b"\3" + struct.pack(">Q", frame_bytes)) + bytes(
        frame_bytes
    )
    blast = frame * ((8 << 20) // len(frame))
    before = private_bytes(server.pid)
    with contextlib.ExitStack() as connections:
        for _ in range(4):
            raw = connections.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10.0))
            with contextlib.suppress(OSError):  # the server hangs up
                raw.sendall(GREETING + READY)
                for _ in range(20):
                    raw.sendall(blast)
        wait_for_an_answer(honest)
        assert private_bytes(server.pid) - before < 64 * limits.MIB


def test_unfinished_messages_of_many_connections_are_limited_together(server: CacheServer, honest: SmallEngine) -> None:
    """Each stays within what one message may have; the oldest goes when all together are beyond what they may have."""
    begun = GREETING + READY + b"\2" + struct.pack(">Q", limits.MAX_MESSAGE_BYTES) + bytes(12 * limits.MIB)
    before = private_bytes(server.pid)
    with contextlib.ExitStack() as connections:
        for _ in range(60):  # 720 MiB
            raw = connections.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10.0))
            raw.sendall(begun)
        wait_for_an_answer(honest)
        assert private_bytes(server.pid) - before < 2 * limits.MAX_UNFINISHED_BYTES
        assert len(honest.lookup("big", bytes(12 * limits.MIB)).hashes) == 32 * 12 * limits.MIB // 1024
        honest.end("big")
    until(lambda: private_bytes(server.pid) - before < 128 * limits.MIB)


def test_lists_beyond_their_limit_cost_nothing(server: CacheServer, honest: SmallEngine) -> None:
    """30 calls of 20 MB once cost 3.3 GB and held every other call up for seconds."""
    before = private_bytes(server.pid)
    payload = msgspec.msgpack.encode([honest.instance_id, 1, [0] * (19 * limits.MIB)])
    waits: list[float] = []
    statuses: list[bytes] = []
    with dealer(server) as client:
        for number in range(30):
            client.send_multipart([struct.pack("<Q", number), b"release", payload])
        while len(statuses) < 30:
            waits.append(wait_for_an_answer(honest))
            while client.poll(0):
                statuses.append(client.recv_multipart()[1])
        assert set(statuses) == {b"bad_request"}
        assert private_bytes(server.pid) - before < 128 * limits.MIB
    *others, longest = sorted(waits)  # the machine may have stood still in one of them
    print(f"the longest of {len(waits)} calls meanwhile took {longest:.3f} s, the next {others[-1]:.3f} s")
    assert len(waits) >= 30 and others[-1] < LONGEST_WAIT_SECONDS


def test_refused_calls_leave_nothing_in_a_session(server: CacheServer, honest: SmallEngine) -> None:
    """Calls that go back in a session and are then refused once used up what all sessions may have."""
    chunk_tokens = honest.client.hello.chunk_tokens
    tokens, extra = bytes(4 * chunk_tokens * 4000), bytes(range(32))
    with dealer(server) as client:

        def call(first: int, count: int, extras: list[Any]) -> bytes:
            message = m.Append(honest.instance_id, "r", "", first, tokens[: 4 * count], b"", extras)
            client.send_multipart([bytes(8), b"append", msgspec.msgpack.encode(message)])
            return client.recv_multipart()[1]

        for _ in range(5):
            assert call(0, 4000 * chunk_tokens, []) == b"ok"
            counted = server.status()["session_bytes"]
            assert call(chunk_tokens, 0, [(0, extra)]) == b"bad_request"
            assert call(chunk_tokens, 0, [(number, extra) for number in range(400_000)]) == b"bad_request"
            assert server.status()["session_bytes"] == counted
    honest.end("r")
    assert server.status()["session_bytes"] == 0


def test_messages_beyond_the_limit(server: CacheServer, honest: SmallEngine) -> None:
    with dealer(server) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.send_multipart([bytes(8), b"lookup", bytes(limits.MAX_MESSAGE_BYTES + 1)])
        wait_for_an_answer(honest)


def test_many_connections_that_say_nothing(server: CacheServer, honest: SmallEngine) -> None:
    with contextlib.ExitStack() as all_of_them:
        for _ in range(300):
            all_of_them.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10.0))
        wait_for_an_answer(honest)


def test_a_client_that_calls_and_never_reads(server: CacheServer, honest: SmallEngine) -> None:
    with dealer(server) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RCVHWM, 1)
        for number in range(20_000):
            with contextlib.suppress(zmq.Again):
                client.send_multipart([struct.pack("<Q", number), b"hello", b"\x91\1"], zmq.NOBLOCK)
        wait_for_an_answer(honest)


def test_more_tokens_and_chunks_than_allowed(server: CacheServer, honest: SmallEngine) -> None:
    engine = honest.instance_id
    beyond = [
        ("lookup", m.Lookup(engine, "big", "", 0, bytes(4 * limits.MAX_TOKENS_PER_SESSION + 4))),
        ("append", m.Append(engine, "big", "", limits.MAX_TOKENS_PER_SESSION, bytes(4))),
        ("reserve", m.Reserve(engine, 0, "", bytes(32 * limits.MAX_CHUNKS_PER_CALL + 32))),
    ]
    with dealer(server) as client:
        for method, message in beyond:
            client.send_multipart([bytes(8), method.encode(), msgspec.msgpack.encode(message)])
            assert client.recv_multipart()[1] in (b"bad_request", b"too_large", b"unknown_session")
    honest.end("big")


def wait_for_an_answer(engine: SmallEngine) -> float:
    """The seconds that it took."""
    started = time.monotonic()
    assert engine.client.call("noop", m.Empty(), CALL_SECONDS) == m.Empty()
    seconds = time.monotonic() - started
    assert seconds < 0.5 * CALL_SECONDS
    return seconds
