"""Memory for encoded frames, lent to one batch at a time. An adapter reads and writes this memory alone, which is used
again when the adapter has really ended."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from lmcache.core import limits
from lmcache.l2.layers.memory_pool import MemoryPool
from lmcache.l2.layers.operation import Batch, Operation, SharedRelease
from lmcache.l2.layers.serde_log import SerdeLog
from lmcache.serde.base import Chain

_SIZES_KEPT = 256


class LentMemory(NamedTuple):
    memory: mmap.mmap
    parts: list[memoryview]  # one for each object of a batch


class SerdeMemory:
    def __init__(self, chain: Chain, log: SerdeLog) -> None:
        self.running: set[asyncio.Future[None]] = set()  # one for each batch that has memory
        self._log = log
        self._pool = MemoryPool(limits.L2_SERDE_MEMORY_BYTES)
        self._largest_bytes = lru_cache(_SIZES_KEPT)(chain.native.max_frame_bytes)

    async def lend(self, batch: Batch, operation: Operation) -> LentMemory | None:
        """None when the deadline came first, there is no memory, or a serde from outside does not say how much it
        needs. Else `operation` follows."""
        try:
            sizes_bytes = [self._largest_bytes(buffer.nbytes) for buffer in batch.buffers]
        except RuntimeError:
            return None
        memory = await self._pool.take(sum(sizes_bytes), operation.deadline)
        if memory is None:
            self._log.warn("there were no %d bytes of memory for encoded objects within the deadline", sum(sizes_bytes))
            return None
        ends = list(accumulate(sizes_bytes))
        view = memoryview(memory)
        return LentMemory(memory, [view[end - size : end] for end, size in zip(ends, sizes_bytes, strict=True)])

    @contextmanager
    def operation(self, lent: LentMemory, outer: Operation) -> Iterator[Operation]:
        """An operation with this memory, which ends when every user of that has ended."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.running.add(ended)

        def end() -> None:
            self._pool.give_back(lent.memory)
            self.running.discard(ended)
            ended.set_result(None)

        inner = Operation(outer.deadline, SharedRelease(end), outer.forced)
        try:
            yield inner
        finally:
            inner.lent.done()
