"""A batch again, for the objects that failed in it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

from lmcache.core import limits
from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import AdapterError
from lmcache.l2.layers.operation import Batch, CallLayer, Operation

OutcomeT = TypeVar("OutcomeT", StoreOutcome, LoadOutcome)

# `store` or `load` of the adapter contract.
Transfer: TypeAlias = Callable[[Sequence[ObjectKey], Sequence[memoryview]], Coroutine[Any, Any, list[OutcomeT]]]


class RetryLayer:
    def __init__(self, rng: random.Random, inner: CallLayer) -> None:
        self._rng = rng
        self._inner = inner

    async def run_batch(
        self, transfer: Transfer[OutcomeT], batch: Batch, failed: OutcomeT, operation: Operation
    ) -> list[OutcomeT]:
        """The outcome of each object; `failed` is that of one that was not transferred, and for those `transfer` is
        called again as long as retries and the deadline allow. Never raises for a fault of the backend."""
        outcomes = [failed] * len(batch)
        remaining: Sequence[int] = range(len(batch))
        for attempt in range(1 + limits.L2_RETRIES):
            if not remaining or (attempt and not await self._back_off(attempt, operation.deadline)):
                break
            part = batch.pick(remaining)
            try:
                results = await self._inner.run(partial(transfer, part.keys, part.buffers), operation)
            except AdapterError as error:
                if not error.retryable:
                    break
                continue
            if len(results) == len(part) == len(batch):
                outcomes = list(results)
            else:
                for index, result in zip(remaining, results, strict=True):
                    outcomes[index] = result
            remaining = [index for index in remaining if outcomes[index] is failed] if failed in results else []
        return outcomes

    async def _back_off(self, attempt: int, deadline: float) -> bool:
        """False when the deadline leaves no time for it."""
        seconds = limits.L2_RETRY_BACKOFF_SECONDS * 2 ** (attempt - 1) * self._rng.uniform(0.5, 1.5)
        if asyncio.get_running_loop().time() + seconds >= deadline:
            return False
        await asyncio.sleep(seconds)
        return True
