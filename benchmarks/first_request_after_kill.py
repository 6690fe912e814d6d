"""Time to first token of the very first request after kill -9 of the server and a new one in its place, its KV in a
folder behind it. The engine finds the new server by itself, without a request: how long that takes is a figure, too.

Target: 150 ms in 19 of 20 restarts.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engines import SETTLE_SECONDS, prompt_of
from lmcache.testing.demo import wait_until_stored
from lmcache.testing.processes import CacheServer, VllmEngine
from lmcache.testing.tiny_models import make_llama
from measure import Result, at_most, command_line, report, spread

CHUNK_TOKENS = 256
LIMIT_MS = 150.0
SHARE = 0.95  # of the restarts
CONNECTED = "Connected to the LMCache server"  # what both sides of the connector say
CONNECT_SECONDS = 60.0


class Restarts:
    """An engine, and one server after the other at the same address."""

    def __init__(self, folder: Path, running: ExitStack) -> None:
        self._folder, self._running = folder, running
        self.server = running.enter_context(CacheServer(folder, l2_folder=folder / "l2"))
        self.server.wait_ready()
        model = make_llama(folder / "model")
        self.engine = running.enter_context(VllmEngine(model, folder, cache_port=self.server.port))
        self.engine.wait_ready()
        self.engine.complete(prompt_of(0, 600), max_tokens=4)

    def kill_and_restart(self) -> float:
        """The seconds from the new server's being ready until the engine, both sides of it, has found it."""
        previous, connected = self.server, self.engine.log().count(CONNECTED)
        previous.kill()
        place: dict[str, Any] = {"port": previous.port, "http_port": previous.http_port, "shm_name": previous.shm_name}
        self.server = self._running.enter_context(CacheServer(self._folder, l2_folder=self._folder / "l2", **place))
        self.server.wait_ready()
        began = time.perf_counter()
        while self.engine.log().count(CONNECTED) < connected + 2:
            self.engine.check_alive()
            if time.perf_counter() - began > CONNECT_SECONDS:
                raise RuntimeError(f"the engine did not find the new server within {CONNECT_SECONDS:.0f} s")
            time.sleep(0.01)
        return time.perf_counter() - began


def measure(restarts: Restarts, tokens: int, runs: int) -> list[Result]:
    prompt = prompt_of(1, tokens)
    stored = int(restarts.server.status()["l2"]["adapters"][0]["objects"])
    computed = restarts.engine.complete(prompt, max_tokens=1).time_to_first_token_seconds
    wait_until_stored(restarts.server, stored + tokens // CHUNK_TOKENS)
    connects, firsts = [], []
    for _ in range(runs):
        connects.append(restarts.kill_and_restart())
        time.sleep(SETTLE_SECONDS)
        completion = restarts.engine.complete(prompt, max_tokens=1)
        if completion.cached_tokens < tokens - CHUNK_TOKENS - 1:
            raise RuntimeError(f"only {completion.cached_tokens} of {tokens} tokens came from the cache")
        firsts.append(completion.time_to_first_token_seconds)
    firsts.sort()
    within = firsts[max(0, int(SHARE * runs) - 1)]
    name = f"{tokens} tokens, first request after kill -9"
    return [
        Result(f"{tokens} tokens: computed", computed * 1e3, "ms"),
        Result("the engine has found the new server", statistics.median(connects), "s", detail=spread(connects)),
        Result(f"{name}: median", statistics.median(firsts) * 1e3, "ms", detail=spread(firsts, 1e3)),
        at_most(f"{name}: {SHARE:.0%} of them within", within * 1e3, "ms", LIMIT_MS),
    ]


def main() -> int:
    parser = command_line(__doc__, runs=20)
    parser.add_argument("--tokens", type=int, default=8192)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lmcache-bench-") as folder, ExitStack() as running:
        results = measure(Restarts(Path(folder), running), arguments.tokens, arguments.runs)
    return report(results, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
