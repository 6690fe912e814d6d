"""Real engines beside one cache server: how they are started, and asked without getting in each other's way."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lmcache.testing.processes import CacheServer, Completion, VllmEngine
from lmcache.testing.tiny_models import make_llama

SETTLE_SECONDS = 3.0


@contextmanager
def beside_a_server(
    cached: dict[str, Any], *others: dict[str, Any], l1_size_gb: float, extra: Sequence[str] = ()
) -> Iterator[tuple[CacheServer, list[VllmEngine]]]:
    """The server and the engines, all with one small model, started and warmed up. `cached`: settings of the one
    engine that uses the server; `others`: of those beside it; `extra`: options of the server."""
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="lmcache-bench-")))
        model = make_llama(folder / "model")
        server = running.enter_context(CacheServer(folder, l1_size_gb=l1_size_gb, extra=extra))
        server.wait_ready()
        engines = []
        for number, settings in enumerate((cached, *others)):
            port = None if number else server.port
            engine = VllmEngine(model, folder, cache_port=port, log_name=f"engine{number}.log", **settings)
            engines.append(running.enter_context(engine))
        for engine in engines:
            engine.wait_ready()
            engine.complete(prompt_of(0, 600), max_tokens=4)
        yield server, engines


def prompt_of(seed: int, tokens: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, 1000) for _ in range(tokens)]


def settle() -> None:
    """Before a request to another engine: a vLLM worker polls for its next step for some seconds after an answer, and
    would take a core from the engine that is measured."""
    time.sleep(SETTLE_SECONDS)


def at_once(engine: VllmEngine, prompts: Sequence[list[int]], max_tokens: int) -> tuple[float, list[Completion]]:
    """Concurrent requests: seconds until the last is answered, and the answers."""
    settle()
    with ThreadPoolExecutor(len(prompts)) as pool:
        started = time.perf_counter()
        answers = list(pool.map(lambda prompt: engine.complete(prompt, max_tokens=max_tokens), prompts))
        return time.perf_counter() - started, answers


def in_turn(run: int, first: VllmEngine, second: VllmEngine) -> tuple[VllmEngine, VllmEngine]:
    """Who goes first changes from run to run, so that the moods of the machine meet both."""
    return (first, second) if run % 2 else (second, first)


def first_token_seconds(engine: VllmEngine, prompt: list[int]) -> tuple[float, int]:
    """Time to first token, and how many tokens of the prompt came from a cache."""
    settle()
    completion = engine.complete(prompt, max_tokens=1)
    return completion.time_to_first_token_seconds, completion.cached_tokens
