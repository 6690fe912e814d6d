"""The last hour of the metrics, sampled while the listener serves."""

from __future__ import annotations

import asyncio
import logging

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from lmcache.admin import messages as m
from lmcache.admin.requests import METRICS_OFF, AdminContext
from lmcache.errors import LMCacheError
from lmcache.http.operation import Access, Call, Operation

logger = logging.getLogger("lmcache.admin")


class HistoryRoutes:
    def __init__(self, context: AdminContext) -> None:
        self._context = context

    def operations(self) -> list[Operation]:
        return [
            Operation(
                *(
                    "GET",
                    "/metrics/history",
                    "Samples of the last hour, one every ten seconds; salts are digests as in GET /metrics",
                ),
                *(Access.PUBLIC, self.history, m.History),
                query=m.HistoryQuery,
                refusals={404: "metrics are off"},
            )
        ]

    async def history(self, call: Call) -> Response:
        if not self._context.state.metrics.enabled:
            raise HTTPException(404, METRICS_OFF)
        since, hides_salts = call.query.since, not call.may_read_salts
        return Response(
            await self._context.figures(lambda: self._encoded(since, hides_salts)), media_type="application/json"
        )

    def _encoded(self, since: int, hides_salts: bool) -> bytes:
        excerpt = self._context.history.since(since, hides_salts=hides_salts)
        series, samples = [list(map(msgspec.Raw, texts)) for texts in (excerpt.series, excerpt.samples)]
        fields = (self._context.history.interval_seconds, excerpt.times, series, samples)
        return msgspec.json.encode(dict(zip(m.History.__struct_fields__, fields, strict=True)))


async def keep_history(context: AdminContext) -> None:
    """Takes samples until it is cancelled."""
    while context.state.metrics.enabled:
        try:
            await context.figures(context.history.sample)
        except LMCacheError as error:  # a part did not answer: the history has a gap
            logger.debug("No sample of the metrics was taken: %s", error)
        except Exception:  # the root of the task: the next sample may be taken
            logger.exception("No sample of the metrics was taken, by a fault")
        await asyncio.sleep(context.history.interval_seconds)
