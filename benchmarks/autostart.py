"""What a server that the engine starts itself costs, beside one that was there before: the time until the engine is
ready, and a hit. Each is a script with an engine in it, in turns; so are the names of LMCache inside an engine, whose
server is at a Unix socket of its own.

Targets: autostart adds at most 1.5 s to the engine's start; a hit under either name takes at most 1.10 x that of the
server by hand.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lmcache.testing.processes import CacheServer, free_port
from lmcache.testing.tiny_models import make_llama
from measure import Result, at_most, command_line, report, spread

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # the script is that of the tests

from e2e.offline_runs import CHUNK_TOKENS, run_script

L1_GB = 1.0
HITS = 9
ADDED_SECONDS = 1.5
HIT_RATIO = 1.10
BY_HAND, AUTOSTART = "a server by hand", "autostart"
DYNAMIC, PLAIN = "LMCacheConnectorV1Dynamic", "LMCacheConnectorV1"
ALWAYS_LOADED = {"lmcache.mp.load_or_recompute": False}
MODULE = "lmcache.integration.vllm.lmcache_connector_v1"


class Script(NamedTuple):
    start_seconds: float
    hit_seconds: float  # the median of its hits, with one token answered


def transfers(server_port: int) -> dict[str, dict[str, Any]]:
    """What vLLM is told of its connector in each case; with an address that nobody has used yet."""
    inside = {"kv_connector_extra_config": {"lmcache.max_local_cpu_size": L1_GB, **ALWAYS_LOADED}}
    arguments = f"--l1-size-gb {L1_GB:g} --http-port 0 --prometheus-port 0"
    started = {"lmcache.mp.autostart": True, "lmcache.mp.autostart.server_args": arguments}

    def at(port: int, **extra: Any) -> dict[str, Any]:
        settings = {"lmcache.mp.port": port, **ALWAYS_LOADED, **extra}
        return {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": settings}

    return {
        BY_HAND: at(server_port),
        AUTOSTART: at(free_port(), **started),
        DYNAMIC: {"kv_connector": DYNAMIC, "kv_connector_module_path": MODULE, **inside},
        PLAIN: {"kv_connector": PLAIN, **inside},
    }


def run(model: Path, transfer: dict[str, Any], tokens: int) -> Script:
    results, log = run_script(model, transfer, (tokens + 1, 2 + HITS, 1))
    cold, first, *hits = results["answers"]
    cached = [found for _, found, _ in (cold, first, *hits)]
    if cached != [0] + [tokens] * (1 + HITS):
        raise RuntimeError(f"{cached} tokens of {tokens} came from the cache:\n{log[-3000:]}")
    return Script(results["start_seconds"], statistics.median(seconds for _, _, seconds in hits))


def measure(model: Path, server: CacheServer, tokens: int, runs: int) -> dict[str, list[Script]]:
    """By name, as many as `runs` of each. Who goes first changes from run to run."""
    scripts: dict[str, list[Script]] = {name: [] for name in (BY_HAND, AUTOSTART, DYNAMIC, PLAIN)}
    for number in range(runs):
        server.clear("all")
        cases = list(transfers(server.port).items())
        first = number % len(cases)
        for name, transfer in cases[first:] + cases[:first]:
            scripts[name].append(run(model, transfer, tokens))
    return scripts


def figures(scripts: Mapping[str, list[Script]], tokens: int) -> list[Result]:
    """What is compared is of the same run."""
    by_hand = scripts[BY_HAND]
    starts, hits = [script.start_seconds for script in by_hand], [script.hit_seconds for script in by_hand]
    results = [
        Result(f"start of an engine with {BY_HAND}", statistics.median(starts), "s", detail=spread(starts)),
        Result(f"hit of {tokens} tokens, {BY_HAND}", statistics.median(hits) * 1e3, "ms", detail=spread(hits, 1e3)),
    ]
    for name in (AUTOSTART, DYNAMIC, PLAIN):
        both = list(zip(scripts[name], by_hand, strict=True))
        added = [script.start_seconds - reference.start_seconds for script, reference in both]
        start = statistics.median(added)
        results.append(at_most(f"start: {name} adds", start, "s", ADDED_SECONDS, spread(added)))
        if name != AUTOSTART:
            ratios = [script.hit_seconds / reference.hit_seconds for script, reference in both]
            results.append(at_most(f"hit: {name}", statistics.median(ratios), "x", HIT_RATIO, spread(ratios)))
    return results


def main() -> int:
    parser = command_line(__doc__, runs=7)
    parser.add_argument("--tokens", type=int, default=8192, help=f"of the prompt, a multiple of {CHUNK_TOKENS}")
    arguments = parser.parse_args()
    if arguments.tokens % CHUNK_TOKENS:
        parser.error(f"--tokens {arguments.tokens} is not a multiple of {CHUNK_TOKENS}: a hit would end before it")
    with tempfile.TemporaryDirectory(prefix="lmcache-bench-") as name:
        model = make_llama(Path(name) / "model")
        with CacheServer(Path(name), l1_size_gb=L1_GB) as server:
            server.wait_ready()
            scripts = measure(model, server, arguments.tokens, arguments.runs)
    return report(figures(scripts, arguments.tokens), arguments.json)


if __name__ == "__main__":
    sys.exit(main())
