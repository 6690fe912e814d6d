"""Mixed traffic on a real engine with little room: memory stays flat, and in the end nothing is held for anybody.

TEST_SOAK_SECONDS sets how long (ten minutes unless set; see `make soak`).
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import Stack, leave_early, until
from lmcache.testing.tiny_models import sample_tokens
from process.memory_watch import MemoryWatch, private_bytes, tree_bytes

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SECONDS = float(os.environ.get("TEST_SOAK_SECONDS", "600"))
CLIENTS = 6
TEXTS = 24
SALTS = (None, None, None, "one", "two")
# Under such traffic a worker of vLLM alone, without a connector, grows by hundreds of megabytes: oneDNN keeps what it
# prepared for each shape of a step, and glibc what lies between blocks of all sizes. That would hide what is ours.
THRIFT = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
    "LRU_CACHE_CAPACITY": "16",
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_MMAP_THRESHOLD_": "65536",
}


class Client:
    """One user: asks, continues chats, hangs up."""

    def __init__(self, stack: Stack, seed: int) -> None:
        self._stack = stack
        self._dice = random.Random(seed)
        self.did: Counter[str] = Counter()

    def work(self, stopped: threading.Event) -> Counter[str]:
        while not stopped.is_set():
            self._request()
        return self.did

    def _request(self) -> None:
        dice, engine = self._dice, self._stack.engine
        text = sample_tokens(2400, seed=dice.randrange(TEXTS))
        prompt = text[: dice.choice((100, 300, 600, 1100, 1700, 2400))]
        if dice.random() < 0.3:
            prompt += sample_tokens(dice.randint(1, 300), seed=dice.randrange(10**6))
        if dice.random() < 0.15:
            leave_early(engine, prompt, after_seconds=dice.random() * 0.5)
            self.did["left"] += 1
            return
        salt = dice.choice(SALTS)
        tokens = dice.choice((1, 4, 16, 64))
        options: dict[str, Any] = {"cache_salt": salt} if salt else {}
        answer = engine.complete(prompt, max_tokens=tokens, **options)
        assert len(answer.token_ids) == tokens
        self.did["answered"] += 1
        self.did["hits"] += answer.cached_tokens > 0


def test_memory_is_flat_and_nothing_stays_held(llama: Path, start_stack: Callable[..., Stack]) -> None:
    stack = start_stack(
        llama,
        prefix_caching=True,
        l1_size_gb=0.125,  # of half a gigabyte that all texts take
        extra_config={"lmcache.mp.save_decode_cache": True},
        environment=THRIFT,
        engine_flags=[
            *("--block-size", "32", "--num-gpu-blocks-override", "192", "--max-model-len", "3000"),
        ],
    )
    watch = MemoryWatch(
        server=lambda: private_bytes(stack.server.pid),
        engine=lambda: tree_bytes(stack.engine.pid),
        shared=lambda: (Path("/dev/shm") / stack.server.shm_name).stat().st_blocks * 512,
    )
    clients = [Client(stack, seed) for seed in range(CLIENTS)]
    stopped = threading.Event()
    with ThreadPoolExecutor(CLIENTS) as pool:
        working = [pool.submit(client.work, stopped) for client in clients]
        ends_at = time.monotonic() + SECONDS
        try:
            while time.monotonic() < ends_at and not any(future.done() for future in working):
                watch.sample()
                time.sleep(min(5.0, SECONDS / 60))
        finally:
            stopped.set()
        did = sum((future.result() for future in working), Counter())
    until(lambda: stack.engine_metric("vllm:num_requests_running") == 0)
    stack.wait_clean()
    until(lambda: not any(stack.rpc("kv_held")), tell=lambda: stack.rpc("kv_held"))
    until(lambda: stack.engine.ask(stack.engine.port, "POST", "/reset_prefix_cache")[0] == 200)
    until(lambda: stack.engine_metric("vllm:kv_cache_usage_perc") == 0)
    did["preemptions"] = int(stack.engine_metric("vllm:num_preemptions_total"))
    did["evicted"] = stack.server.status()["l1"]["evicted_objects"]
    print(watch.check(), dict(did), sep="\n")
    assert did["answered"] and did["left"] and did["hits"]
