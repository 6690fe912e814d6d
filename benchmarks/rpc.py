"""Calls to a real server, tokens included, beside a bare ZMQ echo of the same size in the same run.

The floor is what a Python process needs to send so many bytes to another one over ZMQ and get a short answer.
"""

from __future__ import annotations

import array
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path

import zmq

from lmcache.cli.bench_timing import timed
from lmcache.client.client import Client
from lmcache.protocol.messages import (
    Append,
    Commit,
    Empty,
    EndSession,
    Lookup,
    RegisterInstance,
    RegisterWorker,
    Release,
    Reserve,
)
from lmcache.protocol.tokens import pack_tokens
from lmcache.testing.processes import CacheServer
from measure import Result, at_least, at_most, command_line, processor_seconds, report, spread

CHUNK_TOKENS = 256
INSTANCE = "bench-rpc"
LAYOUT = "0" * 32
PAYLOAD_BYTES = 4096
SLOT_BYTES = 8192
MANY_CLIENTS = 4
MANY_CHUNKS = 32
TIMEOUT_SECONDS = 20.0
CALLS_IN_A_ROW = 10
NO_OP_ROUNDS = 40
LOOKUP_ROUNDS = 4


def medians_in_turn(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """What is compared is measured in turn, so that the moods of the machine meet all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            for _ in range(CALLS_IN_A_ROW):
                times[name].append(timed(call))
    return {name: statistics.median(values) for name, values in times.items()}


# ---- the floor -------------------------------------------------------------------------------------------------------
def echo_server(port: int) -> None:
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(f"tcp://127.0.0.1:{port}")
    while True:
        peer, call_id, _, _ = router.recv_multipart()
        router.send_multipart([peer, call_id, b"ok", b"\x90"])


class Echo:
    def __init__(self, port: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def call(self, payload: bytes) -> None:
        self._socket.send_multipart([bytes(8), b"noop", payload])
        self._socket.recv_multipart()

    def close(self) -> None:
        self._context.destroy(linger=0)


# ---- one client ------------------------------------------------------------------------------------------------------
class Calls:
    """Medians of every call, run by run."""

    def __init__(self, client: Client, echo: Echo, chunks: int) -> None:
        self.client = client
        self.echo = echo
        self.chunks = chunks
        self.times: dict[str, list[float]] = {}
        source = random.Random(7)
        self.stored = [source.randrange(1 << 17) for _ in range(chunks * CHUNK_TOKENS)]

    def call(self, method: str, message: object) -> object:
        return self.client.call(method, message, TIMEOUT_SECONDS)  # type: ignore[arg-type]

    def store(self, tokens: bytes, request: str) -> tuple[float, float]:
        """Seconds of the reserve and of the commit."""
        hashes = self.call("append", Append(INSTANCE, request, "", 0, tokens)).hashes  # type: ignore[attr-defined]
        reserve = Reserve(INSTANCE, 0, "", hashes)
        started = time.perf_counter()
        reserved = self.call("reserve", reserve)
        reserve_seconds = time.perf_counter() - started
        commit = Commit(INSTANCE, 0, reserved.reservation)  # type: ignore[attr-defined]
        commit_seconds = timed(lambda: self.call("commit", commit))
        self.call("end_session", EndSession(INSTANCE, request))
        return reserve_seconds, commit_seconds

    def run(self, number: int) -> None:
        packed = pack_tokens(self.stored)
        other = pack_tokens([number + 1] * CHUNK_TOKENS + self.stored[CHUNK_TOKENS:])
        seconds = medians_in_turn(
            {
                "floor, nothing in it": lambda: self.echo.call(b"\x90"),
                "no-op": lambda: self.call("noop", Empty()),
            },
            NO_OP_ROUNDS,
        )
        seconds |= medians_in_turn(
            {
                "floor, the tokens in it": lambda: self.echo.call(packed),
                "lookup, all hit, packed tokens": lambda: self.lookup(packed),
                "lookup, all hit, list of ints": lambda: self.lookup(pack_tokens(self.stored)),
                "lookup, no hit, packed tokens": lambda: self.lookup(other),
                "packing the list": lambda: pack_tokens(self.stored),
            },
            LOOKUP_ROUNDS,
        )
        reserves, commits = [], []
        for turn in range(8):
            first = [number * 1000 + turn + 1_000_000]
            reserve, commit = self.store(pack_tokens(first + self.stored[1:]), f"store-{turn}")
            reserves.append(reserve)
            commits.append(commit)
        seconds["reserve"] = statistics.median(reserves)
        seconds["commit"] = statistics.median(commits)
        lookup = self.lookup(packed)
        seconds["release"] = timed(lambda: self.call("release", Release(INSTANCE, lookup)))
        self.call("end_session", EndSession(INSTANCE, "lookup"))
        for name, value in seconds.items():
            self.times.setdefault(name, []).append(value)

    def lookup(self, tokens: bytes) -> int:
        """Ends the lease of the one before, as a second lookup of a request does."""
        reply = self.call("lookup", Lookup(INSTANCE, "lookup", "", 0, tokens))
        return int(reply.lease)  # type: ignore[attr-defined]


# ---- many clients ----------------------------------------------------------------------------------------------------
def lookups_in_a_row(
    port: int, number: int, chunks: int, windows: int, seconds: float, go: Event, counts: object
) -> None:
    client = Client(f"tcp://127.0.0.1:{port}", map_memory=False)
    client.connect(TIMEOUT_SECONDS)
    message = Lookup(INSTANCE, f"client-{number}", "", 0, shared_prompt(chunks))
    if client.call("lookup", message, TIMEOUT_SECONDS).chunks != chunks:
        raise SystemExit("the prompt is not cached")
    counts.put((0, 0.0))  # type: ignore[attr-defined]
    go.wait()
    for _ in range(windows):
        count, end, used = 0, time.perf_counter() + seconds, processor_seconds(os.getpid())
        while time.perf_counter() < end:
            client.call("lookup", message, TIMEOUT_SECONDS)
            count += 1
        counts.put((count, processor_seconds(os.getpid()) - used))  # type: ignore[attr-defined]
    client.call("end_session", EndSession(INSTANCE, f"client-{number}"), TIMEOUT_SECONDS)
    client.close()


def shared_prompt(chunks: int) -> bytes:
    return array.array("I", range(5_000_000, 5_000_000 + chunks * CHUNK_TOKENS)).tobytes()


def many_clients(server: CacheServer, clients: int, windows: int, seconds: float) -> tuple[list[float], float, float]:
    """Lookups a second of all clients together, window by window; processor seconds a lookup of server and client."""
    spawn = multiprocessing.get_context("spawn")
    go, counts = spawn.Event(), spawn.Queue()
    arguments = [(server.port, number, MANY_CHUNKS, windows, seconds, go, counts) for number in range(clients)]
    processes = [spawn.Process(target=lookups_in_a_row, args=call, daemon=True) for call in arguments]
    for process in processes:
        process.start()
    for _ in processes:
        counts.get(timeout=60)
    before = processor_seconds(server.pid)
    go.set()
    # Clients end their windows at nearly the same time, so each window is one count of each client.
    ended = [[counts.get(timeout=60) for _ in processes] for _ in range(windows)]
    used = processor_seconds(server.pid) - before
    for process in processes:
        process.join(timeout=60)
    totals = [sum(count for count, _ in window) for window in ended]
    used_by_clients = sum(seconds for window in ended for _, seconds in window)
    lookups = max(1, sum(totals))
    return [total / seconds for total in totals], used / lookups, used_by_clients / lookups


def main() -> int:
    parser = command_line(__doc__, runs=7)
    parser.add_argument("--chunks", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a window of many clients")
    arguments = parser.parse_args()
    port = 20_000 + os.getpid() % 20_000
    echo_process = multiprocessing.get_context("spawn").Process(target=echo_server, args=(port,), daemon=True)
    echo_process.start()
    room_gb = (arguments.runs + 2) * 9 * arguments.chunks * SLOT_BYTES / (1 << 30) + 0.1
    with (
        tempfile.TemporaryDirectory(prefix="lmcache-bench-") as name,
        CacheServer(Path(name), l1_size_gb=room_gb) as server,
    ):
        server.wait_ready()
        client, echo = Client(f"tcp://127.0.0.1:{server.port}"), Echo(port)
        client.register(RegisterInstance(INSTANCE, "bench", 1, 1, 10.0, "bench"), TIMEOUT_SECONDS)
        client.register(RegisterWorker(INSTANCE, 0, 0, [LAYOUT], [PAYLOAD_BYTES]), TIMEOUT_SECONDS)
        calls = Calls(client, echo, arguments.chunks)
        calls.store(pack_tokens(calls.stored), "stored")
        calls.store(shared_prompt(MANY_CHUNKS), "shared")
        for number in range(arguments.runs + 1):
            calls.run(number)
        rates = many_clients(server, MANY_CLIENTS, arguments.runs, arguments.seconds)
        client.close()
        echo.close()
    echo_process.kill()
    return report(results_of(calls, *rates), arguments.json)


def results_of(calls: Calls, rates: list[float], server_seconds: float, client_seconds: float) -> list[Result]:
    limits = {
        "no-op": 0.12,
        "lookup, all hit, packed tokens": 0.8,
        "lookup, all hit, list of ints": 1.6,
        "reserve": 0.8,
        "commit": 0.8,
    }
    medians = {name: statistics.median(times[1:]) for name, times in calls.times.items()}
    results = []
    for name, times in calls.times.items():
        value, detail = medians[name] * 1e3, spread(times[1:], 1e3)
        if name == "no-op":
            detail += f", {medians[name] / medians['floor, nothing in it']:.2f} x floor"
        elif name.startswith("lookup"):
            detail += f", {medians[name] / medians['floor, the tokens in it']:.2f} x floor"
        if name in limits:
            results.append(at_most(name, value, "ms", limits[name], detail))
        else:
            results.append(Result(name, value, "ms", detail=detail))
    name = f"{MANY_CLIENTS} clients, lookups of {MANY_CHUNKS} chunks"
    detail = f"{spread(rates)}, processor us each: server {server_seconds * 1e6:.0f}, client {client_seconds * 1e6:.0f}"
    results.append(at_least(name, statistics.median(rates), "a second", 5000.0, detail))
    return results


if __name__ == "__main__":
    sys.exit(main())
