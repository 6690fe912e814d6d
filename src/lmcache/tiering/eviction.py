"""Keeps L1 and the adapters below their watermarks, so that making room inline stays rare."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from lmcache.l1.store import L1Store
from lmcache.l2.background import spawn
from lmcache.l2.runner import Runner
from lmcache.tiering.store import StoreController

log = logging.getLogger("lmcache.tiering")

PERIOD_SECONDS = 1.0


class EvictionController:
    """Belongs to the storage loop. Which objects go is the policies' business: that of L1 lives in the native core,
    those of the adapters in their runners."""

    def __init__(
        self, l1: L1Store, runners: Sequence[Runner], store: StoreController, *, watermark: float, ratio: float
    ) -> None:
        self._l1 = l1
        self._runners = runners
        self._store = store
        self._watermark = watermark
        self._ratio = ratio

    def start(self) -> list[asyncio.Task[None]]:
        """One task for L1 and one for each adapter that evicts: a tier that deletes slowly holds up no other."""
        evicting = [runner for runner in self._runners if runner.config.eviction]
        return [
            spawn(self._repeat(self.relieve_l1), "evict-l1"),
            *(spawn(self._repeat(partial(self.relieve, runner)), f"evict-{runner.name}") for runner in evicting),
        ]

    @staticmethod
    async def _repeat(relieve: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await relieve()
            except Exception:  # the root of a task: the next time may go better
                log.exception("Eviction failed")
            await asyncio.sleep(PERIOD_SECONDS)

    async def relieve_l1(self) -> None:
        objects, freed_bytes = self._l1.enforce_limits()
        if objects:
            log.debug("Evicted %d objects, %d bytes of salts above their limits from L1", objects, freed_bytes)
        stats = self._l1.stats()
        # What is beyond a quota and still being read goes in a later round; it must cost nobody else anything.
        used_bytes = stats["used_bytes"] - stats["above_limits_bytes"]
        if used_bytes > self._watermark * stats["capacity_bytes"]:
            wanted_bytes = int(self._ratio * used_bytes)
            objects, freed_bytes = self._l1.core.evict(wanted_bytes)
            log.debug("Evicted %d objects, %d bytes from L1", objects, freed_bytes)
            if freed_bytes < wanted_bytes:
                self._store.make_room(wanted_bytes - freed_bytes)
        self._store.drop_leftovers()

    @staticmethod
    async def relieve(runner: Runner) -> None:
        objects, freed_bytes = await runner.evict_above_watermark()
        if objects:
            log.debug("Evicted %d objects, %d bytes from %s", objects, freed_bytes, runner.name)
