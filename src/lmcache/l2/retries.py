"""A batch that is tried again for what failed in it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from lmcache.core import limits
from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import AdapterError, CapacityError
from lmcache.l2.operations import Hold, Lane

T = TypeVar("T", StoreOutcome, LoadOutcome)

_FAILED = (StoreOutcome.FAILED, LoadOutcome.FAILED)


async def repeat(
    lane: Lane,
    operation: Callable[[Sequence[ObjectKey], Sequence[memoryview]], Coroutine[Any, Any, list[T]]],
    keys: Sequence[ObjectKey],
    buffers: Sequence[memoryview],
    outcomes: list[T],
    todo: list[int],
    hold: Hold,
    deadline: float,
) -> None:
    """Runs the operation for `todo`, and again for what failed, as long as retries and the deadline allow. Raises
    CapacityError and nothing else."""
    for attempt in range(1 + limits.L2_RETRIES):
        if not todo:
            return
        if attempt:
            backoff_seconds = limits.L2_RETRY_BACKOFF_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
            if asyncio.get_running_loop().time() + backoff_seconds >= deadline:
                return
            await asyncio.sleep(backoff_seconds)
        some_keys = [keys[index] for index in todo]
        some_buffers = [buffers[index] for index in todo]
        try:
            results = await lane.run(partial(operation, some_keys, some_buffers), hold, deadline)
        except CapacityError:
            raise
        except AdapterError as error:
            if not error.retryable:
                return
            continue
        for index, result in zip(todo, results, strict=True):
            outcomes[index] = result
        failed = [index for index in todo if outcomes[index] in _FAILED]
        if len(failed) < len(todo):
            lane.ok()
        else:
            lane.fault("every object of a batch failed")
        todo = failed
