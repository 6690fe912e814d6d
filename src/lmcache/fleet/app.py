"""The HTTP interface of a coordinator: the table of its operations, and the application that serves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from lmcache import __version__
from lmcache.fleet import messages as m
from lmcache.fleet.fleet import Fleet
from lmcache.fleet.routes.base import RouteContext
from lmcache.fleet.routes.cache import CacheRoutes
from lmcache.fleet.routes.controller import ControllerRoutes
from lmcache.fleet.routes.directory import DirectoryRoutes
from lmcache.fleet.routes.instances import InstanceRoutes
from lmcache.fleet.routes.quotas import QuotaRoutes
from lmcache.http import openapi, requests
from lmcache.http.app import application, index_text, routes
from lmcache.http.operation import Access, Call, Operation
from lmcache.telemetry.metrics import CoordinatorMetrics

_EXPOSITION_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TITLE = "LMCache coordinator"


class Pages(Protocol):
    """What browsers get at `/`."""

    def page(self) -> Response | None:
        """None where it is not installed."""
        ...

    def route(self) -> Route:
        """Of the files that the page names."""
        ...


class OwnRoutes:
    """What concerns the coordinator itself."""

    def __init__(
        self, context: RouteContext, metrics: CoordinatorMetrics | None, page: Callable[[], Response | None]
    ) -> None:
        self._context = context
        self._fleet = context.fleet
        self._metrics = metrics
        self._page = page
        self._counted = [0] * 7
        self.index_text = ""

    def operations(self) -> list[Operation]:
        public = Access.PUBLIC
        return [
            Operation("GET", "/", "This list; for browsers a page of the fleet", public, self.index, "text/plain"),
            Operation("GET", "/healthz", "Does the coordinator answer?", public, self.healthz, m.Status),
            Operation(
                *("GET", "/metrics", "Figures of the coordinator for Prometheus", public, self.metrics, "text/plain"),
                refusals={404: "metrics are off"},
            ),
        ]

    async def index(self, call: Call) -> Response:
        page = self._page() if "text/html" in call.request.headers.get("accept", "") else None
        return page or PlainTextResponse(self.index_text, headers={"Vary": "Accept"})

    async def healthz(self, call: Call) -> m.Status:
        return m.Status("healthy")

    async def metrics(self, call: Call) -> Response:
        metrics = self._metrics
        if metrics is None:
            raise HTTPException(404, "Metrics are off: the coordinator was started with --disable-metrics.")
        return Response(await self._context.in_thread(lambda: self._exposition(metrics)), media_type=_EXPOSITION_TYPE)

    def _exposition(self, metrics: CoordinatorMetrics) -> bytes:
        stats, counts = self._fleet.directory.stats(), self._fleet.intake.counts
        metrics.coordinator_instances.set(len(self._fleet.instances.all()))
        metrics.coordinator_keys.set(stats.keys)
        metrics.coordinator_placements.set(stats.records)
        metrics.coordinator_directory_bytes.set(stats.memory_bytes)
        total = [counts.applied, counts.duplicates, counts.stale, counts.entries, counts.gaps, counts.resyncs]
        total.append(self._fleet.log_reader.failures if self._fleet.log_reader is not None else 0)
        before, self._counted = self._counted, total
        counters = [metrics.coordinator_batches.labels(outcome) for outcome in ("applied", "duplicate", "stale")]
        counters += [metrics.coordinator_entries, metrics.coordinator_gaps, metrics.coordinator_complete_resyncs]
        counters.append(metrics.coordinator_event_log_failures)
        for counter, old, new in zip(counters, before, total, strict=True):
            counter.inc(new - old)
        return metrics.exposition()


def operations(
    context: RouteContext, metrics: CoordinatorMetrics | None, page: Callable[[], Response | None] = lambda: None
) -> list[Operation]:
    """All of them."""
    own = OwnRoutes(context, metrics, page)
    table = own.operations() + InstanceRoutes(context).operations() + DirectoryRoutes(context).operations()
    table += CacheRoutes(context).operations() + QuotaRoutes(context).operations()
    table += ControllerRoutes(context).operations()
    described: list[dict[str, Any]] = []  # made when it is first asked for

    async def describe(call: Call) -> Any:
        if not described:
            about = "The servers of a fleet, what they have, and what operators do with it."
            described.append(openapi.document(table, __version__, _TITLE, about))
        return described[0]

    table.append(
        Operation("GET", "/openapi.json", "All of this as OpenAPI", Access.PUBLIC, describe, dict[str, Any]),
    )
    own.index_text = index_text(f"{_TITLE} {__version__}", table)
    return table


def build_app(
    fleet: Fleet, token: Callable[[], str], metrics: CoordinatorMetrics | None, pages: Pages | None = None
) -> Starlette:
    """`token` gives the admin token that counts now, "" when only this host may ask. Without `pages` browsers get the
    list. At the end comes `state.close()`."""
    context = RouteContext(fleet)

    async def admit(operation: Operation, request: Request) -> Call:
        return await requests.admit(operation, request, token())

    all_routes = routes(operations(context, metrics, pages.page if pages else lambda: None), admit)
    app = application([*all_routes, pages.route()] if pages else all_routes, "a coordinator")
    app.state.close = context.close
    return app
