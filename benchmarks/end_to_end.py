"""Time to first token and throughput with real vLLM on CPU, every side interleaved in one run.

Three engines share one machine and one model: with the connector, with its own prefix cache, and plain.
"""

from __future__ import annotations

import statistics
import sys

from engines import at_once, beside_a_server, first_token_seconds, in_turn, prompt_of
from lmcache.cli.bench_timing import Region
from lmcache.testing.processes import VllmEngine
from measure import MIB, Result, at_least, at_most, best_copy_seconds, command_line, report, spread

SMALLEST_BLOCK = "32"


def first_token(cached: VllmEngine, own: VllmEngine, tokens: int, runs: int) -> list[Result]:
    prompt = prompt_of(1, tokens)
    cold, _ = first_token_seconds(cached, prompt)
    first_token_seconds(own, prompt)
    hits, floors = [], []
    hit_tokens = own_tokens = 0
    for _ in range(runs):
        seconds, hit_tokens = first_token_seconds(cached, prompt)
        hits.append(seconds)
        seconds, own_tokens = first_token_seconds(own, prompt)
        floors.append(seconds)
    copied_bytes = tokens * 8192
    source, destination = Region(copied_bytes), Region(copied_bytes)
    copy = best_copy_seconds(source, destination, copied_bytes)
    hit, floor = statistics.median(hits), statistics.median(floors)
    return [
        Result(f"{tokens} tokens: cold", cold * 1000, "ms"),
        Result(f"{tokens} tokens: L1 hit ({hit_tokens} cached)", hit * 1000, "ms", detail=spread(hits, 1000)),
        Result(
            f"{tokens} tokens: own prefix cache, block {SMALLEST_BLOCK} ({own_tokens})",
            floor * 1000,
            "ms",
            detail=spread(floors, 1000),
        ),
        Result(f"copy of {copied_bytes // MIB} MiB", copy * 1000, "ms"),
        at_most(f"{tokens} tokens: L1 hit / (own prefix cache + copy)", hit / (floor + copy), "ratio", 1.1),
    ]


def burst(cached: VllmEngine, own: VllmEngine, tokens: int, runs: int) -> Result:
    prompts = [prompt_of(100 + index, tokens) for index in range(8)]
    for prompt in prompts:
        cached.complete(prompt, max_tokens=1)
        own.complete(prompt, max_tokens=1)
    ours, theirs = [], []
    for _ in range(runs):
        ours.append(at_once(cached, prompts, 1)[0])
        theirs.append(at_once(own, prompts, 1)[0])
    ratio = statistics.median(theirs) / statistics.median(ours)
    detail = f"{statistics.median(ours) * 1000:.0f} against {statistics.median(theirs) * 1000:.0f} ms for all 8"
    return at_least(f"8 hits of {tokens} tokens at once: throughput / own prefix cache", ratio, "ratio", 0.9, detail)


def no_reuse(cached: VllmEngine, plain: VllmEngine, runs: int) -> Result:
    ratios = []
    for run in range(runs):
        prompts = [prompt_of(10_000 + 100 * run + index, 1024) for index in range(8)]
        seconds = {}
        for engine in in_turn(run, cached, plain):
            seconds[engine], _ = at_once(engine, prompts, 16)
        ratios.append(seconds[plain] / seconds[cached])
    ratio = statistics.median(ratios)
    return at_least("no reuse: requests per second / vLLM without connector", ratio, "ratio", 0.98, spread(ratios))


def main() -> int:
    parser = command_line(__doc__, runs=9)
    parser.add_argument("--tokens", type=int, default=8192)
    arguments = parser.parse_args()
    block = ("--block-size", SMALLEST_BLOCK)
    own_cache = {"prefix_caching": True, "extra": block}
    with beside_a_server({"extra": block}, own_cache, {"extra": block}, l1_size_gb=4) as (_, (cached, own, plain)):
        results = first_token(cached, own, arguments.tokens, arguments.runs)
        results.append(burst(cached, own, arguments.tokens, max(3, arguments.runs // 2)))
        results.append(no_reuse(cached, plain, max(3, arguments.runs - 2)))
    return report(results, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
