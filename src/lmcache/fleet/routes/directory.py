"""What servers tell, and where copies are."""

from __future__ import annotations

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from lmcache.core.limits import MAX_FLEET_COPIES_ASKED, MAX_FLEET_EVENT_BYTES
from lmcache.errors import ConfigError
from lmcache.fleet import messages as m
from lmcache.fleet.event_batches import decode_events
from lmcache.fleet.routes.base import RouteContext
from lmcache.http.operation import Access, Call, Operation

_FEW_EVENTS = 256  # batches and objects


class DirectoryRoutes:
    def __init__(self, context: RouteContext) -> None:
        self._context = context
        self._fleet = context.fleet

    def operations(self) -> list[Operation]:
        read, change = Access.READ, Access.CHANGE
        return [
            Operation(
                *("POST", "/events", "A server tells what has come and gone there", change, self.events),
                m.EventsAnswer,
                body=m.EventsRequest,
                decode=_events,
                most_body_bytes=MAX_FLEET_EVENT_BYTES,
            ),
            Operation(
                *("POST", "/directory/lookup", "Tells which servers have each object, or each chunk of a prompt", read),
                *(self.lookup, m.LookupAnswer),
                body=m.LookupRequest,
                large_body=True,
            ),
            Operation(
                *("GET", "/directory/keys", "Lists copies, a page at a time", read, self.keys, m.KeysAnswer),
                query=m.KeysQuery,
            ),
            Operation("GET", "/directory/stats", "How much the directory knows", read, self.stats, m.DirectoryStats),
        ]

    async def events(self, call: Call) -> m.EventsAnswer:
        batches, intake = call.body.batches, self._fleet.intake
        if intake.is_idle and sum(1 + batch.object_count for batch in batches) <= _FEW_EVENTS:
            return intake.apply(batches)  # takes less than to hand it to a thread
        return await self._context.in_thread(lambda: intake.apply(batches))

    async def lookup(self, call: Call) -> Response:
        body: m.LookupRequest = call.body

        def look() -> bytes:
            prompt = self._fleet.prompt(*(body.keys, body.token_ids, body.model_name, body.world_size, body.cache_salt))
            partials = self._fleet.stored_partials(prompt)
            asked = len(prompt.keys) + len(partials) * prompt.world_size
            if asked * body.copies > MAX_FLEET_COPIES_ASKED:
                raise ConfigError(
                    f'The body: "copies" {body.copies} of {asked} objects are more than {MAX_FLEET_COPIES_ASKED}: '
                    "ask for fewer of either."
                )
            directory, most = self._fleet.directory, body.copies
            return msgspec.json.encode(
                m.LookupAnswer(
                    *(prompt.chunks, directory.lookup(prompt.keys, most), self._fleet.settings.chunk_size),
                    [m.PartialResult(tokens, directory.lookup(keys, most)) for tokens, keys in partials],
                )
            )

        return Response(await self._context.in_thread(look), media_type="application/json")

    async def keys(self, call: Call) -> Response:
        query: m.KeysQuery = call.query

        def listed() -> bytes:
            entries, next_offset = self._fleet.directory.list_keys(
                query.tier, query.instance_id, query.backend, query.offset, query.limit
            )
            return msgspec.json.encode(m.KeysAnswer(entries, next_offset))

        return Response(await self._context.in_thread(listed), media_type="application/json")

    async def stats(self, call: Call) -> m.DirectoryStats:
        stats, counts = self._fleet.directory.stats(), self._fleet.intake.counts
        return m.DirectoryStats(
            *(stats.keys, stats.records, stats.void_records, stats.scopes, len(self._fleet.instances.all())),
            *(stats.memory_bytes, counts.applied, counts.duplicates, counts.stale, counts.gaps, counts.resyncs),
        )


def _events(raw: bytes) -> m.EventsRequest:
    try:
        return decode_events(raw)
    except msgspec.DecodeError as error:
        raise HTTPException(400, f"The body is no list of batches: {error}.") from None
