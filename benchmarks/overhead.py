"""What the connector costs an engine that finds nothing in the cache: requests a second, decode latency, and its calls.

Wall-clock ratios of whole engines are noisy on a shared machine, so three things are measured: the two engines in turn,
by the fast quarter of many short bursts, which others disturb least; and the seconds that vLLM's one thread spends in
calls to the connector, which bound the overhead from the inside.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import threading
import time
from pathlib import Path

from engines import beside_a_server, settle
from lmcache.testing.processes import CacheServer, VllmEngine
from measure import Result, at_least, at_most, report, spread

REQUESTS = 8
PROMPT_TOKENS = 512
DECODED_TOKENS = 48
HERE = Path(__file__).resolve().parent


class Burst:
    """Eight requests at once that share nothing: seconds for all, and of the decode steps when all run."""

    def __init__(self, engine: VllmEngine, seed: int) -> None:
        source = random.Random(seed)
        prompts = [[source.randrange(3, 1000) for _ in range(PROMPT_TOKENS)] for _ in range(REQUESTS)]
        self.decode_seconds: list[float] = []
        threads = [threading.Thread(target=self._ask, args=(engine, prompt)) for prompt in prompts]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.seconds = time.perf_counter() - began

    def _ask(self, engine: VllmEngine, prompt: list[int]) -> None:
        answer = engine.complete(prompt, max_tokens=DECODED_TOKENS)
        decoding = answer.total_seconds - answer.time_to_first_token_seconds
        self.decode_seconds.append(decoding / (DECODED_TOKENS - 1))


def fast_quarter(values: list[float]) -> float:
    return statistics.mean(sorted(values)[: max(1, len(values) // 4)])


def connector_seconds(engine: VllmEngine) -> dict[str, float]:
    _, body = engine.ask(engine.port, "POST", "/collective_rpc", {"method": "connector_seconds"}, 60.0)
    return dict(body["results"][0])


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(cached: VllmEngine, plain: VllmEngine, server: CacheServer, runs: int) -> list[Result]:
    times: dict[VllmEngine, list[float]] = {cached: [], plain: []}
    steps: dict[VllmEngine, list[float]] = {cached: [], plain: []}
    calls_before = connector_seconds(cached)
    server_cpu = cpu_seconds(server.pid)
    for run in range(runs):
        for engine in (cached, plain) if run % 2 else (plain, cached):
            settle()
            burst = Burst(engine, 1000 + run)
            times[engine].append(burst.seconds)
            steps[engine].append(statistics.median(burst.decode_seconds))
    calls = {name: value - calls_before.get(name, 0.0) for name, value in connector_seconds(cached).items()}
    server_cpu = cpu_seconds(server.pid) - server_cpu
    threads = calls.pop("threads")
    busy = sum(times[cached])
    costly = ", ".join(
        f"{name} {100 * calls[name] / busy:.2f}" for name in sorted(calls, key=calls.__getitem__)[:-5:-1]
    )
    throughput = fast_quarter(times[plain]) / fast_quarter(times[cached])
    latency = fast_quarter(steps[cached]) / fast_quarter(steps[plain])
    pairs = [theirs / ours for ours, theirs in zip(times[cached], times[plain], strict=True)]
    return [
        at_least("no reuse, 8 at once: requests a second / plain", throughput, "ratio", 0.99, "pairs " + spread(pairs)),
        at_most(
            "no reuse, 8 at once: decode step / plain",
            latency,
            "ratio",
            1.01,
            f"{1e3 * fast_quarter(steps[cached]):.2f} against {1e3 * fast_quarter(steps[plain]):.2f} ms",
        ),
        at_most("the engine's thread in calls to the connector", 100 * sum(calls.values()) / busy, "%", 1.0, costly),
        Result("CPU of the connector's own threads", 100 * threads / busy, "% of a core"),
        Result("CPU of the server", 100 * server_cpu / busy, "% of a core", detail="between bursts included"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    timed = {
        "connector": {"kv_connector": "TimedConnector", "kv_connector_module_path": "timed_connector"},
        "extra": ["--worker-extension-cls", "timed_connector.Times"],
        "environment": {
            "VLLM_SERVER_DEV_MODE": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        },
    }
    with beside_a_server(timed, {}, l1_size_gb=2) as (server, (cached, plain)):
        for engine in (cached, plain):
            Burst(engine, 1)
        results = measure(cached, plain, server, arguments.runs)
    return report(results, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
