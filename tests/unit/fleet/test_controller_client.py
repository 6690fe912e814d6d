"""What a router imports in place of LMCache's controller."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from lmcache.core.chunking import ChunkHasher
from lmcache.errors import ConfigError
from lmcache.fleet import controller_client
from lmcache.fleet.coordinator import CoordinatorProcess
from lmcache.fleet.messages import Batch, Entry, Key, RegisterRequest
from lmcache.fleet.settings import CoordinatorSettings
from lmcache.protocol.tokens import pack_tokens
from lmcache.v1.cache_controller import controller_manager
from lmcache.v1.cache_controller.message import LookupMsg, LookupRetMsg, QueryInstMsg, QueryInstRetMsg

TOKENS = list(range(8))


def test_a_router_asks_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As production-stack's kvaware router does it."""
    process = CoordinatorProcess(CoordinatorSettings(host="127.0.0.1", port=0, controller_port=0, chunk_size=4))
    process.start()
    monkeypatch.setenv("LMCACHE_COORDINATOR_URL", f"http://127.0.0.1:{process.port}")
    monkeypatch.setattr(controller_client, "ASK_SECONDS", 30.0)  # a coordinator that is late is not one that is away
    hasher = ChunkHasher("blake3", 4)
    packed = hasher.extend(hasher.root(b""), pack_tokens(TOKENS))
    keys = [Entry(Key(packed[at : at + 32].hex(), "m", 0), 1) for at in (0, 32)]
    process.fleet.instances.register(RegisterRequest("10.0.0.5", 8080, "pod-5"))
    process.fleet.intake.apply([Batch("pod-5", 1, 1, "store", "l1", entries=keys)])

    async def route() -> tuple[LookupRetMsg | QueryInstRetMsg, LookupRetMsg | QueryInstRetMsg]:
        manager = controller_manager.LMCacheControllerManager(
            {"pull": "0.0.0.0:9000", "reply": "0.0.0.0:9001"}, health_check_interval=0.1, lmcache_worker_timeout=1
        )
        health = asyncio.ensure_future(manager.start_all())
        found = await manager.handle_orchestration_message(LookupMsg(tokens=[*TOKENS, 9], event_id="Lookup1"))
        who = await manager.handle_orchestration_message(QueryInstMsg(ip="10.0.0.5", event_id="QueryInst1"))
        health.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await health
        return found, who

    found, who = asyncio.run(route())
    assert found == LookupRetMsg(layout_info={"pod-5": ("LocalCPUBackend", 8)}, event_id="Lookup1")
    assert who == QueryInstRetMsg(instance_id="pod-5", event_id="QueryInst1")
    process.stop()
    assert asyncio.run(route()) == (  # away: nobody has anything
        LookupRetMsg(layout_info={}, event_id="Lookup1"),
        QueryInstRetMsg(instance_id=None, event_id="QueryInst1"),
    )


def test_other_messages_and_addresses_are_refused() -> None:
    manager = controller_manager.LMCacheControllerManager("http://h:1")
    with pytest.raises(TypeError, match="LookupMsg or QueryInstMsg"):
        asyncio.run(manager.handle_orchestration_message("anything"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="coordinator"):
        controller_manager.LMCacheControllerManager({"coordinator": "ftp://h"})
