"""Verifies frames in L1 on threads of its own, for the storage loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from lmcache.core.frame import verify_frames
from lmcache.core.key import ObjectKey


class Verifier:
    """Belongs to the storage loop."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._running: set[asyncio.Future[list[str]]] = set()

    async def faults(
        self, keys: Sequence[ObjectKey], frames: Sequence[memoryview], release: Callable[[], None] = lambda: None
    ) -> list[str]:
        """Why each frame is not the whole frame of its key, "" where it is. `release` is called once, when no thread
        looks at the frames any more: with this call, or after it where it is cancelled."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, verify_frames, keys, frames)
        self._running.add(running)

        def ended(running: asyncio.Future[list[str]]) -> None:
            self._running.discard(running)
            release()

        running.add_done_callback(ended)
        return await asyncio.shield(running)

    async def drain(self, seconds: float) -> bool:
        """False when a thread is still at it."""
        if self._running:
            await asyncio.wait(set(self._running), timeout=max(0.0, seconds))
        return not self._running

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
