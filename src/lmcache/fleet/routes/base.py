"""What all operations of a coordinator share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lmcache.fleet.fleet import Fleet

T = TypeVar("T")

_THREADS = 8
_SERVER_THREADS = 32


class RouteContext:
    """Work on threads: what touches the directory alone, and what waits for servers."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="fleet-http")
        self._server_threads = ThreadPoolExecutor(_SERVER_THREADS, thread_name_prefix="fleet-http-servers")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._server_threads.shutdown(wait=False, cancel_futures=True)

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def asking_servers(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._server_threads, work)
