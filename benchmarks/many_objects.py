"""A server whose L2 holds ten million objects, started while an engine decodes on the same machine: the time until it
knows them all, and lookups of 500 chunks beside those of a server with as few as are asked for.

    python benchmarks/many_objects.py [--objects N] [--runs N] [--no-engine]

The objects are announced by `announcing_adapter.py`; what a real backend needs to list them comes on top of it.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import announcing_adapter
from announcing_adapter import CHUNK_TOKENS, NAMESPACE, PAYLOAD_BYTES, PROMPT_CHUNKS, prompt
from engines import prompt_of
from lmcache.cli.bench_timing import timed
from lmcache.client.client import Client
from lmcache.protocol.messages import EndSession, Lookup, LookupReply, RegisterInstance, RegisterWorker
from lmcache.testing.processes import CacheServer, VllmEngine
from lmcache.testing.tiny_models import make_llama
from measure import Result, at_most, command_line, report, spread

INSTANCE = "bench-many"
TIMEOUT_SECONDS = 20.0
START_LIMIT_SECONDS = 30.0
LOOKUP_LIMIT = 2.0
UNKNOWN = 1 << 20  # the number of the first prompt that no backend has


class Asked:
    """A server with so many objects behind it, and the client that asks it."""

    def __init__(self, folder: Path, name: str, objects: int, prompts: int, running: ExitStack) -> None:
        adapter = {
            "type": "plugin",
            "module_path": announcing_adapter.__file__,
            "class_name": "AnnouncingAdapter",
            "adapter_params": {"objects": objects, "prompts": prompts},
            "eviction": {"eviction_policy": "LRU"},
        }
        self._began = time.perf_counter()
        self._unknown = UNKNOWN
        room_gb = (prompts + 2) * PROMPT_CHUNKS * 2 * PAYLOAD_BYTES / (1 << 30) + 0.1
        extra = ["--chunk-size", str(CHUNK_TOKENS), "--l2-adapter", json.dumps(adapter)]
        self.server = running.enter_context(
            CacheServer(folder, l1_size_gb=room_gb, extra=extra, log_name=f"{name}.log")
        )
        self.server.wait_ready()
        self.ready_seconds = time.perf_counter() - self._began
        self._client = Client(f"tcp://127.0.0.1:{self.server.port}")
        running.callback(self._client.close)
        self._client.register(RegisterInstance(INSTANCE, NAMESPACE.model_name, 1, 1, 10.0, "bench"), TIMEOUT_SECONDS)
        worker = RegisterWorker(INSTANCE, 0, 0, [NAMESPACE.layout], [PAYLOAD_BYTES])
        self._client.register(worker, TIMEOUT_SECONDS)

    def known_seconds(self) -> float | None:
        """From the start of the process until it knew all objects; None until then."""
        (adapter,) = self.server.status()["l2"]["adapters"]
        return time.perf_counter() - self._began if adapter["inventory_complete"] else None

    def seconds_of_nothing(self) -> float:
        """A lookup of 500 chunks that no tier has."""
        self._unknown += 1
        return self._lookup(self._unknown, 0)

    def seconds_of_hit(self, number: int) -> float:
        """The same of chunks that L2 has, and L1 has not yet."""
        return self._lookup(number, PROMPT_CHUNKS)

    def _lookup(self, number: int, chunks: int) -> float:
        replies: list[LookupReply] = []
        message = Lookup(INSTANCE, "lookup", "", 0, prompt(number))
        seconds = timed(lambda: replies.append(self._client.call("lookup", message, TIMEOUT_SECONDS)))
        if (replies[0].chunks, replies[0].chunks_l1) != (chunks, 0):
            raise RuntimeError(f"expected {chunks} chunks of L2, got {replies[0].chunks}, {replies[0].chunks_l1} of L1")
        self._client.call("end_session", EndSession(INSTANCE, "lookup"), TIMEOUT_SECONDS)
        return seconds


@contextmanager
def decoding_engine(folder: Path) -> Iterator[None]:
    """One without a connector that decodes all the time."""
    stopped = threading.Event()

    def decode() -> None:
        while not stopped.is_set():
            engine.complete(prompt_of(1, 64), max_tokens=200)

    with VllmEngine(make_llama(folder / "model"), folder, cache_port=None) as engine:
        engine.wait_ready()
        thread = threading.Thread(target=decode)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()


def measure(folder: Path, objects: int, runs: int) -> list[Result]:
    with ExitStack() as running:
        few_objects = min(objects, runs * PROMPT_CHUNKS)
        few = Asked(folder, "few", few_objects, runs, running)
        while few.known_seconds() is None:
            time.sleep(0.01)
        many = Asked(folder, "many", objects, runs, running)
        meanwhile = [many.seconds_of_nothing()]
        while (known := many.known_seconds()) is None:
            meanwhile.append(many.seconds_of_nothing())
        nothing: dict[Asked, list[float]] = {few: [], many: []}
        hits: dict[Asked, list[float]] = {few: [], many: []}
        for run in range(runs):  # in turn, so that noise of the machine meets both
            for asked in (few, many) if run % 2 else (many, few):
                nothing[asked].append(asked.seconds_of_nothing())
                hits[asked].append(asked.seconds_of_hit(run))
    results = [
        Result(f"{objects:,} objects: the server is ready", many.ready_seconds, "s"),
        at_most(f"{objects:,} objects: all are known", known, "s", START_LIMIT_SECONDS),
        Result(
            "lookup of 500 that nobody has, until they are known",
            statistics.median(meanwhile) * 1e3,
            "ms",
            detail=spread(meanwhile, 1e3),
        ),
    ]
    for kind, times in (("that nobody has", nothing), ("from L2", hits)):
        medians = {asked: statistics.median(values) for asked, values in times.items()}
        detail = f"{medians[few] * 1e3:.2f} and {medians[many] * 1e3:.2f} ms, {spread(times[many], 1e3)}"
        name = f"lookup of {PROMPT_CHUNKS} {kind}, against {few_objects:,} objects"
        results.append(at_most(name, medians[many] / medians[few], "x", LOOKUP_LIMIT, detail))
    return results


def main() -> int:
    parser = command_line(__doc__, runs=41)
    parser.add_argument("--objects", type=int, default=10_000_000)
    parser.add_argument("--no-engine", action="store_true", help="nothing decodes meanwhile")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lmcache-bench-") as name, ExitStack() as running:
        folder = Path(name)
        if not arguments.no_engine:
            running.enter_context(decoding_engine(folder))
        results = measure(folder, arguments.objects, arguments.runs)
    return report(results, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
