"""What routers are told of the cache server by real engines, and where a real router then sends a request."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from e2e.harness import CHUNK_TOKENS, Stack, until
from lmcache.testing.processes import LOOPBACK, CacheServer, VllmEngine, free_port
from lmcache.testing.tiny_models import sample_tokens
from services import vllm_router
from services.vllm_router import VllmRouter

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK_TOKENS = 32
BLOCKS = 128  # 4,096 tokens: a few prompts push the first one out
PROMPT = sample_tokens(1060, seed=1)
WHOLE_TOKENS = len(PROMPT) // CHUNK_TOKENS * CHUNK_TOKENS


def event_flags(endpoint: str) -> list[str]:
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    return [
        *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "3000"),
        *("--kv-events-config", json.dumps(events)),
    ]


class Subscriber:
    """Believes what one engine publishes: the tokens of every block, by medium and hash."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.bind(endpoint)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._next = 0
        self.blocks: dict[tuple[str, Any], tuple[Any, tuple[int, ...]]] = {}  # (hash of the one before, tokens)

    def begin(self, engine: VllmEngine) -> None:
        """What is published before a subscription has arrived goes nowhere."""
        seeds = itertools.count(1000)

        def heard() -> bool:
            engine.complete(sample_tokens(70, seed=next(seeds)), max_tokens=2)
            self.read()
            return self._next > 0

        until(heard)

    def read(self) -> None:
        while self._socket.poll(20):
            topic, sequence, payload = self._socket.recv_multipart()
            assert topic == b"" and int.from_bytes(sequence, "big") >= self._next
            self._next = int.from_bytes(sequence, "big") + 1
            _, events, *_ = msgspec.msgpack.decode(payload)
            for event in events:
                self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.blocks.clear()
        elif event["type"] == "BlockRemoved":
            for block in event["block_hashes"]:
                self.blocks.pop((event["medium"], block), None)
        else:
            size, parent = event["block_size"], event["parent_block_hash"]
            assert size == BLOCK_TOKENS and len(event["token_ids"]) == size * len(event["block_hashes"])
            for number, block in enumerate(event["block_hashes"]):
                tokens = tuple(event["token_ids"][number * size : (number + 1) * size])
                self.blocks[event["medium"], block] = (parent, tokens)
                parent = block

    def prefix_tokens(self, medium: str, prompt: list[int]) -> int:
        """How much of a prompt lies there, from its beginning on."""
        self.read()
        by_parent = {(parent, tokens): block for (of, block), (parent, tokens) in self.blocks.items() if of == medium}
        parent, found = None, 0
        while (parent := by_parent.get((parent, tuple(prompt[found : found + BLOCK_TOKENS])))) is not None:
            found += BLOCK_TOKENS
        return found

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


def push_out(engine: VllmEngine, first_seed: int = 100) -> None:
    """Enough other prompts for the engine to need every block of its own."""
    for seed in range(first_seed, first_seed + 6):
        engine.complete(sample_tokens(900, seed=seed), max_tokens=2)


def test_the_engine_publishes_what_the_server_has_and_what_it_loses(
    llama: Path, start_stack: Callable[..., Stack]
) -> None:
    endpoint = f"tcp://{LOOPBACK}:{free_port()}"
    router = Subscriber(endpoint)
    try:
        stack = start_stack(
            llama,
            prefix_caching=True,
            engine_flags=event_flags(endpoint),
            server_flags=["--l2-prefetch-policy", "retain"],
        )
        router.begin(stack.engine)
        stack.engine.complete(PROMPT, max_tokens=2)
        # Without another request: the engine steps on until it has published what it stored.
        until(lambda: router.prefix_tokens("CPU", PROMPT) == WHOLE_TOKENS, tell=lambda: router.blocks.keys())
        cpu = {block for of, block in router.blocks if of == "CPU"}
        gpu = {block for of, block in router.blocks if of == "GPU"}
        assert cpu <= gpu  # the same names, as both are of the same tokens
        push_out(stack.engine)
        assert router.prefix_tokens("GPU", PROMPT) < WHOLE_TOKENS
        assert router.prefix_tokens("CPU", PROMPT) == WHOLE_TOKENS
        stack.wait_stored(4, in_l2=True)

        def asked(medium: str, tokens: int, prompt: list[int] = PROMPT) -> bool:
            stack.engine.complete(sample_tokens(40, seed=7), max_tokens=2)  # too short for the server
            return router.prefix_tokens(medium, prompt) == tokens

        until(lambda: asked("STORAGE", WHOLE_TOKENS), every=0.5)
        stack.server.clear("l1")
        until(lambda: asked("CPU", 0), every=0.5)
        assert router.prefix_tokens("STORAGE", PROMPT) == WHOLE_TOKENS
        assert stack.engine.complete(PROMPT, max_tokens=2).cached_tokens >= WHOLE_TOKENS - BLOCK_TOKENS
        until(lambda: asked("CPU", WHOLE_TOKENS), every=0.5)
        stack.server.clear("all")
        until(lambda: asked("CPU", 0) and asked("STORAGE", 0), every=0.5)
        last = sample_tokens(1060, seed=9)
        stack.engine.complete(last, max_tokens=2)
        until(lambda: asked("CPU", WHOLE_TOKENS, last), every=0.5)
        stack.server.kill()
        until(lambda: asked("CPU", 0, last), every=0.5)
    finally:
        router.close()


def router_options(model: str, endpoints: dict[str, str]) -> list[str]:
    options = ["--policy", "kv_aware", "--kv-event-block-size", str(BLOCK_TOKENS), "--kv-event-model", model]
    for url, endpoint in endpoints.items():
        options += ["--kv-event-source", f"{url}={endpoint}"]
    return [*options, "--worker-urls", *endpoints]


def complete(router: VllmRouter, model: str, prompt: list[int]) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0.0}
    status, answer = router.ask(router.port, "POST", "/v1/completions", body, 120.0)
    assert status == 200, answer
    return dict(answer)


@contextmanager
def an_engine(model: Path, folder: Path, endpoint: str) -> Iterator[VllmEngine]:
    """With a cache server of its own."""
    folder.mkdir()
    with ExitStack() as stack:
        server = CacheServer(folder, l1_size_gb=0.5)
        stack.callback(server.stop)
        server.wait_ready()
        engine = VllmEngine(
            model,
            folder,
            cache_port=server.port,
            prefix_caching=True,
            extra_config={"lmcache.mp.load_or_recompute": False},
            extra=event_flags(endpoint),
        )
        stack.callback(engine.stop)
        engine.wait_ready()
        yield engine


def test_a_router_sends_a_request_where_the_server_holds_its_prefix(llama: Path, tmp_path: Path) -> None:
    vllm_router.command()  # before engines are started for it
    ports = [free_port(), free_port()]
    with ExitStack() as stack:
        engines = [
            stack.enter_context(an_engine(llama, tmp_path / str(number), f"tcp://*:{port}"))
            for number, port in enumerate(ports)
        ]
        urls = [f"http://{LOOPBACK}:{engine.port}" for engine in engines]
        endpoints = {url: f"tcp://{LOOPBACK}:{port}" for url, port in zip(urls, ports, strict=True)}
        router = stack.enter_context(VllmRouter(tmp_path, *router_options(engines[0].model, endpoints)))
        router.wait_ready()

        def served() -> list[float]:
            return [engine.metric("vllm:request_success_total") for engine in engines]

        for number, engine in enumerate(engines):  # each has a prompt of its own, and has pushed it out
            engine.complete(sample_tokens(1060, seed=20 + number), max_tokens=2)
            push_out(engine, 200 + 50 * number)
        for number in (1, 0, 1, 0, 0, 1):
            before = served()
            answer = complete(router, engines[0].model, sample_tokens(1060, seed=20 + number))
            after = served()
            assert [now - then for now, then in zip(after, before, strict=True)] == [number == 0, number == 1]
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= WHOLE_TOKENS - BLOCK_TOKENS
            push_out(engines[number], 400)
