"""`lmcache bench server`: measures calls and copies against a running server, or one that it starts."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmcache.cli.arguments import Arguments
from lmcache.cli.bench_load import CALL_SECONDS, Engine, Times, lookups_in_a_row, packed_tokens
from lmcache.cli.bench_timing import add_milliseconds, add_rate, best_copy_seconds
from lmcache.cli.output import Report, bytes_text
from lmcache.client.client import Client
from lmcache.core.limits import GIB, MIB
from lmcache.errors import LMCacheError, ResourceError
from lmcache.transport.curve_keys import CurveFiles

_SMALL_PAYLOAD_BYTES = 4096
_MAX_WARM_UPS = 8
_CLIENT_CHUNKS = 32
_CLIENT_SECONDS = 2.0
_CLIENT_START_SECONDS = 3.0


def run(argv: Sequence[str]) -> int:
    arguments = Arguments(
        "bench server",
        "Measures a server as an engine sees it: medians of calls, and copies beside a plain copy of the same run. "
        "Without --rpc-url a server is started for it. In a running server it leaves what it stored, as model "
        "lmcache-bench: in L1 and in any L2, until that is evicted or cleared.",
    )
    arguments.add_argument(
        "--rpc-url",
        default="",
        metavar="URL",
        help="a running server, like tcp://localhost:5555 or ipc:///run/lmcache.sock",
    )
    arguments.add_whole("--chunks", 32, "how many chunks are stored and retrieved at once", minimum=1, maximum=4096)
    arguments.add_number("--chunk-mib", 2.0, "size of one of them", unit="MiB", above=0, maximum=1024)
    arguments.add_whole("--lookup-chunks", 500, "length of a long lookup", unit="chunks", minimum=1, maximum=16_384)
    arguments.add_whole("--rounds", 9, "how often everything is done", minimum=1, maximum=10_000)
    arguments.add_whole("--clients", 4, "how many clients look up at once; 0 leaves that out", minimum=0, maximum=64)
    arguments.add_whole("--copy-threads", 1, "threads that copy", minimum=1, maximum=64)
    arguments.add_curve()
    options = arguments.read(argv[1:])
    curve = arguments.curve(options)
    payload_bytes = max(4096, int(options.chunk_mib * MIB) // 4096 * 4096)
    with _server(options, payload_bytes) as url:
        report = _measure(url, options, payload_bytes, curve)
    report.emit(options)
    return 0


@contextlib.contextmanager
def _server(options: argparse.Namespace, payload_bytes: int) -> Iterator[str]:
    if options.rpc_url:
        yield options.rpc_url
        return
    from lmcache.testing.processes import LOOPBACK, CacheServer

    # Small, so that memory is soon reused, as in a server that has run for a while.
    round_bytes = options.chunks * (payload_bytes + 4096) + 2 * options.lookup_chunks * 8192
    size_gb = max(0.1, round(3 * round_bytes / GIB, 2))
    with tempfile.TemporaryDirectory(prefix="lmcache-bench-") as folder:
        server = CacheServer(Path(folder), l1_size_gb=size_gb, extra=["--no-l1-use-lazy"])
        try:
            server.wait_ready()
            yield f"tcp://{LOOPBACK}:{server.port}"
        except RuntimeError as error:
            raise ResourceError(str(error).splitlines()[-1]) from None
        finally:
            server.stop()


def _measure(url: str, options: argparse.Namespace, payload_bytes: int, curve: CurveFiles | None) -> Report:
    client = Client(url, curve=curve)
    try:
        hello = client.connect(10.0)
        if client.memory is None:
            raise ResourceError(
                f"The memory of the server at {url} cannot be mapped here: run this on the server's host."
            )
        report = Report("Server bench")
        report.add("url", "Server", url)
        report.add("chunk_tokens", "Tokens per chunk", hello.chunk_tokens)
        report.add("rounds", "Rounds", options.rounds)
        _calls(report, client, options)
        _copies(report, client, options, payload_bytes)
        if options.clients:
            _many_clients(report, client, url, options.clients, curve)
        return report
    finally:
        client.close()


def _calls(report: Report, client: Client, options: argparse.Namespace) -> None:
    chunks = options.lookup_chunks
    engine = Engine(client, chunks, _SMALL_PAYLOAD_BYTES, options.copy_threads)
    try:
        hits, misses, times = Times(), Times(), Times()
        no_ops = [engine.no_op() for _ in range(max(100, options.rounds))]
        for number in range(options.rounds):
            tokens = engine.tokens(number)
            if engine.lookup(tokens, misses).chunks:
                raise LMCacheError("A lookup of tokens that were never stored was a hit.")
            engine.store(tokens, times)
            if (found := engine.lookup(tokens, hits)).chunks != chunks:
                raise LMCacheError(f"A lookup found {found.chunks} of {chunks} chunks that had just been stored.")
    finally:
        engine.close()
    report.section(f"calls of {chunks} chunks, tokens included")
    add_milliseconds(report, "no_op", "No-op", no_ops)
    add_milliseconds(report, "lookup_hit", "Lookup, all hit", hits.lookup)
    add_milliseconds(report, "lookup_miss", "Lookup, no hit", misses.lookup)
    add_milliseconds(report, "append", "Append", times.append)
    add_milliseconds(report, "reserve", "Reserve", times.reserve)
    add_milliseconds(report, "commit", "Commit", times.commit)
    add_milliseconds(report, "release", "Release", hits.release)


def _copies(report: Report, client: Client, options: argparse.Namespace, payload_bytes: int) -> None:
    engine = Engine(client, options.chunks, payload_bytes, options.copy_threads)
    size_bytes = options.chunks * payload_bytes
    try:
        assert client.hello is not None
        # Uses all of L1 once, so that page faults of first use are not measured.
        for number in range(min(_MAX_WARM_UPS, client.hello.shm_bytes // size_bytes + 2)):
            engine.store(engine.tokens(2_000_000 + number), Times())
        times, limits = Times(), []
        for number in range(options.rounds):
            tokens = engine.tokens(1_000_000 + number)
            engine.store(tokens, times)
            limits.append(best_copy_seconds(engine.target.address, engine.source.address, size_bytes, 1))
            engine.target.map[:] = bytes(size_bytes)
            engine.lookup(tokens, times, copy=True)
            if not engine.came_back_the_same():
                raise LMCacheError("What was retrieved differs from what was stored.")
        limit_seconds = statistics.median(limits)
    finally:
        engine.close()
    store = [
        reserve + copy + commit
        for reserve, copy, commit in zip(times.reserve, times.copy_in, times.commit, strict=True)
    ]
    retrieve = [lookup + copy for lookup, copy in zip(times.lookup, times.copy_out, strict=True)]
    report.section(f"{options.chunks} chunks of {bytes_text(payload_bytes)}, verified")
    add_rate(report, "limit", "Limit: a plain copy, one thread", size_bytes, limit_seconds)
    add_rate(report, "store", "Store: reserve, copy, commit", size_bytes, statistics.median(store), limit_seconds)
    add_rate(report, "retrieve", "Retrieve: lookup, copy", size_bytes, statistics.median(retrieve), limit_seconds)
    report.add("same_bytes", "Retrieved bytes", "identical")


def _many_clients(report: Report, client: Client, url: str, clients: int, curve: CurveFiles | None) -> None:
    engine = Engine(client, _CLIENT_CHUNKS, _SMALL_PAYLOAD_BYTES, 1)
    try:
        assert client.hello is not None
        tokens = packed_tokens(42, _CLIENT_CHUNKS * client.hello.chunk_tokens)
        engine.store(tokens, Times())
        start_at = time.time() + _CLIENT_START_SECONDS
        with multiprocessing.get_context("spawn").Pool(clients) as pool:
            job = (url, engine.instance_id, tokens, _CLIENT_SECONDS, start_at, curve)
            counts = pool.starmap_async(lookups_in_a_row, [job] * clients).get(CALL_SECONDS + _CLIENT_SECONDS)
    except multiprocessing.TimeoutError:
        print("lmcache: the clients did not finish in time; their figure is left out.", file=sys.stderr)
        return
    finally:
        engine.close()
    rate = sum(counts) / _CLIENT_SECONDS
    report.section(f"{clients} clients, lookups of {_CLIENT_CHUNKS} chunks")
    report.add("lookups_per_second", "Lookups, leases given back", round(rate, 1), f"{rate:.0f} a second")
