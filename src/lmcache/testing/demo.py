"""The tour behind `lmcache demo`: one long prompt, answered cold and from every place that can hold its KV."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lmcache.errors import ResourceError
from lmcache.testing.processes import CacheServer, Completion, VllmEngine
from lmcache.testing.tiny_models import make_llama

PROMPT_TOKENS = 8192
MAX_TOKENS = 16
VOCABULARY = 1000  # ids below this are ordinary tokens of the small model
L2_QUIET_SECONDS = 60.0


@dataclass
class Step:
    """One row of the table."""

    name: str
    completion: Completion


@dataclass
class Demo:
    """Everything the tour starts; `close` stops it, in reverse order of start."""

    folder: Path
    say: Callable[[str], None]
    steps: list[Step] = field(default_factory=list)
    server: CacheServer | None = None
    engine: VllmEngine | None = None

    def start_server(self) -> CacheServer:
        previous = self.server
        server = CacheServer(
            self.folder,
            l2_folder=self.folder / "l2",
            port=previous.port if previous else None,
            http_port=previous.http_port if previous else None,
            shm_name=previous.shm_name if previous else None,
        )
        self.server = server
        self.say(f"cache server: starting (L1 1 GB of shared memory, L2 {self.folder / 'l2'})")
        self.say(f"cache server: ready in {server.wait_ready():.1f} s on port {server.port}")
        return server

    def start_engine(self, server: CacheServer) -> VllmEngine:
        self.say("vLLM: starting on CPU (about 25 s)")
        engine = VllmEngine(self.folder / "model", self.folder, cache_port=server.port)
        self.engine = engine
        self.say(f"vLLM: ready in {engine.wait_ready():.0f} s on port {engine.port}")
        return engine

    def ask(self, name: str, prompt: list[int]) -> None:
        assert self.engine is not None
        self.say(f"asking: {name}")
        completion = self.engine.complete(prompt, max_tokens=MAX_TOKENS)
        self.steps.append(Step(name, completion))
        milliseconds = completion.time_to_first_token_seconds * 1000
        self.say(f"  first token after {milliseconds:.0f} ms, {completion.cached_tokens} tokens from the cache")

    def close(self) -> None:
        if self.engine is not None:
            self.engine.stop()
        if self.server is not None:
            self.server.stop()


def wait_until_stored(server: CacheServer, objects: int) -> None:
    """Returns when L2 holds at least that many objects and no store is under way."""
    deadline = time.monotonic() + L2_QUIET_SECONDS
    while time.monotonic() < deadline:
        adapters = server.status()["l2"]["adapters"]
        if all(adapter["objects"] >= objects and adapter["stores_in_flight"] == 0 for adapter in adapters):
            return
        time.sleep(0.05)
    raise RuntimeError(f"L2 did not hold {objects} objects within {L2_QUIET_SECONDS:.0f} s")


def table(steps: list[Step]) -> str:
    """The result, a line a step; ratios are against the first one."""
    cold = steps[0].completion
    lines = [
        f"{'where the KV came from':<34} {'first token':>12} {'faster':>8} {'cached tokens':>14} {'same text':>10}",
        "-" * 82,
    ]
    for step in steps:
        seen = step.completion
        faster = cold.time_to_first_token_seconds / seen.time_to_first_token_seconds
        same = "-" if seen is cold else ("yes" if seen.text == cold.text else "NO")
        lines.append(
            f"{step.name:<34} {seen.time_to_first_token_seconds * 1000:>9.0f} ms {faster:>7.1f}x"
            f" {seen.cached_tokens:>6} of {seen.prompt_tokens:<5} {same:>9}"
        )
    return "\n".join(lines)


def tour(demo: Demo, prompt_tokens: int) -> list[Step]:
    """Cold, L1, L2, after an engine restart, after kill -9 of the server."""
    demo.say("model: writing a small Llama with seeded random weights")
    make_llama(demo.folder / "model")
    random_source = random.Random(7)
    prompt = [random_source.randrange(3, VOCABULARY) for _ in range(prompt_tokens)]
    warm_up = [random_source.randrange(3, VOCABULARY) for _ in range(300)]
    chunks = prompt_tokens // 256

    server = demo.start_server()
    engine = demo.start_engine(server)
    engine.complete(warm_up, max_tokens=2)
    demo.ask("nowhere (computed)", prompt)
    demo.ask("L1, shared memory", prompt)
    wait_until_stored(server, chunks)
    server.clear("l1")
    demo.ask("L2, a folder (L1 cleared)", prompt)
    demo.say("vLLM: stopping, to start it again")
    engine.stop()
    engine = demo.start_engine(server)
    engine.complete(warm_up, max_tokens=2)
    demo.ask("L1, after an engine restart", prompt)
    demo.say("cache server: kill -9")
    server.kill()
    server = demo.start_server()
    wait_until_reconnected(engine, server, warm_up)
    demo.ask("L2, after kill -9 of the server", prompt)
    return demo.steps


def wait_until_reconnected(engine: VllmEngine, server: CacheServer, prompt: list[int]) -> None:
    """Returns when the running engine has found the restarted server by itself."""
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        engine.complete(prompt, max_tokens=2)
        instances = server.status()["instances"]
        if any(instance["ranks"] == len(instance["workers"]) > 0 for instance in instances):  # both sides of it
            return
        time.sleep(0.2)
    raise RuntimeError("the engine did not come back to the restarted server within 60 s")


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM ends the tour like Ctrl-C does, so that everything is stopped and removed either way."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def as_record(step: Step) -> dict[str, object]:
    seen = step.completion
    return {
        "source": step.name,
        "time_to_first_token_seconds": round(seen.time_to_first_token_seconds, 4),
        "cached_tokens": seen.cached_tokens,
        "prompt_tokens": seen.prompt_tokens,
        "text": seen.text,
    }


def run_demo(prompt_tokens: int, write: Callable[[str], None], *, as_json: bool = False) -> int:
    """Runs the tour, with progress on stderr, and hands its table to `write`.

    Returns 0 when every repeat was a hit with the same text, 1 when not, 130 when interrupted.
    """
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {line}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="lmcache-demo-") as folder, interruptible():
        demo = Demo(Path(folder), say)
        try:
            steps = tour(demo, prompt_tokens)
        except KeyboardInterrupt:
            say("interrupted")
            return 130
        except RuntimeError as error:
            raise ResourceError(f"The demo could not go on: {error}") from None
        finally:
            say("stopping the engine and the server, removing their files")
            demo.close()
    cold = steps[0].completion
    good = all(step.completion.text == cold.text and step.completion.cached_tokens > 0 for step in steps[1:])
    if as_json:
        write(json.dumps({"identical": good, "steps": [as_record(step) for step in steps]}, indent=2) + "\n")
    else:
        verdict = (
            "Every repeat was a hit with the same text." if good else "NOT every repeat was a hit with the same text."
        )
        write(f"\n{table(steps)}\n\n{verdict}\n")
    return 0 if good else 1
