"""What it costs to be watched: lookups with metrics and with spans beside lookups without either, lookups while
others ask over HTTP for everything there is, and a scrape of many salts.

Servers that are compared run side by side and are asked in turn, each request under a name of its own.
"""

from __future__ import annotations

import array
import multiprocessing
import socket
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from lmcache import _native
from lmcache.cli.bench_timing import timed
from lmcache.client.client import Client
from lmcache.core.frame import header_template
from lmcache.core.key import CHUNK_HASH_BYTES, Namespace
from lmcache.protocol.messages import (
    Append,
    Commit,
    EndSession,
    Lookup,
    RegisterInstance,
    RegisterWorker,
    Release,
    Reserve,
)
from lmcache.testing.processes import LOOPBACK, CacheServer, free_port
from measure import Result, at_most, command_line, processor_seconds, report, spread

INSTANCE, MODEL = "bench-observability", "bench"
LAYOUT = "0" * 32
PAYLOAD_BYTES = 512
SLOT_BYTES = 8192
CHUNK_TOKENS = 256
CHUNKS = 500
TIMEOUT_SECONDS = 30.0
IN_A_ROW = 5
SCRAPES_A_SECOND = 50
LISTING = "/cache/objects?page_size=10000"
SCRAPED = ("/metrics", "/status", LISTING)
_ENTRY, _NEXT_PAGE = b'{"key":"', b'"next_page_token":"'


def receiver(port: int) -> None:
    """An OpenTelemetry receiver over gRPC that takes everything and keeps nothing."""
    import grpc

    server = grpc.server(futures.ThreadPoolExecutor(2))
    for signal in ("trace", "metrics"):
        name = f"opentelemetry.proto.collector.{signal}.v1.{signal.capitalize()}Service"
        handler = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, {"Export": handler})])
    server.add_insecure_port(f"{LOOPBACK}:{port}")
    server.start()
    server.wait_for_termination()


class Engine:
    """A client of one server, which has stored a prompt of 500 chunks."""

    def __init__(self, server: CacheServer) -> None:
        self.server = server
        self.client = Client(f"tcp://{LOOPBACK}:{server.port}")
        self.client.register(RegisterInstance(INSTANCE, MODEL, 1, 1, 10.0, "bench"), TIMEOUT_SECONDS)
        self.client.register(RegisterWorker(INSTANCE, 0, 0, [LAYOUT], [PAYLOAD_BYTES]), TIMEOUT_SECONDS)
        self.tokens = array.array("I", range(CHUNKS * CHUNK_TOKENS)).tobytes()
        self.store(self.tokens)
        self.requests = 0

    def call(self, method: str, message: object) -> object:
        return self.client.call(method, message, TIMEOUT_SECONDS)  # type: ignore[arg-type]

    def store(self, tokens: bytes, salt: str = "", *, is_sealed: bool = True) -> None:
        """The frames have headers, by which listings tell whose they are. Without, their memory is not touched."""
        hashes = self.call("append", Append(INSTANCE, "store", salt, 0, tokens)).hashes  # type: ignore[attr-defined]
        reserved = self.call("reserve", Reserve(INSTANCE, 0, salt, hashes))
        if is_sealed:
            self._seal(hashes, reserved.slots, salt)  # type: ignore[attr-defined]
        self.call("commit", Commit(INSTANCE, 0, reserved.reservation))  # type: ignore[attr-defined]
        self.call("end_session", EndSession(INSTANCE, "store"))

    def _seal(self, hashes: bytes, slots: bytes, salt: str) -> None:
        assert self.client.memory is not None
        template = header_template(Namespace(MODEL, 1, 0, 0, LAYOUT, salt), PAYLOAD_BYTES)
        for number, slot in enumerate(array.array("Q", slots)):
            chunk_hash = hashes[number * CHUNK_HASH_BYTES : (number + 1) * CHUNK_HASH_BYTES]
            _native.frame_seal(self.client.memory.address + slot, template, chunk_hash)

    def request(self) -> float:
        """Seconds of the lookup of a new request, which is released and ended then."""
        self.requests += 1
        name = f"request-{self.requests}"
        started = time.perf_counter()
        reply = self.call("lookup", Lookup(INSTANCE, name, "", 0, self.tokens))
        seconds = time.perf_counter() - started
        if reply.chunks != CHUNKS:  # type: ignore[attr-defined]
            raise RuntimeError(f"{reply.chunks} chunks are there, {reply.miss_reason}, where {CHUNKS} are stored")  # type: ignore[attr-defined]
        self.call("release", Release(INSTANCE, reply.lease))  # type: ignore[attr-defined]
        self.call("end_session", EndSession(INSTANCE, name))
        return seconds


@contextmanager
def engines(*options: tuple[str, ...], l1_size_gb: float = 0.25) -> Iterator[list[Engine]]:
    """One for each server that is started, with these options."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmcache-bench-")))
        servers = []
        for number, extra in enumerate(options):
            place = folder / str(number)
            place.mkdir()
            servers.append(stack.enter_context(CacheServer(place, l1_size_gb=l1_size_gb, extra=extra)))
        for server in servers:
            server.wait_ready()
        made = [Engine(server) for server in servers]
        yield made
        for engine in made:
            engine.client.close()


def watched(runs: int) -> list[Result]:
    """Lookups of servers without metrics, with them, and with spans of every request for a receiver that takes them and
    for one that never answers."""
    port = free_port()
    receiving = multiprocessing.get_context("spawn").Process(target=receiver, args=(port,), daemon=True)
    receiving.start()
    spans = ("--enable-tracing", "--trace-sample-rate", "1.0", "--otlp-endpoint")
    names = ("nothing", "metrics", "metrics and spans", "spans for a silent receiver")
    with (
        socket.create_server((LOOPBACK, 0)) as silent,
        engines(
            *(("--disable-metrics",), (), (*spans, f"http://{LOOPBACK}:{port}")),
            (*spans, f"http://{LOOPBACK}:{silent.getsockname()[1]}"),
        ) as compared,
    ):
        times: list[list[float]] = [[] for _ in compared]
        used = [0.0] * len(compared)
        for turn in range(runs + 1):
            for place in range(len(compared)):
                number = (turn + place) % len(compared)  # whoever comes first finds other caches than whoever follows
                engine = compared[number]
                before = processor_seconds(engine.server.pid)
                seconds = [engine.request() for _ in range(IN_A_ROW)]
                if turn:  # the first warms up
                    times[number] += seconds
                    used[number] += processor_seconds(engine.server.pid) - before
    receiving.kill()
    medians = [statistics.median(each) for each in times]
    results = [Result(f"lookup of {CHUNKS}, {names[0]} counted", medians[0] * 1e3, "ms", detail=spread(times[0], 1e3))]
    for number, limit in ((1, 1.02), (2, 1.05), (3, 1.05)):
        name = f"lookup of {CHUNKS}, {names[number]} / nothing"
        processor = (
            f"processor us a request {used[number] / len(times[number]) * 1e6:.0f}, {used[0] / len(times[0]) * 1e6:.0f}"
        )
        results.append(at_most(name, medians[number] / medians[0], "ratio", limit, processor))
    return results


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * len(values))]


class Storm:
    """Asks over HTTP, 50 times a second, for the metrics, the status and the objects, page after page, while it is
    entered. The listing begins at `page_token`, and again at its end."""

    def __init__(self, port: int, page_token: str) -> None:
        self._url = f"http://{LOOPBACK}:{port}"
        self.page_token = page_token
        self.listed = 0  # objects
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(path,)) for path in SCRAPED]
        self.answers = 0

    def _run(self, path: str) -> None:
        following = time.monotonic()
        while not self._ended.is_set():
            token = f"&page_token={self.page_token}" if path is LISTING else ""
            with urllib.request.urlopen(self._url + path + token, timeout=TIMEOUT_SECONDS) as answer:
                body = answer.read()
            self.answers += 1
            if path is LISTING:
                self.listed += body.count(_ENTRY)
                self.page_token = body.rpartition(_NEXT_PAGE)[2].partition(b'"')[0].decode()
            following += len(SCRAPED) / SCRAPES_A_SECOND
            self._ended.wait(max(0.0, following - time.monotonic()))

    def __enter__(self) -> Storm:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


def in_a_storm(port: int, seconds: float, page_token: str, counts: Connection) -> None:
    with Storm(port, page_token) as storm:
        time.sleep(seconds)
    counts.send((storm.answers, storm.listed, storm.page_token))


class StormProcess:
    """A storm in a process of its own, so that its work is not that of the client that measures."""

    def __init__(self, port: int, seconds: float, page_token: str) -> None:
        self._counts, sending = multiprocessing.Pipe(duplex=False)
        arguments = (port, seconds, page_token, sending)
        self._process = multiprocessing.get_context("spawn").Process(target=in_a_storm, args=arguments, daemon=True)
        self.answers, self.listed, self.page_token = 0, 0, page_token

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def __enter__(self) -> StormProcess:
        self._process.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.join()
        if self._counts.poll():
            self.answers, self.listed, self.page_token = self._counts.recv()


def stormed(objects: int, salts: int, seconds: float, storms: int) -> list[Result]:
    """A scrape with many salts, and lookups with a million objects in L1 while others ask over HTTP: in turn for
    nothing, for the same of another server on this machine, which tells what the work of the machine costs, and of this
    one."""
    room_gb = objects * SLOT_BYTES / (1 << 30) * 1.3 + 0.1
    with engines((), ("--l1-size-gb", "0.25"), l1_size_gb=room_gb) as (engine, other):
        for each in (engine, other):
            for number in range(salts):
                each.store(array.array("I", [number] * CHUNK_TOKENS).tobytes(), f"salt-{number}")
        page = f"http://{LOOPBACK}:{engine.server.http_port}/metrics"
        scrapes = [timed(lambda: urllib.request.urlopen(page).read()) for _ in range(21)]
        for first in range(1, objects // CHUNKS):
            engine.store(array.array("I", range(first, first + CHUNKS * CHUNK_TOKENS)).tobytes(), is_sealed=False)
        calm: list[float] = []
        elsewhere: list[float] = []
        here: list[float] = []
        answers, listed, token = 0, 0, ""
        for _ in range(storms):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                calm.append(engine.request())
            for times, server in ((elsewhere, other.server), (here, engine.server)):
                is_here = server is engine.server
                with StormProcess(server.http_port, seconds + 1.0, token if is_here else "") as storm:
                    time.sleep(0.5)
                    while storm.is_alive():
                        times.append(engine.request())
                answers += storm.answers
                if is_here:
                    listed, token = listed + storm.listed, storm.page_token
    shown = [f"{percentile(times, 0.99) * 1e3:.2f}" for times in (calm, elsewhere, here)]
    rate = answers / (2 * storms * (seconds + 1))
    detail = (
        f"p99 calm {shown[0]}, elsewhere {shown[1]}, here {shown[2]} ms, {rate:.0f} answers a second, {listed:,} listed"
    )
    ratio = percentile(here, 0.99) / percentile(calm, 0.99)
    return [
        at_most(f"/metrics with {salts} salts", statistics.median(scrapes) * 1e3, "ms", 20, spread(scrapes, 1e3)),
        at_most(f"p99 of a lookup in a storm / calm, {objects:,} objects", ratio, "ratio", 1.2, detail),
    ]


def main() -> int:
    parser = command_line(__doc__, runs=600)
    parser.add_argument("--objects", type=int, default=1_000_000)
    parser.add_argument("--salts", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a storm")
    parser.add_argument("--storms", type=int, default=5)
    arguments = parser.parse_args()
    return report(
        [*watched(arguments.runs), *stormed(arguments.objects, arguments.salts, arguments.seconds, arguments.storms)],
        arguments.json,
    )


if __name__ == "__main__":
    sys.exit(main())
