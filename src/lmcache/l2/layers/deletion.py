"""Deletes from a backend. Used by the layers, the runner and the storage loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from lmcache.core.key import ObjectKey
from lmcache.errors import AdapterError
from lmcache.l2.layers.breaker import BreakerLayer
from lmcache.l2.layers.context import AdapterContext

DELETE_SLICE_OBJECTS = 1024


class AdapterDeletion:
    def __init__(self, context: AdapterContext, stores: BreakerLayer) -> None:
        """Deletions are suspended with `stores`."""
        self._context = context
        self._ledger = context.ledger
        self._stores = stores

    @property
    def is_suspended(self) -> bool:
        return self._stores.is_suspended

    async def delete_all(self) -> None:
        for keys in self._ledger.pages(DELETE_SLICE_OBJECTS):
            if keys:
                await self.delete(keys)
            await asyncio.sleep(0)  # a suspended backend refuses without a pause

    async def delete(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        """Which of them are gone. What a fault of the backend leaves there stays known."""
        are_gone = await self.delete_uncounted(keys)
        self._ledger.lost([key for key, is_gone in zip(keys, are_gone, strict=True) if is_gone])
        return are_gone

    async def delete_uncounted(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        """Deletes like `delete`, and the caller tells the ledger."""
        try:
            return await self._stores.run(partial(self._context.adapter.delete, keys), self._context.operation())
        except AdapterError:
            return [False] * len(keys)
