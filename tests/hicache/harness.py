"""A real SGLang server on CPU, from an environment of its own."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import lmcache
from lmcache.testing.processes import LOOPBACK, ManagedProcess, free_port, http_json

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("TEST_SGLANG_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))
PAGE_TOKENS = 64
START_SECONDS = 600.0
STARTED = "The server is fired up and ready to roll!"


class Answer(NamedTuple):
    """Of one request, and how long it took. `from_storage`: tokens of the prompt that came from the cache server."""

    tokens: tuple[int, ...]
    cached_tokens: int
    from_storage: int
    seconds: float


class SGLangServer(ManagedProcess):
    name = "SGLang"

    def __init__(self, folder: Path, model: Path, cache_port: int, *, log_name: str, **extra: Any) -> None:
        """`extra`: keys `lmcache.mp.*` of the storage backend's config."""
        self.port = free_port()
        config = {
            "backend_name": "lmcache",
            "module_path": "lmcache.integration.sglang.hicache",
            "class_name": "LMCacheHiCacheStorage",
            "interface_v1": 1,
            "prefetch_threshold": PAGE_TOKENS,
            "lmcache.mp.port": cache_port,
            **{f"lmcache.mp.{name}": value for name, value in extra.items()},
        }
        command = [
            *(str(PYTHON), "-W", "ignore", "-m", "sglang.launch_server", "--model-path", str(model)),
            *("--host", LOOPBACK, "--port", str(self.port), "--page-size", str(PAGE_TOKENS)),
            *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
            *("--grammar-backend", "none", "--disable-cuda-graph", "--skip-server-warmup", "--enable-cache-report"),
            *("--max-total-tokens", "4096", "--max-running-requests", "2", "--mem-fraction-static", "0.3"),
            *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-mem-layout", "page_first_direct"),
            *("--hicache-io-backend", "direct", "--hicache-write-policy", "write_through"),
            *("--hicache-storage-prefetch-policy", "wait_complete", "--hicache-storage-backend", "dynamic"),
            *("--hicache-storage-backend-extra-config", json.dumps(config)),
        ]
        sources = Path(lmcache.__file__).parents[1]
        paths = [Path(__file__).parent / "shim", *([sources] if sources == ROOT / "src" else [])]
        environment = {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "2",
        }
        super().__init__(command, folder / log_name, environment)

    def wait_ready(self) -> float:
        return self.wait_until_ready(self.port, "/health", START_SECONDS)

    def generate(self, prompt: list[int], count: int = 16) -> Answer:
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True},
        }
        began = time.monotonic()
        status, answer = http_json(self.port, "POST", "/generate", body, timeout_seconds=300.0)
        seconds = time.monotonic() - began
        assert status == 200, answer
        meta = answer["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        return Answer(tuple(answer["output_ids"]), meta["cached_tokens"], details.get("storage", 0), seconds)

    def flush(self) -> bool:
        """Empties SGLang's own caches; False while requests are under way."""
        with contextlib.suppress(OSError):
            return http_json(self.port, "POST", "/flush_cache", timeout_seconds=30.0)[0] == 200
        return False

    def log_since_started(self) -> str:
        """What comes before may hold a traceback of SGLang's own: it calls itself before it listens."""
        return self.log().split(STARTED, 1)[1]
