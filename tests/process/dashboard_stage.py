"""A server for the dashboard to look at: inside this process, with two L2 tiers, engines of two models and their
traffic, and with an hour of history in a minute."""

from __future__ import annotations

import math
import random
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lmcache.admin.listener import HttpListener
from lmcache.clock import SystemClock
from lmcache.core.limits import MIB
from lmcache.protocol import messages as m
from lmcache.server import Server
from lmcache.telemetry import history
from lmcache.testing.processes import LOOPBACK
from process.support import CALL_SECONDS, LAYOUT, SmallEngine, server_within
from seeds import SEED
from services.redis import Valkey

LAPSE = 60  # how much faster the time of the history goes
PAYLOAD_BYTES = 64 * 1024
PROMPT_CHUNKS = 10
PROMPTS = 220  # of a model; more than L1 has room for
TOKENS_PER_SECOND = 8000  # of prefill, as the engines say
TENANTS = {"Qwen/Qwen3-8B": ("", "search"), "meta-llama/Llama-3.1-70B": ("assistant", "batch", "<b>evil</b>")}
QUOTAS = {"": 20 * MIB, "search": 8 * MIB, "assistant": 24 * MIB, "batch": 16 * MIB}


class LapseClock(SystemClock):
    """A time of day that goes on `lapse` times as fast."""

    def __init__(self, lapse: int) -> None:
        self._began = (super().wall(), self.monotonic())
        self._lapse = lapse

    def wall(self) -> float:
        wall, monotonic = self._began
        return wall + self._lapse * (self.monotonic() - monotonic)


@contextmanager
def hasty_history(lapse: int) -> Iterator[None]:
    """Of servers that begin meanwhile: it has a sample every ten seconds of that many times as fast a clock."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("lmcache.server.HttpListener", lambda server, _: HttpListener(server, LapseClock(lapse)))
        patches.setattr(history, "SAMPLE_SECONDS", history.SAMPLE_SECONDS / lapse)
        yield


@dataclass
class Stage:
    server: Server
    valkey: Valkey
    engines: list[SmallEngine]
    choose: random.Random = field(default_factory=lambda: random.Random(SEED))
    requests: int = 0  # so far

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server.config.http_port}/"

    def traffic(self, requests: int) -> None:
        """Lookups, loads and stores by all engines, more of some prompts than of others."""
        for _ in range(requests):
            self.requests += 1
            engine = self.engines[self.requests % len(self.engines)]
            salt = self.choose.choice(TENANTS[engine.model_name])
            # Which ones changes slowly; how many of them comes in waves.
            spread = 8 + 12 * (1 + math.sin(self.requests / 300))
            prompt = self.requests // 80 + int(abs(self.choose.gauss(0, spread)))
            self.request(engine, prompt % PROMPTS, salt)

    def request(self, engine: SmallEngine, prompt: int, salt: str) -> None:
        name = uuid.uuid4().hex
        tokens = engine.tokens(1, 2, *range(1000 * prompt, 1000 * prompt + PROMPT_CHUNKS - 2))
        reply = engine.lookup(name, tokens, salt=salt)
        if reply.lease:
            loaded = reply.chunks * 256
            release = m.Release(
                engine.instance_id, reply.lease, loaded_tokens=loaded, prefill_seconds=loaded / TOKENS_PER_SECOND
            )
            engine.client.call("release", release, CALL_SECONDS)
        if reply.chunks < PROMPT_CHUNKS:
            engine.store(tokens, salt=salt)
        engine.end(name)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Traffic meanwhile."""
        ended = threading.Event()

        def run() -> None:
            while not ended.is_set():
                self.traffic(20)
                ended.wait(0.05)

        thread = threading.Thread(target=run, name="traffic")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


@contextmanager
def stage(folder: Path, token_file: Path) -> Iterator[Stage]:
    with ExitStack() as stack:
        stack.enter_context(hasty_history(LAPSE))
        valkey = stack.enter_context(Valkey(folder / "valkey"))
        valkey.wait_ready()
        files: dict[str, Any] = {"type": "fs_native", "base_path": str(folder / "files"), "max_capacity_gb": 0.375}
        files["eviction"] = {"eviction_policy": "LRU"}
        remote = {"type": "resp", "host": LOOPBACK, "port": valkey.port}
        server = stack.enter_context(
            server_within(
                l1_size_gb=0.0625,
                eviction_policy="IsolatedLRU",
                l2_adapter=[files, remote],
                admin_token_file=str(token_file),
            )
        )
        for salt, limit_bytes in QUOTAS.items():
            server.quotas.put(salt, limit_bytes)
        engines = [
            stack.enter_context(
                SmallEngine(
                    server.rpc.endpoint,
                    instance_id=f"vllm-{number}",
                    payload_bytes=PAYLOAD_BYTES,
                    model_name=model_name,
                )
            )
            for number, model_name in enumerate(TENANTS)
        ]
        yield Stage(server, valkey, engines)


def register_many(engine: SmallEngine, instances: int) -> None:
    """Engines that do nothing, over one client."""
    for number in range(instances):
        name, beat = f"idle-{number:03}", 10.0
        instance = m.RegisterInstance(name, engine.model_name, 1, 1, beat, "vLLM 0.24.0")
        worker = m.RegisterWorker(name, 0, 0, [LAYOUT], [PAYLOAD_BYTES], True, beat)
        engine.client.register(instance, CALL_SECONDS)
        engine.client.register(worker, CALL_SECONDS)
