"""vLLM's own connector class of versions that are not supported: the engine starts, uncached, and each side says so."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from lmcache.integration.vllm.vllm_multi_process_adapter import LMCacheMPSchedulerAdapter, LMCacheMPWorkerAdapter

# As vLLM 0.19 calls them, and with an argument that nobody knows.
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (("tcp://127.0.0.1:1", None, "model", 1, 0, 16), {"mq_timeout": 300.0, "heartbeat_interval": 10.0}),
    ((), {"server_url": "tcp://127.0.0.1:1", "context": None, "model_name": "model", "teleport": True}),
]


@pytest.mark.parametrize(("arguments", "keywords"), CALLS)
def test_a_class_that_calls_otherwise_runs_uncached(
    arguments: tuple[Any, ...], keywords: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "lmcache"):
        make: Any = LMCacheMPSchedulerAdapter
        scheduler = make(*arguments, **keywords)
        make = LMCacheMPWorkerAdapter
        worker = make(*arguments, **keywords)
    said = [record.getMessage() for record in caplog.records]
    for line, name in zip(said, ("LMCacheMPSchedulerAdapter", "LMCacheMPWorkerAdapter"), strict=True):
        assert line.startswith(f"This engine runs uncached: its connector class calls {name} otherwise")
    scheduler.maybe_submit_lookup_request("a", token_ids=[1] * 512)
    assert scheduler.check_lookup_result("a") == 0
    assert 1_000_000 // scheduler.num_blocks_per_chunk() == 0
    scheduler.cleanup_lookup_result("a")
    scheduler.end_session("a")
    worker.register_kv_caches({})
    # vLLM's class keeps the blocks of every finished request until the worker names it, once.
    assert worker.get_finished({"a"}) == ({"a"}, None)
    assert worker.get_finished(set()) == (None, None)
    assert worker.get_block_ids_with_load_errors() == set()
    worker.batched_submit_retrieve_requests(["b", "c"], [SimpleNamespace(block_ids=[4, 5])] * 2, None, cache_salts=[])
    assert worker.get_finished({"b"}) == (None, {"b", "c"})  # b was aborted meanwhile
    assert worker.get_block_ids_with_load_errors() == {4, 5}
    assert worker.get_block_ids_with_load_errors() == set()
    worker.shutdown()
