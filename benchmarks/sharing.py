"""What requests share, with real vLLM on CPU: a burst over one prefix, and a chat beside an own cache of the engine.

The engine with the connector has no prefix cache of its own; the other one has, and room for everything.
"""

from __future__ import annotations

import statistics
import sys

from engines import at_once, beside_a_server, in_turn, prompt_of, settle
from lmcache.testing.processes import VllmEngine
from measure import Result, at_most, command_line, report, spread

REQUESTS, COMMON_TOKENS, OWN_TOKENS = 16, 4096, 30
TURNS, SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 8, 1000, 300, 64


def computed_tokens(engine: VllmEngine) -> float:
    return engine.metric("vllm:prompt_tokens_by_source_total", "local_compute")


def burst(engine: VllmEngine, seed: int) -> tuple[float, float]:
    """Tokens computed, and seconds until the last of the requests was answered."""
    common = prompt_of(seed, COMMON_TOKENS)
    prompts = [[*common, *prompt_of(seed + 1 + number, OWN_TOKENS)] for number in range(REQUESTS)]
    before = computed_tokens(engine)
    _, answers = at_once(engine, prompts, 1)
    return computed_tokens(engine) - before, max(answer.total_seconds for answer in answers)


def bursts(name: str, engine: VllmEngine, runs: int) -> list[Result]:
    measured = [burst(engine, 1000 * (run + 1)) for run in range(runs)]
    needed = COMMON_TOKENS + REQUESTS * OWN_TOKENS
    seconds = [last_seconds for _, last_seconds in measured]
    tokens = max(computed for computed, _ in measured)
    return [
        at_most(
            f"{REQUESTS} at once, {COMMON_TOKENS} in common, {name}: computed / needed", tokens / needed, "ratio", 1.1
        ),
        Result(
            f"{REQUESTS} at once, {name}: until the last answer",
            statistics.median(seconds),
            "s",
            detail=spread(seconds),
        ),
    ]


def chat_seconds(engine: VllmEngine, seed: int) -> float:
    """All turns of one chat, each sent when the previous is answered."""
    text = prompt_of(seed, SYSTEM_TOKENS)
    total = 0.0
    for turn in range(TURNS):
        text += prompt_of(seed + 1 + turn, QUESTION_TOKENS)
        answer = engine.complete(text, max_tokens=ANSWER_TOKENS)
        total += answer.total_seconds
        text += answer.token_ids
    return total


def chats(cached: VllmEngine, own: VllmEngine, runs: int) -> Result:
    pairs = []
    for run in range(runs):
        seconds = {}
        for engine in in_turn(run, cached, own):
            settle()
            seconds[engine] = chat_seconds(engine, 100_000 + 100 * run)
        pairs.append((seconds[cached], seconds[own]))
    ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    detail = f"{ours:.2f} against {theirs:.2f} s, pairs {spread([cached / own for cached, own in pairs])}"
    return at_most(f"chat of {TURNS} turns / the engine's own cache", ours / theirs, "ratio", 1.1, detail)


def main() -> int:
    arguments = command_line(__doc__, runs=5).parse_args()
    saving = {"extra_config": {"lmcache.mp.save_decode_cache": True}}
    with beside_a_server(saving, {"prefix_caching": True}, l1_size_gb=4) as (_, (cached, own)):
        results = bursts("no own cache", cached, max(2, arguments.runs // 2))
        results += bursts("own cache, no connector", own, max(2, arguments.runs // 2))
        results.append(chats(cached, own, arguments.runs))
    return report(results, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
