"""What all operations share: the server behind them, who may ask, threads for what takes time, the history of the
metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from lmcache.admin.dashboard_files import DashboardFiles
from lmcache.admin.jobs import JobTable
from lmcache.admin.state import ServerState
from lmcache.clock import Clock
from lmcache.environment import SYSTEM
from lmcache.errors import ServerUnavailable
from lmcache.http import requests
from lmcache.http.operation import Call, Operation
from lmcache.service.cache_operations import CacheOperations
from lmcache.telemetry.history import MetricsHistory

METRICS_OFF = "Metrics are off: the server was started with --disable-metrics or --disable-observability."

T = TypeVar("T")


class AdminContext:
    """`token` gives the admin token that counts now, "" when only this host may change state."""

    def __init__(self, state: ServerState, token: Callable[[], str], clock: Clock = SYSTEM.clock) -> None:
        self.state = state
        self.jobs = JobTable(clock)
        self.history = MetricsHistory(state.metrics, clock)
        self.dashboard = DashboardFiles()
        self._token = token
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="lmcache-admin")
        self._figures = ThreadPoolExecutor(2, thread_name_prefix="lmcache-figures")

    def close(self) -> None:
        self.jobs.close()
        for threads in (self._threads, self._figures):
            threads.shutdown(wait=False, cancel_futures=True)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Runs what may take time, also as long as an adapter that hangs takes it."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def figures(self, compute: Callable[[], T]) -> T:
        """Runs what computes but waits for no adapter and no disk: what says how the server is does not stand behind
        what may wait for them."""
        return await asyncio.get_running_loop().run_in_executor(self._figures, compute)

    @property
    def cache(self) -> CacheOperations:
        """ServerUnavailable while there is none."""
        if not self.state.ready():
            raise ServerUnavailable("The server is starting or shutting down.")
        return self.state.operations

    async def admit(self, operation: Operation, request: Request) -> Call:
        return await requests.admit(operation, request, self._token())
