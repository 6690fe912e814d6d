"""An adapter from outside in memory, behind a link of a given bandwidth that the test makes slower."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from lmcache.core.key import ObjectKey
from lmcache.l2.adapter import Capacity
from lmcache.l2.adapters.mock import MockAdapter


class Throttled(MockAdapter):
    def __init__(self, bytes_per_second: float, answer_seconds: float) -> None:
        super().__init__(Capacity(), bytes_per_second)
        self.answer_seconds = answer_seconds

    def slow_down(self, times: float) -> None:
        self.bytes_per_second /= times
        self.answer_seconds *= times

    async def open(self, inventory: Any) -> None:
        inventory.complete()

    async def probe(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        await asyncio.sleep(self.answer_seconds)
        return await super().probe(keys)
