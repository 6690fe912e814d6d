"""Metadata pages of a raw device, written in the order in which they were given."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from lmcache.l2.background import spawn
from lmcache.l2.native_device import NativeDevice

log = logging.getLogger("lmcache.l2")

PAGES_AT_ONCE = 256
RETRY_SECONDS = 1.0


@dataclass
class _Step:
    """Pages that may be written in any order among themselves."""

    pages: Sequence[tuple[int, bytes]]
    written: Callable[[], None]
    flush: bool
    tried: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class OrderedPages:
    """Writes metadata pages in the order in which they were given. A step that fails is tried again until it succeeds,
    and what follows waits."""

    def __init__(self, device: NativeDevice, page_bytes: int, name: str) -> None:
        self._device = device
        self._page_bytes = page_bytes
        self._name = name
        self._memory = mmap.mmap(-1, PAGES_AT_ONCE * page_bytes)
        self._view = memoryview(self._memory)
        self._steps: deque[_Step] = deque()
        self._ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task = spawn(self._run(), f"{name}-table")
        self.faults = 0

    def __len__(self) -> int:
        return len(self._steps)

    def put(
        self,
        pages: Sequence[tuple[int, bytes]],
        written: Callable[[], None] = lambda: None,
        *,
        flush: bool = False,
    ) -> asyncio.Future[bool]:
        """`written` is called once, when the pages are on the device; with `flush`, when they and everything before
        them are on the medium. The future: whether the first attempt succeeded."""
        step = _Step(pages, written, flush)
        self._steps.append(step)
        self._idle.clear()
        self._ready.set()
        return step.tried

    async def settled(self, seconds: float) -> bool:
        """Waits at most that long; whether everything submitted so far is written."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True

    async def close(self, seconds: float) -> bool:
        """False when something could not be written in time."""
        done = await self.settled(seconds)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        return done

    async def _run(self) -> None:
        while True:
            await self._ready.wait()
            self._ready.clear()
            while self._steps:
                taken, pages = self._next()
                while not await self._write(pages, flush=taken[0].flush):
                    for step in taken:
                        if not step.tried.done():
                            step.tried.set_result(False)
                    await asyncio.sleep(RETRY_SECONDS)
                for step in taken:
                    self._steps.popleft()
                    step.written()
                    if not step.tried.done():
                        step.tried.set_result(True)
            self._idle.set()

    def _next(self) -> tuple[list[_Step], Sequence[tuple[int, bytes]]]:
        """Steps to write together, and what to write. Single pages that follow each other on the device become one
        transfer, which goes there from the front, so that of an interrupted one a prefix is there; of one page given
        several times in a row only the last content counts."""
        first = self._steps[0]
        if first.flush or len(first.pages) != 1:
            return [first], first.pages
        taken, pages = [], list(first.pages)
        for step in islice(self._steps, PAGES_AT_ONCE):
            if step.flush or len(step.pages) != 1:
                break
            offset, last = step.pages[0][0], pages[-1][0]
            if offset == last:
                pages[-1] = step.pages[0]
            elif offset == last + self._page_bytes:
                pages.append(step.pages[0])
            else:
                break
            taken.append(step)
        return taken, [(pages[0][0], b"".join([content for _, content in pages]))]

    async def _write(self, pages: Sequence[tuple[int, bytes]], *, flush: bool) -> bool:
        for start in range(0, len(pages), PAGES_AT_ONCE):
            part = pages[start : start + PAGES_AT_ONCE]
            buffers = []
            for index, (_, content) in enumerate(part):
                buffer = self._view[index * self._page_bytes : index * self._page_bytes + len(content)]
                buffer[:] = content
                buffers.append(buffer)
            _, errors = await self._device.write([offset for offset, _ in part], buffers)
            if not self._went_well(next((error for error in errors if error), 0)):
                return False
        return not flush or self._went_well(await self._device.sync())

    def _went_well(self, fault: int) -> bool:
        if fault:
            if not self.faults:
                log.warning("%s: cannot write metadata: %s; tried again", self._name, os.strerror(fault))
            self.faults += 1
        return not fault
