"""Keeps L1 and the adapters below their watermarks, so that inline eviction stays rare."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from lmcache.l2.background import spawn
from lmcache.l2.runner import Runner
from lmcache.tiering.context import TieringContext
from lmcache.tiering.write_back import WriteBack

log = logging.getLogger("lmcache.tiering")


class WatermarkEviction:
    """Belongs to the storage loop. Which objects go is the policies' business: that of L1 is in the native core,
    those of the adapters in their runners."""

    def __init__(self, context: TieringContext, write_back: WriteBack, *, watermark: float, ratio: float) -> None:
        """`watermark` and `ratio` are fractions of L1's capacity and of what is used of it."""
        self._l1 = context.l1
        self._runners = context.runners
        self._write_back = write_back
        self._watermark = watermark
        self._ratio = ratio
        self._period_seconds = context.period_seconds

    def start(self) -> list[asyncio.Task[None]]:
        """One task for L1 and one for each adapter that evicts: a tier that deletes slowly holds up no other."""
        evicting = [runner for runner in self._runners if runner.config.eviction]
        return [
            spawn(self._repeat(self.relieve_l1), "evict-l1"),
            *(spawn(self._repeat(partial(self.relieve, runner)), f"evict-{runner.name}") for runner in evicting),
        ]

    async def _repeat(self, relieve: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await relieve()
            except Exception:  # the root of a task: the next time may go better
                log.exception("Eviction failed")
            await asyncio.sleep(self._period_seconds)

    async def relieve_l1(self) -> None:
        removed = self._l1.enforce_limits()
        if removed.objects:
            log.debug(
                "Evicted %d objects, %d bytes of salts above their limits from L1", removed.objects, removed.size_bytes
            )
        stats = self._l1.stats()
        # What is beyond a quota and still being read goes in a later round; it must cost nobody else anything.
        used_bytes = stats["used_bytes"] - stats["above_limits_bytes"]
        if used_bytes > self._watermark * stats["capacity_bytes"]:
            wanted_bytes = int(self._ratio * used_bytes)
            removed = self._l1.core.evict(wanted_bytes)
            log.debug("Evicted %d objects, %d bytes from L1", removed.objects, removed.size_bytes)
            if removed.size_bytes < wanted_bytes:
                self._write_back.make_room(wanted_bytes - removed.size_bytes)
        self._write_back.remove_leftovers()

    @staticmethod
    async def relieve(runner: Runner) -> None:
        objects, freed_bytes = await runner.layers.eviction.evict_above_watermark()
        if objects:
            log.debug("Evicted %d objects, %d bytes from %s", objects, freed_bytes, runner.name)
