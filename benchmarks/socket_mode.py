"""Storing and retrieving frames over the socket, beside a bare ZMQ exchange of the same messages in the same run.

The floor sends and gets the same parts of 1 MiB with the same number of bytes on their way, and does nothing with them.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import zmq

from lmcache import _native
from lmcache.client.client import Client
from lmcache.client.socket_frames import Frame, FrameMover
from lmcache.client.transfer_mode import WantedTransfer
from lmcache.core.frame import header_template
from lmcache.core.key import Namespace
from lmcache.core.limits import FRAME_HEADER_BYTES, MAX_PAYLOAD_PART_BYTES, PAYLOAD_WINDOW_BYTES
from lmcache.protocol.messages import (
    Append,
    Commit,
    EndSession,
    Lookup,
    Ping,
    RegisterInstance,
    RegisterWorker,
    Reserve,
)
from lmcache.protocol.tokens import pack_tokens
from lmcache.testing.processes import CacheServer
from measure import MIB, Result, at_most, command_line, report, spread

CHUNK_TOKENS = 256
INSTANCE = "bench-socket"
LAYOUT = "0" * 32
PAYLOAD_BYTES = 2 * MIB
TIMEOUT_SECONDS = 20.0


# ---- the floor -------------------------------------------------------------------------------------------------------
def exchange_server(port: int) -> None:
    """Answers a part with a word, and a word with a part."""
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(f"tcp://127.0.0.1:{port}")
    part = bytes(MAX_PAYLOAD_PART_BYTES)
    while True:
        peer, call_id, payload = router.recv_multipart(copy=False)
        answer = part if len(payload) < MAX_PAYLOAD_PART_BYTES else b"ok"
        router.send(peer, zmq.SNDMORE, copy=False)
        router.send(call_id, zmq.SNDMORE, copy=False)
        router.send(answer, copy=False)


class Floor:
    def __init__(self, port: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def exchange(self, payload: bytes, count: int) -> None:
        window = PAYLOAD_WINDOW_BYTES // MAX_PAYLOAD_PART_BYTES
        for sent in range(count + window):
            if sent >= window:
                self._socket.recv_multipart()
            if sent < count:
                self._socket.send_multipart([bytes(8), payload])

    def close(self) -> None:
        self._context.destroy(linger=0)


# ---- frames ----------------------------------------------------------------------------------------------------------
class Engine:
    def __init__(self, port: int, chunks: int) -> None:
        self.client = Client(f"tcp://127.0.0.1:{port}", transfer=WantedTransfer.SOCKET)
        self.client.register(RegisterInstance(INSTANCE, "bench", 1, 1, 10.0, "bench"), TIMEOUT_SECONDS)
        self.client.register(RegisterWorker(INSTANCE, 0, 0, [LAYOUT], [PAYLOAD_BYTES]), TIMEOUT_SECONDS)
        self.mover = FrameMover(self.client, self.client.server_epoch, INSTANCE, 0, lambda: False)
        self.chunks = chunks
        self.memory = [memoryview(bytearray(FRAME_HEADER_BYTES + PAYLOAD_BYTES)) for _ in range(chunks)]
        self.template = header_template(Namespace("bench", 1, 0, 0, LAYOUT, ""), PAYLOAD_BYTES)

    def run(self, number: int) -> tuple[float, float]:
        """Seconds of a store, reserve and commit included, and of a retrieve, lookup and release included."""
        tokens = pack_tokens(
            [number * self.chunks + chunk for chunk in range(self.chunks) for _ in range(CHUNK_TOKENS)]
        )
        hashes = self.call("append", Append(INSTANCE, "store", "", 0, tokens)).hashes
        for chunk, memory in enumerate(self.memory):
            _native.frame_seal(_native.buffer_address(memory), self.template, hashes[32 * chunk : 32 * chunk + 32])
        frames = [Frame(0, chunk, memory) for chunk, memory in enumerate(self.memory)]
        started = time.perf_counter()
        reservation = self.call("reserve", Reserve(INSTANCE, 0, "", hashes)).reservation
        sent = self.mover.send(reservation, frames)
        committed = self.call("commit", Commit(INSTANCE, 0, reservation)).committed
        stored = time.perf_counter()
        hit = self.call("lookup", Lookup(INSTANCE, "load", "", 0, tokens))
        fetched = self.mover.fetch(hit.lease, frames)
        self.call("end_session", EndSession(INSTANCE, "load"))
        loaded = time.perf_counter()
        self.call("end_session", EndSession(INSTANCE, "store"))
        if not (all(sent) and all(fetched) and committed == hit.chunks == self.chunks):
            raise SystemExit("a frame did not arrive")
        return stored - started, loaded - stored

    def call(self, method: str, message: object):  # type: ignore[no-untyped-def]
        return self.client.call(method, message, TIMEOUT_SECONDS)  # type: ignore[arg-type]


def main() -> int:
    parser = command_line(__doc__, runs=9)
    parser.add_argument("--chunks", type=int, default=32, help="of 2 MiB")
    arguments = parser.parse_args()
    port = 20_000 + os.getpid() % 20_000
    floor_process = multiprocessing.get_context("spawn").Process(target=exchange_server, args=(port,), daemon=True)
    floor_process.start()
    times: dict[str, list[float]] = {
        "floor, to the server": [],
        "store": [],
        "floor, from the server": [],
        "retrieve": [],
    }
    parts = arguments.chunks * PAYLOAD_BYTES // MAX_PAYLOAD_PART_BYTES
    with (
        tempfile.TemporaryDirectory(prefix="lmcache-bench-") as name,
        CacheServer(Path(name), l1_size_gb=3 * arguments.chunks * PAYLOAD_BYTES / (1 << 30) + 0.05) as server,
    ):
        server.wait_ready()
        engine, floor = Engine(server.port, arguments.chunks), Floor(port)
        part = bytes(MAX_PAYLOAD_PART_BYTES)
        for number in range(arguments.runs + 2):
            started = time.perf_counter()
            floor.exchange(part, parts)
            times["floor, to the server"].append(time.perf_counter() - started)
            started = time.perf_counter()
            floor.exchange(b"?", parts)
            times["floor, from the server"].append(time.perf_counter() - started)
            stored, retrieved = engine.run(number)
            times["store"].append(stored)
            times["retrieve"].append(retrieved)
        pings = [ping_beside(engine, number) for number in range(3)]
        engine.client.close()
        floor.close()
    floor_process.kill()
    return report(results_of(times, pings, arguments.chunks), arguments.json)


def ping_beside(engine: Engine, number: int) -> float:
    """Seconds of one ping that is sent behind a full window."""
    client = Client(engine.client.endpoint, map_memory=False)
    client.connect(TIMEOUT_SECONDS)
    thread = threading.Thread(target=engine.run, args=(10_000 + number,))
    thread.start()
    slowest = 0.0
    while thread.is_alive():
        started = time.perf_counter()
        client.call("ping", Ping(), TIMEOUT_SECONDS)
        slowest = max(slowest, time.perf_counter() - started)
    thread.join()
    client.close()
    return slowest


def results_of(times: dict[str, list[float]], pings: list[float], chunks: int) -> list[Result]:
    medians = {name: statistics.median(values[2:]) for name, values in times.items()}
    results = []
    for name, values in times.items():
        detail = spread(values[2:], 1e3) + f", {chunks * PAYLOAD_BYTES / medians[name] / 1e9:.2f} GB/s"
        if name.startswith("floor"):
            results.append(Result(name, medians[name] * 1e3, "ms", detail=detail))
        else:
            floor = medians["floor, to the server" if name == "store" else "floor, from the server"]
            results.append(at_most(f"{name}, over floor", medians[name] / floor, "x", 3.0, detail))
    results.append(Result("slowest ping of another client meanwhile", max(pings) * 1e3, "ms"))
    return results


if __name__ == "__main__":
    sys.exit(main())
