"""A request that gets an image while it runs: what comes after it has the image in its name."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import PACKAGE_PARENT, TESTS, until
from lmcache.testing.processes import CacheServer
from support.tiny_images import make_idefics3

pytestmark = [pytest.mark.engine, pytest.mark.slow]

START_SECONDS, ANSWER_SECONDS = 600.0, 120.0


@contextmanager
def streaming_engine(model: Path, port: int) -> Iterator[Callable[[str, int], list[int]]]:
    """What runs a session: (name, image seed) -> what the engine sampled."""
    transfer = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.port": port, "lmcache.mp.save_decode_cache": True},
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "e2e.streaming_engine", str(model), json.dumps(transfer)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            "PYTHONPATH": f"{PACKAGE_PARENT}:{TESTS}",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        },
    )
    assert process.stdin is not None and process.stdout is not None
    lines: queue.Queue[Any] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                lines.put(json.loads(line))
            except ValueError:
                print(line, end="")  # vLLM's
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()

    def session(name: str, seed: int) -> list[int]:
        assert process.stdin is not None
        process.stdin.write(json.dumps([name, seed]) + "\n")
        process.stdin.flush()
        answer = lines.get(timeout=ANSWER_SECONDS)
        assert answer is not None, "the engine has ended"
        assert answer[0] == name
        return list(answer[1])

    try:
        assert lines.get(timeout=START_SECONDS) == "ready"
        yield session
        process.stdin.close()
        assert process.wait(60) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its children too
        process.wait()


def test_an_image_that_comes_later_is_part_of_the_names(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    model = make_idefics3(tmp_path / "idefics3")
    with CacheServer(tmp_path, l1_size_gb=0.125) as server:
        server.wait_ready()

        def stored(objects: int) -> bool:
            status = server.status()
            return bool(status["l1"]["objects"] == objects and not status["sessions"] and not status["reservations"])

        with streaming_engine(model, server.port) as session:
            # 300 tokens and what was sampled; the image and 500 more: three chunks, of which the first has no image.
            first = session("one", 1)
            until(lambda: stored(3), tell=server.status)
            session("two", 2)
            until(lambda: stored(5), tell=server.status)
            again = session("three", 1)
            until(lambda: stored(5), tell=server.status)
        assert again == first
