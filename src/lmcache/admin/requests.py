"""What all operations share: the server behind them, who may ask, bodies, parameters, threads for what takes time,
the history of the metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request

from lmcache.admin.access import may_read_salts, why_reading_is_refused, why_refused
from lmcache.admin.dashboard_files import DashboardFiles
from lmcache.admin.jobs import JobTable
from lmcache.admin.operation import Access, Call, Operation
from lmcache.admin.state import ServerState
from lmcache.clock import Clock, SystemClock
from lmcache.config.struct_settings import keys_of, read
from lmcache.errors import ConfigError, ServerUnavailable
from lmcache.service.cache_operations import CacheOperations
from lmcache.telemetry.history import MetricsHistory

BODY_DEADLINE_SECONDS = 10.0
METRICS_OFF = "Metrics are off: the server was started with --disable-metrics or --disable-observability."

T = TypeVar("T")


class AdminContext:
    """`token` gives the admin token that counts now, "" when only this host may change state."""

    def __init__(self, state: ServerState, token: Callable[[], str], clock: Clock | None = None) -> None:
        self.state = state
        clock = clock or SystemClock()
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
        """HTTPException: who asks may not, or what is asked for cannot be understood. The body of somebody who may not
        ask is not read."""
        token = self._token()
        if operation.access is Access.CHANGE and (refusal := why_refused(request, token)):
            raise HTTPException(403, refusal)
        if operation.access is Access.READ and (refusal := why_reading_is_refused(request, token)):
            raise HTTPException(403, refusal)
        try:
            query = read(_numbers(request, operation.query), operation.query, "The query") if operation.query else None
            body = await _body(request, operation) if operation.body else None
        except ConfigError as error:
            raise HTTPException(400, " ".join(error.problems)) from None
        request.state.asked = (query, body)  # for the audit
        return Call(request, body, query, may_read_salts(request, token))


def _numbers(request: Request, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The query as the Struct wants it: everything is text there."""
    wanted = {key.name for key in keys_of(kind) if key.expected.startswith("a whole number")}
    given: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name in given:
            raise ConfigError(f'The query: the key "{name}" is there twice.')
        given[name] = (
            int(value) if name in wanted and value.isascii() and value.isdigit() and len(value) < 19 else value
        )
    return given


async def _body(request: Request, operation: Operation) -> Any:
    assert operation.body is not None
    try:
        raw = await asyncio.wait_for(_read(request, operation.max_body_bytes), BODY_DEADLINE_SECONDS)
    except asyncio.TimeoutError:
        raise HTTPException(408, "The body did not arrive in time.") from None
    try:
        given = msgspec.json.decode(raw) if raw.strip() else {}
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        raise HTTPException(400, "The body is not JSON.") from None
    if not isinstance(given, dict):
        raise HTTPException(400, "The body must be a JSON object.")
    return read(given, operation.body, "The body")


async def _read(request: Request, most_bytes: int) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most_bytes:
            raise HTTPException(413, f"The body is larger than {most_bytes} bytes.")
    return bytes(body)
