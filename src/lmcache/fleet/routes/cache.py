"""What operators may do with the objects of a fleet: warm, pin, delete, move."""

from __future__ import annotations

from starlette.exceptions import HTTPException

from lmcache.fleet import messages as m
from lmcache.fleet import operations as work
from lmcache.fleet.metadata import FleetPin
from lmcache.fleet.pins import PinState
from lmcache.fleet.routes.base import RouteContext
from lmcache.http.operation import Access, Call, Operation

_NO_JOB = {404: "there is no such job; those that ended long ago are forgotten"}


class CacheRoutes:
    def __init__(self, context: RouteContext) -> None:
        self._context = context
        self._fleet = context.fleet

    def operations(self) -> list[Operation]:
        read, change, pins = Access.READ, Access.CHANGE, "/cache/pins"
        return [
            Operation(
                *("POST", "/cache/prefetches", "A server warms its L1 with a prompt: a job", change, self.prefetch),
                m.Started,
                body=m.PromptRequest,
                status=202,
                large_body=True,
            ),
            Operation(
                *("GET", "/cache/prefetches/{instance_id}/{request_id}", "How far that is", read, self.prefetched),
                m.JobStatus,
                refusals=_NO_JOB,
            ),
            Operation("GET", pins, "All pins", read, self.pins, m.PinList),
            Operation(
                *("POST", pins, "Pins objects against eviction wherever they are", change, self.pin, m.PinEntry),
                body=m.PinRequest,
                large_body=True,
            ),
            Operation(
                *("DELETE", pins, "Ends a pin, or all of an owner", change, self.unpin, m.Unpinned), body=m.UnpinRequest
            ),
            Operation(
                *("POST", "/cache/delete", "Deletes objects wherever they are", change, self.delete, m.DeleteAnswer),
                body=m.DeleteRequest,
                large_body=True,
            ),
            Operation(
                *("POST", "/cache/moves", "Loads a prompt at another server and takes it from this one: a job", change),
                *(self.move, m.Started),
                body=m.MoveRequest,
                status=202,
                large_body=True,
            ),
            Operation("GET", "/jobs", "Jobs under way, and the latest that ended", read, self.jobs, m.JobList),
            Operation("GET", "/jobs/{request_id}", "How far a job is", read, self.job, m.JobStatus, refusals=_NO_JOB),
        ]

    # ---- prefetches --------------------------------------------------------------------------------------------------
    async def prefetch(self, call: Call) -> m.Started:
        body: m.PromptRequest = call.body
        return await self._context.asking_servers(lambda: work.prefetch(self._fleet, body))

    async def prefetched(self, call: Call) -> m.JobStatus:
        instance_id, request_id = call.path("instance_id"), call.path("request_id")
        job = await self._context.asking_servers(lambda: work.server_job(self._fleet, instance_id, request_id))
        if job is None:
            raise HTTPException(404, "There is no such job; those that ended long ago are forgotten.")
        return job

    # ---- pins --------------------------------------------------------------------------------------------------------
    async def pins(self, call: Call) -> m.PinList:
        pins = await self._context.in_thread(self._fleet.pins.all)
        return m.PinList([self._pin(pin, state) for pin, state in pins])

    def _pin(self, pin: FleetPin, state: PinState) -> m.PinEntry:
        held = sum(state.held.values())
        return m.PinEntry(
            *(pin.pin_id, pin.owner, held, max(0, len(pin.names) - held), sorted(state.held), dict(state.failed)),
            round(self._fleet.pins.remaining_seconds(pin), 3),
        )

    async def pin(self, call: Call) -> m.PinEntry:
        body: m.PinRequest = call.body

        return await self._context.asking_servers(lambda: self._pin(*work.pin(self._fleet, body)))

    async def unpin(self, call: Call) -> m.Unpinned:
        body: m.UnpinRequest = call.body
        if bool(body.pin_id) == bool(body.owner):
            raise HTTPException(400, 'The body needs either "pin_id" or "owner".')
        ended = await self._context.asking_servers(lambda: self._fleet.pins.remove(body.pin_id, body.owner))
        return m.Unpinned(ended.pins, ended.objects, list(ended.behind))

    # ---- others ------------------------------------------------------------------------------------------------------
    async def delete(self, call: Call) -> m.DeleteAnswer:
        body: m.DeleteRequest = call.body
        return await self._context.asking_servers(lambda: work.delete(self._fleet, body))

    async def move(self, call: Call) -> m.Started:
        body: m.MoveRequest = call.body
        return await self._context.in_thread(lambda: work.begin_move(self._fleet, body))

    async def jobs(self, call: Call) -> m.JobList:
        return m.JobList([self._fleet.jobs.shown(job) for job in self._fleet.jobs.all()])

    async def job(self, call: Call) -> m.JobStatus:
        job = self._fleet.jobs.find(call.path("request_id"))
        if job is None:
            raise HTTPException(404, "There is no such job; those that ended long ago are forgotten, see GET /jobs.")
        return self._fleet.jobs.shown(job)
