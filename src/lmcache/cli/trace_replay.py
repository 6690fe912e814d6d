"""`lmcache trace replay`: asks a real server of any options for the prompts of a trace, and stores what it misses.

A trace has hashes of chunks and no text. Each hash stands for made-up tokens of its own, so prompts share what they
shared when they were recorded; the KV has the recorded size and made-up bytes.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from lmcache import _native
from lmcache.cli.arguments import Arguments
from lmcache.cli.bench_load import CALL_SECONDS, register
from lmcache.cli.output import Report
from lmcache.client.client import Client
from lmcache.config.values import Text
from lmcache.core.frame import header_template
from lmcache.core.key import CHUNK_HASH_BYTES, Namespace
from lmcache.core.key_batch import ChunkHashes, SlotGrid
from lmcache.core.limits import FRAME_HEADER_BYTES, MIB
from lmcache.errors import ConfigError, ResourceError
from lmcache.protocol import messages as m
from lmcache.simulation.trace import Lookup, read_trace
from lmcache.testing.processes import LOOPBACK, free_port

_START_SECONDS = 60.0
_PERCENTILES = (50, 90, 99)
_LAYOUT = "00" * 16
_WORD_MASK = 0x7FFF_FFFF


def replay(argv: Sequence[str]) -> int:
    own, server_options = _split(argv)
    arguments = Arguments(
        "trace replay",
        "Replays a trace against a real server: one that runs (--rpc-url), or one that is started with the options "
        "behind `--`, such as `lmcache trace replay T.jsonl -- --l1-size-gb 4 --eviction-policy S3FIFO`.",
    )
    arguments.add_argument("trace", nargs="+", help="files, or folders of them")
    arguments.add_value("--rpc-url", Text("URL"), "a server that runs, on this machine", default="")
    arguments.add_number("--speed", 0.0, "times the recorded pace; 0: one request after the other", minimum=0)
    arguments.add_number("--chunk-mb", 0.0, "size of a chunk where the trace does not tell it", unit="MB", minimum=0)
    options = arguments.read(own)
    if bool(options.rpc_url) == bool(server_options):
        raise ConfigError("lmcache trace replay needs a server: --rpc-url, or options of one behind `--`.")
    trace = [lookup for lookup in read_trace(options.trace) if lookup.chunks]
    sizes = {lookup.chunk_tokens for lookup in trace}
    if len(sizes) != 1:
        raise ConfigError(f"The trace must have lookups of one chunk size; it has {sorted(sizes) or 'none'}.")
    default_bytes = int(options.chunk_mb * MIB)
    if not default_bytes and any(not lookup.chunk_bytes for lookup in trace):
        raise ConfigError("The trace does not tell how large a chunk is for every lookup: give --chunk-mb.")
    if options.rpc_url:
        _report(_play(options.rpc_url, trace, default_bytes, options.speed), options)
    else:
        with _server([*server_options, *_chunk_size(server_options, sizes.pop())]) as url:
            _report(_play(url, trace, default_bytes, options.speed), options)
    return 0


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _chunk_size(options: Sequence[str], chunk_tokens: int) -> list[str]:
    given = any(word.partition("=")[0] == "--chunk-size" for word in options)
    return [] if given else ["--chunk-size", str(chunk_tokens)]


@contextmanager
def _server(options: Sequence[str]) -> Iterator[str]:
    """Starts one on free ports; its URL. ResourceError when it does not start, with what it said."""
    port = free_port()
    places = ["--host", LOOPBACK, "--port", port, "--http-host", LOOPBACK, "--http-port", 0, "--prometheus-port", 0]
    command = [sys.executable, "-m", "lmcache.cli.main", "server", *map(str, places), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        if "is ready" not in process.stdout.readline():
            raise ResourceError(f"The server did not start: {' '.join(process.stderr.read().split()) or 'no reason'}")
        yield f"tcp://{LOOPBACK}:{port}"
    finally:
        process.terminate()
        try:
            process.communicate(timeout=_START_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


# ---- playing ---------------------------------------------------------------------------------------------------------
@dataclass
class Outcome:
    requested: int = 0  # chunks
    hit_l1: int = 0
    hit_l2: int = 0
    recorded_hits: int = 0
    without_room: int = 0
    lookups: int = 0
    lookup_seconds: list[float] = field(default_factory=list)
    store_seconds: list[float] = field(default_factory=list)
    whole_seconds: float = 0.0


class _Engine:
    """Stands for every engine of a model whose chunks have that size."""

    def __init__(self, client: Client, model_name: str, payload_bytes: int) -> None:
        self._client = client
        self._model_name = model_name
        self._instance_id = f"replay-{uuid.uuid4().hex[:12]}"
        self._payload_bytes = payload_bytes
        namespace = Namespace(model_name, 1, 0, 0, _LAYOUT)
        register(client, self._instance_id, namespace, payload_bytes, "lmcache trace replay")  # refuses wild sizes
        self._payload = random.Random(1).randbytes(payload_bytes)

    def request(self, name: str, lookup: Lookup, outcome: Outcome) -> None:
        """Looks up, gives the lease back, stores what was missing, and ends."""
        tokens = b"".join(_tokens(chunk, lookup.chunk_tokens) for chunk in ChunkHashes(lookup.hashes))
        message = m.Lookup(self._instance_id, name, lookup.cache_salt, 0, tokens)
        started = time.perf_counter()
        found: m.LookupReply = self._client.call("lookup", message, CALL_SECONDS)
        outcome.lookup_seconds.append(time.perf_counter() - started)
        outcome.lookups += 1
        outcome.requested += lookup.chunks
        outcome.hit_l1 += found.chunks_l1
        outcome.hit_l2 += found.chunks - found.chunks_l1
        outcome.recorded_hits += lookup.hit_chunks
        if found.lease:
            self._client.call("release", m.Release(self._instance_id, found.lease), CALL_SECONDS)
        missing = found.hashes[found.chunks * CHUNK_HASH_BYTES :]
        if missing:
            started = time.perf_counter()
            self._store(missing, lookup.cache_salt, outcome)
            outcome.store_seconds.append(time.perf_counter() - started)
        self._client.call("end_session", m.EndSession(self._instance_id, name), CALL_SECONDS)

    def _store(self, hashes: bytes, salt: str, outcome: Outcome) -> None:
        reserve = m.Reserve(self._instance_id, 0, salt, hashes)
        reserved: m.ReserveReply = self._client.call("reserve", reserve, CALL_SECONDS)
        outcome.without_room += reserved.chunks_without_room
        if not reserved.reservation:
            return
        memory = self._client.memory
        assert memory is not None
        template = header_template(Namespace(self._model_name, 1, 0, 0, _LAYOUT, salt), self._payload_bytes)
        missing = ChunkHashes(hashes)
        slots = SlotGrid(reserved.slots, len(missing))
        for place in slots.places():
            memory.view(slots[place] + FRAME_HEADER_BYTES, self._payload_bytes)[:] = self._payload
            _native.frame_seal(memory.address + slots[place], template, missing[place[1]])
        self._client.call("commit", m.Commit(self._instance_id, 0, reserved.reservation), CALL_SECONDS)


def _tokens(chunk_hash: bytes, chunk_tokens: int) -> bytes:
    """Made up: the words of the hash, over and over. Chunks of one hash have the same, others do not."""
    words = [word & _WORD_MASK for word in struct.unpack("<8I", chunk_hash)]
    return struct.pack(f"<{chunk_tokens}I", *itertools.islice(itertools.cycle(words), chunk_tokens))


def _play(url: str, trace: Sequence[Lookup], default_bytes: int, speed: float) -> Outcome:
    client = Client(url)
    try:
        client.connect(CALL_SECONDS)
        assert client.hello is not None
        if client.hello.chunk_tokens != trace[0].chunk_tokens:
            raise ConfigError(
                f"The server has chunks of {client.hello.chunk_tokens} tokens, the trace of {trace[0].chunk_tokens}: "
                f"start it with --chunk-size {trace[0].chunk_tokens}."
            )
        if client.memory is None:
            raise ConfigError("lmcache trace replay writes into L1: it must run on the server's machine, as its user.")
        engines: dict[tuple[str, int], _Engine] = {}
        outcome = Outcome()
        started = time.perf_counter()
        for number, lookup in enumerate(trace):
            if speed:
                due = started + (lookup.seconds - trace[0].seconds) / speed
                time.sleep(max(0.0, due - time.perf_counter()))
            kind = (lookup.model_name, lookup.chunk_bytes or default_bytes)
            if kind not in engines:
                engines[kind] = _Engine(client, *kind)
            engines[kind].request(f"r{number}", lookup, outcome)
        outcome.whole_seconds = time.perf_counter() - started
        return outcome
    finally:
        client.close()


# ---- what came of it -------------------------------------------------------------------------------------------------
def _report(outcome: Outcome, options: argparse.Namespace) -> None:
    report = Report("Trace replay")
    report.add("lookups", "Lookups", outcome.lookups, f"{outcome.lookups:,}")
    report.add("seconds", "Time", round(outcome.whole_seconds, 3), f"{outcome.whole_seconds:.1f} s")
    rates = (
        ("hit_rate", "Hit rate", outcome.hit_l1 + outcome.hit_l2),
        ("hit_rate_l1", "... of it from L1", outcome.hit_l1),
        ("hit_rate_l2", "... of it from L2", outcome.hit_l2),
        ("hit_rate_recorded", "Hit rate when it was recorded", outcome.recorded_hits),
    )
    for key, label, chunks in rates:
        rate = chunks / outcome.requested
        report.add(key, label, round(rate, 6), f"{rate:.2%}")
    report.add("chunks_without_room", "Chunks that found no room", outcome.without_room)
    _add_latencies(report, "lookup", "Lookup", outcome.lookup_seconds)
    _add_latencies(report, "store", "Store of what was missing", outcome.store_seconds)
    report.emit(options)


def _add_latencies(report: Report, key: str, label: str, seconds: Sequence[float]) -> None:
    if len(seconds) < 2:
        return
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    for percentile in _PERCENTILES:
        value = cuts[percentile - 1] * 1e3
        report.add(f"{key}_p{percentile}_ms", f"{label}, {percentile}%", round(value, 4), f"{value:.3f} ms")
    report.add(f"{key}_max_ms", f"{label}, slowest", round(max(seconds) * 1e3, 4), f"{max(seconds) * 1e3:.3f} ms")
