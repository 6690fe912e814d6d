"""`kv_role`, with a server at the path of a socket: one engine stores, another loads what that one stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.harness import until
from lmcache.testing.processes import CacheServer, VllmEngine
from lmcache.testing.tiny_models import sample_tokens

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_a_producer_stores_and_a_consumer_loads(llama: Path, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/lmcache.sock"

    def engine(role: str) -> VllmEngine:
        extra = {"lmcache.mp.host": address, "lmcache.mp.load_or_recompute": False}
        return VllmEngine(llama, tmp_path, cache_port=1, role=role, extra_config=extra, log_name=f"{role}.log")

    mine, theirs = (sample_tokens(1100, seed=seed) for seed in (1, 2))
    with CacheServer(tmp_path, host=address, l1_size_gb=0.125) as server:
        server.wait_ready()
        with engine("kv_producer") as producer:
            producer.wait_ready()
            cold = producer.complete(mine)
            until(lambda: server.status()["l1"]["objects"] == 4, tell=server.status)
            again = producer.complete(mine)
            assert (again.token_ids, again.cached_tokens) == (cold.token_ids, 0)
        with engine("kv_consumer") as consumer:
            consumer.wait_ready()
            warm = consumer.complete(mine)
            assert (warm.token_ids, warm.cached_tokens) == (cold.token_ids, 1024)
            for _ in range(2):
                assert consumer.complete(theirs).cached_tokens == 0
        status = server.status()
        assert (status["l1"]["objects"], status["sessions"], status["leases"], status["reservations"]) == (4, 0, 0, 0)
        assert "this engine only stores" in producer.log()
        assert "this engine only loads" in consumer.log()
