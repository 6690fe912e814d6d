"""Pins: objects that are not to be evicted for a while."""

from __future__ import annotations

from starlette.exceptions import HTTPException

from lmcache.admin import messages as m
from lmcache.admin.requests import AdminContext
from lmcache.http.operation import Access, Call, Operation
from lmcache.tiering.pins import PinFigures


class PinRoutes:
    def __init__(self, context: AdminContext) -> None:
        self._context = context

    def operations(self) -> list[Operation]:
        path = "/cache/pins"
        return [
            Operation("GET", path, "All pins", Access.READ, self.all, m.Pins),
            Operation(
                *("POST", path, "Pins objects against eviction, for a limited time", Access.CHANGE, self.pin, m.Pin),
                body=m.PinRequest,
                large_body=True,
            ),
            Operation(
                *("DELETE", path, "Ends a pin, or all of an owner", Access.CHANGE, self.unpin, m.Unpinned),
                body=m.UnpinRequest,
            ),
        ]

    async def all(self, call: Call) -> m.Pins:
        pins = await self._context.in_thread(self._context.cache.pins.all)
        return m.Pins([_shown(pin) for pin in pins], sum(pin.objects for pin in pins))

    async def pin(self, call: Call) -> m.Pin:
        body: m.PinRequest = call.body
        cache = self._context.cache
        pin = await self._context.in_thread(
            lambda: cache.pins.add(cache.keys_of(body.keys), body.owner, body.ttl_seconds)
        )
        return _shown(pin)

    async def unpin(self, call: Call) -> m.Unpinned:
        body: m.UnpinRequest = call.body
        if bool(body.pin_id) == bool(body.owner):
            raise HTTPException(400, 'The body needs either "pin_id" or "owner".')
        cache = self._context.cache
        return m.Unpinned(*await self._context.in_thread(lambda: cache.pins.remove(body.pin_id, body.owner)))


def _shown(pin: PinFigures) -> m.Pin:
    return m.Pin(pin.pin_id, pin.owner, pin.objects, pin.missing, round(pin.remaining_seconds, 3))
