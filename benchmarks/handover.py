"""Time to first token of a prompt that an engine of another server computed, with real vLLM on CPU.

    python benchmarks/handover.py [--tokens N] [--runs N] [--transfer-engine auto|tcp | --one-server]

Peers: the prompt is in another server's L1 alone, or in files in the page cache below an own server, in turns.
Hand-over: one engine is asked to compute a new prompt for another, which is asked as soon as that has answered (as a
router does), or before, with an earlier answer's word of where the KV will be. --one-server: both engines have the
same server. Every hit must be whole.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from end_to_end_remote import CHUNK_TOKENS, L1_SIZE_GB, whole_hit
from engines import first_token_seconds, prompt_of, settle
from lmcache.testing.demo import wait_until_stored
from lmcache.testing.processes import LOOPBACK, CacheServer, VllmEngine, free_port
from lmcache.testing.tiny_models import make_llama
from measure import Result, at_most, command_line, report, spread

CONFIG = {"lmcache.mp.load_or_recompute": False}
FOR_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
RETAIN = ("--l2-prefetch-policy", "retain")


class Site:
    """A server with an engine."""

    def __init__(
        self, stack: ExitStack, model: Path, folder: Path, flags: Sequence[str] = (), server: CacheServer | None = None
    ) -> None:
        """`server`: that of another site, in place of an own one."""
        folder.mkdir()
        if server is None:
            server = stack.enter_context(CacheServer(folder, l1_size_gb=L1_SIZE_GB, extra=flags))
            server.wait_ready()
        self.server = server
        engine = VllmEngine(model, folder, cache_port=server.port, extra_config=CONFIG)
        self.engine = stack.enter_context(engine)
        self.engine.wait_ready()
        self.engine.complete(prompt_of(0, 600), max_tokens=4)

    def hit(self, prompt: list[int], *, clears: bool) -> float:
        """Seconds to the first token. `clears`: not out of L1."""
        if clears:
            self.server.clear("l1")
        seconds, cached = first_token_seconds(self.engine, prompt)
        assert cached >= whole_hit(prompt), (cached, len(prompt))
        return seconds

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        body = {
            "model": self.engine.model,
            "prompt": prompt,
            "temperature": 0.0,
            "max_tokens": 1,
            "kv_transfer_params": FOR_PREFILL,
        }
        status, answer = self.engine.ask(self.engine.port, "POST", "/v1/completions", body, 300.0)
        assert status == 200, answer
        return dict(answer["kv_transfer_params"])


def measure_peers(owner: Site, reader: Site, files: Site, tokens: int, runs: int) -> list[Result]:
    prompt = prompt_of(1, tokens)
    owner.engine.complete(prompt, max_tokens=1)
    files.engine.complete(prompt, max_tokens=1)
    wait_until_stored(files.server, tokens // CHUNK_TOKENS)
    seconds: dict[str, list[float]] = {"peer": [], "page cache": [], "own L1": []}
    for run in range(runs + 1):
        for source in ("peer", "page cache") if run % 2 else ("page cache", "peer"):
            taken = (reader if source == "peer" else files).hit(prompt, clears=True)
            if run:  # the first warms up
                seconds[source].append(taken)
        if run:
            seconds["own L1"].append(reader.hit(prompt, clears=False))
    ratios = [peer / file for peer, file in zip(seconds["peer"], seconds["page cache"], strict=True)]
    return [
        *(
            Result(f"{tokens} tokens from {name}", statistics.median(values) * 1000, "ms", detail=spread(values, 1000))
            for name, values in seconds.items()
        ),
        at_most("peer / page cache", statistics.median(ratios), "ratio", 1.3, spread(ratios)),
    ]


def measure_handover(owner: Site, reader: Site, tokens: int, runs: int) -> list[Result]:
    after, overlapped = [], []
    for run in range(runs + 1):
        prompt = prompt_of(100 + run, tokens)
        settle()
        told = owner.prefill(prompt)
        answer = reader.engine.complete(prompt, max_tokens=1, kv_transfer_params=told)
        assert answer.cached_tokens >= whole_hit(prompt), answer.cached_tokens
        early = _asked_before(owner, reader, prompt_of(1000 + run, tokens), told)
        if run:
            after.append(answer.time_to_first_token_seconds)
            overlapped.append(early)
    return [
        at_most(f"{tokens} tokens, asked after", statistics.median(after) * 1000, "ms", 60, spread(after, 1000)),
        Result(
            f"{tokens} tokens, asked before",
            statistics.median(overlapped) * 1000,
            "ms",
            detail=spread(overlapped, 1000),
        ),
    ]


def _asked_before(owner: Site, reader: Site, prompt: list[int], told: dict[str, Any]) -> float:
    """Seconds from the answer of the engine that computes to the first token of the one that goes on."""
    settle()

    def first_token_at() -> float:
        started = time.perf_counter()
        answer = reader.engine.complete(prompt, max_tokens=1, kv_transfer_params=told)
        assert answer.cached_tokens >= whole_hit(prompt), answer.cached_tokens
        return started + answer.time_to_first_token_seconds

    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(first_token_at)
        owner.prefill(prompt)
        answered = time.perf_counter()
        return asked.result() - answered


def main() -> int:
    parser = command_line(__doc__, runs=7)
    parser.add_argument("--tokens", type=int, default=8192)
    servers = parser.add_mutually_exclusive_group()
    servers.add_argument("--transfer-engine", choices=("auto", "tcp"), default="auto")
    servers.add_argument("--one-server", action="store_true")
    options = parser.parse_args()
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="lmcache-bench-") as place, ExitStack() as stack:
        folder = Path(place)
        model = make_llama(folder / "model")
        address = f"{LOOPBACK}:{free_port()}"
        owner = Site(stack, model, folder / "owner", ("--p2p-advertise-url", address))
        if options.one_server:
            reader = Site(stack, model, folder / "reader", server=owner.server)
        else:
            own = ("--p2p-advertise-url", f"{LOOPBACK}:{free_port()}")
            joined = (*own, "--p2p-peers", address, "--p2p-transfer-engine", options.transfer_engine, *RETAIN)
            reader = Site(stack, model, folder / "reader", joined)
            adapter = json.dumps({"type": "fs", "base_path": str(folder / "l2")})
            files = Site(stack, model, folder / "files", ("--l2-adapter", adapter, *RETAIN))
            results += measure_peers(owner, reader, files, options.tokens, options.runs)
        results += measure_handover(owner, reader, options.tokens, options.runs)
        return report(results, options.json)


if __name__ == "__main__":
    sys.exit(main())
