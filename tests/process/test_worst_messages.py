"""The costliest message of each method, to a real server: what the server works for it, and others wait.

On a quiet machine that is below 50 ms each (0.13 s for 4 million tokens with an algorithm that is not the default); the
bound here leaves room for a busy one.
"""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from lmcache.core import limits
from lmcache.protocol import messages as m
from lmcache.testing.processes import CacheServer
from process.support import CALL_SECONDS, LAYOUT

TRIES = 3
BOUND_SECONDS = 0.25
TOKENS = random.Random(20240229).randbytes(4 * limits.MAX_TOKENS_PER_SESSION)
ALL_TOKENS = limits.MAX_TOKENS_PER_SESSION
EXTRAS = [(chunk, os.urandom(32)) for chunk in range(limits.MAX_EXTRAS_PER_SESSION)]


class Caller:
    def __init__(self, port: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, int(CALL_SECONDS * 1000))
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def send(self, method: str, message: m.Message) -> None:
        self._socket.send_multipart([struct.pack("<Q", 1), method.encode(), msgspec.msgpack.encode(message)])

    def receive(self, method: str) -> Any:
        _, status, payload = self._socket.recv_multipart()
        assert status == b"ok", payload
        return msgspec.msgpack.decode(payload, type=m.METHODS[method][1])

    def call(self, method: str, message: m.Message) -> Any:
        self.send(method, message)
        return self.receive(method)

    def close(self) -> None:
        self._context.destroy(linger=0)


class Bench:
    """An engine that sends what is costly."""

    def __init__(self, server: CacheServer) -> None:
        self.engine = Caller(server.port)
        self._pid = server.pid
        for name, groups in (("one", 1), ("wide", limits.MAX_OBJECT_GROUPS)):
            self.engine.call("register_instance", m.RegisterInstance(name, "model", 1, groups, 3000.0))
            payload_bytes = [4096] * groups
            self.engine.call(
                "register_worker", m.RegisterWorker(name, 0, 0, [LAYOUT] * groups, payload_bytes, True, 3000.0)
            )

    def cost(self, method: str, make: Callable[[], m.Message]) -> float:
        """Seconds of processor time that the server takes for a call, the least of several tries."""
        return min(self._cost(method, make()) for _ in range(TRIES))

    def _cost(self, method: str, message: m.Message) -> float:
        before = self._server_seconds()
        self.engine.call(method, message)
        return self._server_seconds() - before

    def _server_seconds(self) -> float:
        self.engine.call("noop", m.Empty())  # what is done behind an answer has ended
        return time.clock_gettime((~self._pid << 3) | 2)  # the clock of a process: clock_getcpuclockid(3)

    # ---- messages ----------------------------------------------------------------------------------------------------
    def hashes(self) -> bytes:
        reply: m.AppendReply = self.engine.call("append", m.Append("one", "hashes", "", 0, TOKENS))
        return reply.hashes

    def store_all(self) -> None:
        reply: m.ReserveReply = self.engine.call("reserve", m.Reserve("one", 0, "", self.hashes()))
        if reply.reservation:
            self.engine.call("commit", m.Commit("one", 0, reply.reservation))

    def unreadable(self) -> m.Release:
        self.store_all()
        reply: m.LookupReply = self.engine.call("lookup", m.Lookup("one", "leased", "", 0, TOKENS))
        assert reply.chunks == limits.MAX_CHUNKS_PER_CALL
        return m.Release("one", reply.lease, list(range(reply.chunks)))

    def reserved(self) -> m.Commit:
        reply: m.ReserveReply = self.engine.call("reserve", m.Reserve("wide", 0, "", self.hashes()))
        return m.Commit("wide", 0, reply.reservation, bytes(limits.MAX_SLOTS_PER_CALL))

    def messages(self) -> dict[str, tuple[str, Callable[[], m.Message]]]:
        hashes = self.hashes()
        return {
            "append": ("append", lambda: m.Append("one", "a", "", 0, TOKENS)),
            "append extras": ("append", lambda: m.Append("one", "e", "", 0, TOKENS, b"", EXTRAS)),
            "append extras again": ("append", lambda: m.Append("one", "e", "", ALL_TOKENS, b"", b"", EXTRAS)),
            "lookup a miss": ("lookup", lambda: m.Lookup("one", "l", "", 0, TOKENS, b"", EXTRAS)),
            "lookup in all groups": ("lookup", lambda: m.Lookup("wide", "l", "", 0, TOKENS)),
            "reserve": ("reserve", lambda: m.Reserve("wide", 0, "", hashes, bytes(limits.MAX_SLOTS_PER_CALL))),
            "commit": ("commit", self.reserved),
            "end": ("end_session", lambda: m.EndSession("one", "a")),
            "release of unreadable chunks": ("release", self.unreadable),
            "release of no lease": ("release", lambda: m.Release("one", 1 << 40, [0] * limits.MAX_CHUNKS_PER_CALL)),
            "clear": ("clear", lambda: m.Clear("l1")),
        }


@pytest.fixture(scope="module", params=["blake3", "sha256_cbor", "builtin"])
def bench(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    extra = ["--hash-algorithm", request.param]
    folder = tmp_path_factory.mktemp("worst")
    with CacheServer(folder, l1_size_gb=0.2, extra=extra, environment={"PYTHONHASHSEED": "0"}) as server:
        server.wait_ready()
        bench = Bench(server)
        yield bench
        assert "Traceback" not in server.log()
        bench.engine.close()


def test_no_message_holds_others_up(bench: Any) -> None:
    costs = {name: bench.cost(method, make) for name, (method, make) in bench.messages().items()}
    print({name: round(1000 * seconds, 1) for name, seconds in costs.items()})
    assert max(costs.values()) < BOUND_SECONDS, costs
