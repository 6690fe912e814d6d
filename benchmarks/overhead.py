"""What the connector costs an engine that finds nothing in the cache: requests a second, decode latency, and its calls.

Wall-clock ratios of whole engines are noisy on a shared machine, so three things are measured: the two engines in turn,
by the fast quarter of many short bursts, which others disturb least; and the seconds that vLLM's one thread spends in
calls to the connector, which bound the overhead from the inside.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path

from engines import at_once, beside_a_server, in_turn, prompt_of
from lmcache.testing.processes import CacheServer, VllmEngine
from measure import Result, at_least, at_most, command_line, processor_seconds, report, spread

REQUESTS = 8
PROMPT_TOKENS = 512
DECODED_TOKENS = 48
HERE = Path(__file__).resolve().parent


def burst(engine: VllmEngine, seed: int) -> tuple[float, float]:
    """Eight requests at once that share nothing: seconds for all, and of a decode step when all run."""
    prompts = [prompt_of(REQUESTS * seed + number, PROMPT_TOKENS) for number in range(REQUESTS)]
    seconds, answers = at_once(engine, prompts, DECODED_TOKENS)
    decoding = [answer.total_seconds - answer.time_to_first_token_seconds for answer in answers]
    return seconds, statistics.median(decoding) / (DECODED_TOKENS - 1)


def fast_quarter(values: list[float]) -> float:
    return statistics.mean(sorted(values)[: max(1, len(values) // 4)])


def connector_seconds(engine: VllmEngine) -> dict[str, float]:
    _, body = engine.ask(engine.port, "POST", "/collective_rpc", {"method": "connector_seconds"}, 60.0)
    return dict(body["results"][0])


def measure(cached: VllmEngine, plain: VllmEngine, server: CacheServer, runs: int) -> list[Result]:
    times: dict[VllmEngine, list[float]] = {cached: [], plain: []}
    steps: dict[VllmEngine, list[float]] = {cached: [], plain: []}
    calls_before = connector_seconds(cached)
    server_cpu = processor_seconds(server.pid)
    for run in range(runs):
        for engine in in_turn(run, cached, plain):
            seconds, step_seconds = burst(engine, 1000 + run)
            times[engine].append(seconds)
            steps[engine].append(step_seconds)
    calls = {name: value - calls_before.get(name, 0.0) for name, value in connector_seconds(cached).items()}
    server_cpu = processor_seconds(server.pid) - server_cpu
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
    arguments = command_line(__doc__, runs=12).parse_args()
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
            burst(engine, 1)
        results = measure(cached, plain, server, arguments.runs)
    return report(results, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
