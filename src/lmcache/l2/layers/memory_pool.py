"""Memory of a layer's own for batches on their way, bounded and used again: its pages are touched once."""

from __future__ import annotations

import asyncio
import mmap
from collections import deque

from lmcache.core.limits import MIB
from lmcache.core.rounding import round_up


class MemoryPool:
    """Belongs to one loop. Who waits is served in the order of asking.

    Invariant: what is lent and what is kept for the next batch never exceed the limit together, but for one batch that
    is larger by itself."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: list[mmap.mmap] = []
        self._kept_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[mmap.mmap | None]]] = deque()
        self.lent_bytes = 0

    async def take(self, size_bytes: int, deadline: float) -> mmap.mmap | None:
        """Page-aligned, at least that much; `give_back` follows. None when the deadline, in the loop's time, came
        first, or the machine has not so much."""
        size_bytes = round_up(max(size_bytes, 1), MIB)
        if not self._waiting and self._has_room(size_bytes):
            return self._lend(size_bytes)
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[mmap.mmap | None] = loop.create_future()
        entry = (size_bytes, turn)
        self._waiting.append(entry)
        try:
            await asyncio.wait({turn}, timeout=max(0.0, deadline - loop.time()))
        except asyncio.CancelledError:
            self._leave(entry)
            raise
        if turn.done():
            return turn.result()
        self._leave(entry)
        return None

    def give_back(self, memory: mmap.mmap) -> None:
        self.lent_bytes -= len(memory)
        self._kept.append(memory)
        self._kept_bytes += len(memory)
        self._trim(0)
        self._serve()

    def _leave(self, entry: tuple[int, asyncio.Future[mmap.mmap | None]]) -> None:
        _, turn = entry
        if turn.done():
            if memory := turn.result():
                self.give_back(memory)
            return
        self._waiting.remove(entry)
        self._serve()  # those behind it may need less

    def _serve(self) -> None:
        while self._waiting and self._has_room(self._waiting[0][0]):
            size_bytes, turn = self._waiting.popleft()
            turn.set_result(self._lend(size_bytes))

    def _has_room(self, size_bytes: int) -> bool:
        return not self.lent_bytes or self.lent_bytes + size_bytes <= self._limit_bytes

    def _lend(self, size_bytes: int) -> mmap.mmap | None:
        # One that is much larger would take the place of others.
        fitting = [memory for memory in self._kept if size_bytes <= len(memory) <= 2 * size_bytes]
        fitting = [memory for memory in fitting if self._has_room(len(memory))]
        if fitting:
            memory = min(fitting, key=len)
            self._kept = [kept for kept in self._kept if kept is not memory]
            self._kept_bytes -= len(memory)
        else:
            self._trim(size_bytes)
            try:
                memory = mmap.mmap(-1, size_bytes)
            except (OSError, OverflowError):
                return None
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
        self.lent_bytes += len(memory)
        return memory

    def _trim(self, wanted_bytes: int) -> None:
        """Gives kept memory back to the machine, the oldest first, as far as the limit wants it. What somebody still
        has a view of goes with the view."""
        while self._kept and self.lent_bytes + self._kept_bytes + wanted_bytes > self._limit_bytes:
            self._kept_bytes -= len(self._kept.pop(0))
