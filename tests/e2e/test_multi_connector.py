"""vLLM's MultiConnector with NixlConnector and ours, two servers that are peers: a prompt goes from one engine to the
other by NIXL, and when that one is gone, from server to server. The test plays the router."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import until
from e2e.test_handover import prefill
from lmcache.integration.vllm.handover import SOURCE_KEY
from lmcache.testing.processes import LOOPBACK, CacheServer, VllmEngine, free_port
from lmcache.testing.tiny_models import sample_tokens
from services import nixl

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOKENS = 1500
NIXL_BYTES = "vllm:nixl_bytes_transferred_sum"  # `cached_tokens` of an answer leaves them out
TOKEN_BYTES = 16 << 10  # in float32, which makes the answers those of an engine that computed


def engine(model: Path, folder: Path, name: str, server: CacheServer) -> VllmEngine:
    ours = {
        "lmcache.mp.host": f"tcp://{LOOPBACK}",
        "lmcache.mp.port": server.port,
        "lmcache.mp.load_or_recompute": False,
    }
    connectors = [
        {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"},
        {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": ours},
    ]
    transfer: dict[str, Any] = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": connectors},
    }
    return VllmEngine(
        model,
        folder,
        cache_port=None,
        extra=["--dtype", "float32", "--kv-transfer-config", json.dumps(transfer)],
        environment={
            "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "UCX_TLS": "tcp",
            "VLLM_CPU_OMP_THREADS_BIND": "0" if name == "prefill" else "1",
        },
        log_name=f"{name}.log",
    )


def test_a_prompt_goes_by_nixl_and_by_the_servers_when_its_engine_is_gone(llama: Path, tmp_path: Path) -> None:
    nixl.need()
    ports = [free_port(), free_port()]
    peers = ["--p2p-peers", ",".join(f"{LOOPBACK}:{port}" for port in ports), "--l2-prefetch-policy", "retain"]

    def server(number: int) -> CacheServer:
        flags = ["--p2p-advertise-url", f"{LOOPBACK}:{ports[number]}", *peers]
        return CacheServer(tmp_path, l1_size_gb=0.5, extra=flags, log_name=f"server-{number}.log")

    with server(0) as at_prefill, server(1) as at_decode:
        for each in (at_prefill, at_decode):
            each.wait_ready()
        until(lambda: at_decode.metric("lmcache_mp_p2p_peers") == 1)
        with (
            engine(llama, tmp_path, "prefill", at_prefill) as first,
            engine(llama, tmp_path, "decode", at_decode) as second,
        ):
            first.wait_ready()
            second.wait_ready()
            prompt = sample_tokens(TOKENS, seed=1)
            told = prefill(first, prompt)
            assert told["remote_block_ids"] and told[SOURCE_KEY]["tokens"]
            warm = second.complete(prompt, kv_transfer_params=told)
            until(lambda: second.metric(NIXL_BYTES) >= (TOKENS - 32) * TOKEN_BYTES, tell=second.log)
            exact = first.complete(prompt)
            assert warm.token_ids == exact.token_ids
            # Of a prompt whose engine is gone, NIXL has nothing and the peer has all that was stored.
            orphan = sample_tokens(TOKENS, seed=2)
            expected = first.complete(orphan)
            stored = TOKENS // 256
            until(lambda: at_prefill.status()["l1"]["objects"] >= 2 * stored, tell=at_prefill.status)
            first.kill()
            loaded = second.complete(orphan)
            assert loaded.cached_tokens >= stored * 256 and loaded.token_ids == expected.token_ids
            assert "Traceback" not in second.log()
