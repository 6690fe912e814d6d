"""The routes of a controller, for scripts and routers that know those. Each answer repeats its `event_id`."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException

from lmcache.fleet import controller_messages as c
from lmcache.fleet.controller import Controller
from lmcache.fleet.routes.base import RouteContext
from lmcache.http.operation import Access, Call, Operation


class ControllerRoutes:
    def __init__(self, context: RouteContext) -> None:
        self._context = context
        self._fleet = context.fleet
        self._controller = Controller(context.fleet)

    def operations(self) -> list[Operation]:
        read, change = Access.READ, Access.CHANGE
        large: dict[str, Any] = {"large_body": True}
        return [
            Operation(
                *("POST", "/query_instance", "Which server is at an address", read, self.query_instance),
                c.QueryInstanceAnswer,
                body=c.QueryInstance,
            ),
            Operation(
                *("POST", "/lookup", "Which servers have how much of a prompt", read, self.lookup, c.LookupAnswer),
                body=c.Lookup,
                **large,
            ),
            Operation(
                *("POST", "/clear", "Empties a tier of a server", change, self.clear, c.ClearAnswer), body=c.Clear
            ),
            Operation(
                *("POST", "/pin", "Pins a prompt at a server", change, self.pin, c.PinAnswer),
                body=c.Positioned,
                **large,
            ),
            Operation(
                *("POST", "/unpin", "Ends the pins of a prompt at a server", change, self.unpin, c.UnpinAnswer),
                body=c.Positioned,
                **large,
            ),
            Operation(
                *("POST", "/compress", "Moves a prompt from L1 to the adapter of that serde: a job", change),
                *(self.compress, c.JobAnswer),
                body=c.Recode,
                **large,
            ),
            Operation(
                *("POST", "/decompress", "Moves a prompt from the adapter of that serde to L1: a job", change),
                *(self.decompress, c.JobAnswer),
                body=c.Recode,
                **large,
            ),
            Operation(
                *("POST", "/move", "Moves a prompt between servers, or tiers of one: a job", change, self.move),
                c.JobAnswer,
                body=c.Move,
                **large,
            ),
            Operation(
                *("POST", "/health", "Does a server answer?", read, self.health, c.HealthAnswer), body=c.OfInstance
            ),
            Operation(
                *("POST", "/check_finish", "How far a job is", read, self.check_finish, c.FinishAnswer),
                body=c.CheckFinish,
                refusals={404: "there is no such job"},
            ),
            Operation(
                *("POST", "/query_worker_info", "What a server told when it joined", read, self.worker_info),
                c.WorkerInfoAnswer,
                body=c.OfInstance,
            ),
            Operation("GET", "/controller/workers", "The same of all servers", read, self.workers, c.WorkersAnswer),
            Operation(
                *("GET", "/controller/key-stats", "How many objects each server has", read, self.key_stats),
                c.KeyStats,
            ),
        ]

    async def query_instance(self, call: Call) -> c.QueryInstanceAnswer:
        body: c.QueryInstance = call.body
        at = [instance.instance_id for instance in self._fleet.instances.all() if instance.ip == body.ip]
        return c.QueryInstanceAnswer(self._event(body.event_id), at[0] if at else None)

    async def lookup(self, call: Call) -> c.LookupAnswer:
        body: c.Lookup = call.body

        def look() -> tuple[dict[str, list[str | int]], bool]:
            layout, complete = self._controller.lookup(body.tokens, body.model_name, body.cache_salt)
            return {name: [location, tokens] for name, (location, tokens) in layout.items()}, complete

        return c.LookupAnswer(self._event(body.event_id), *await self._context.in_thread(look))

    async def clear(self, call: Call) -> c.ClearAnswer:
        body: c.Clear = call.body
        objects, size_bytes = await self._context.asking_servers(
            lambda: self._controller.clear(body.instance_id, body.location)
        )
        return c.ClearAnswer(self._event(body.event_id), objects, size_bytes)

    async def pin(self, call: Call) -> c.PinAnswer:
        body: c.Positioned = call.body

        def pin() -> tuple[str, int]:
            prompt = self._controller.prompt(body.tokens, body.model_name, body.cache_salt)
            return self._controller.pin(body.instance_id, body.location, prompt)

        pin_id, tokens = await self._context.asking_servers(pin)
        return c.PinAnswer(self._event(body.event_id), tokens, pin_id)

    async def unpin(self, call: Call) -> c.UnpinAnswer:
        body: c.Positioned = call.body

        def unpin() -> int:
            prompt = self._controller.prompt(body.tokens, body.model_name, body.cache_salt)
            return self._controller.unpin(body.instance_id, body.location, prompt)

        return c.UnpinAnswer(self._event(body.event_id), await self._context.asking_servers(unpin))

    async def compress(self, call: Call) -> c.JobAnswer:
        return await self._recode(call.body, encode=True)

    async def decompress(self, call: Call) -> c.JobAnswer:
        return await self._recode(call.body, encode=False)

    async def _recode(self, body: c.Recode, *, encode: bool) -> c.JobAnswer:
        def begin() -> str:
            prompt = self._controller.prompt(body.tokens, body.model_name, body.cache_salt)
            job = self._controller.recode(
                *(body.instance_id, body.method, body.location, prompt, body.tokens), encode=encode
            )
            return job.request_id

        return c.JobAnswer(await self._context.asking_servers(begin))

    async def move(self, call: Call) -> c.JobAnswer:
        body: c.Move = call.body

        def begin() -> str:
            prompt = self._controller.prompt(body.tokens, body.model_name, body.cache_salt)
            job = self._controller.move(
                body.old_position, body.new_position, prompt, body.tokens, copy=body.should_copy
            )
            return job.request_id

        return c.JobAnswer(await self._context.asking_servers(begin))

    async def health(self, call: Call) -> c.HealthAnswer:
        body: c.OfInstance = call.body
        reason = await self._context.asking_servers(lambda: self._controller.health(body.instance_id))
        return c.HealthAnswer(self._event(body.event_id), {"0": -1 if reason else 0}, reason)

    async def check_finish(self, call: Call) -> c.FinishAnswer:
        job = self._fleet.jobs.find(call.body.event_id)
        if job is None:
            raise HTTPException(404, "There is no such job; those that ended long ago are forgotten, see GET /jobs.")
        shown = self._fleet.jobs.shown(job)
        return c.FinishAnswer(
            *(shown.request_id, shown.status, shown.objects_total, shown.objects_done, shown.objects_failed),
            shown.detail,
        )

    async def worker_info(self, call: Call) -> c.WorkerInfoAnswer:
        body: c.OfInstance = call.body
        self._fleet.instances.find(body.instance_id)
        found = [worker for worker in self._workers() if worker.instance_id == body.instance_id]
        return c.WorkerInfoAnswer(self._event(body.event_id), found)

    def _event(self, event_id: str) -> str:
        return event_id or self._fleet.random_bytes(16).hex()

    async def workers(self, call: Call) -> c.WorkersAnswer:
        return c.WorkersAnswer(self._workers())

    def _workers(self) -> list[c.Worker]:
        epoch_seconds = self._fleet.epoch_seconds
        return [
            c.Worker(
                *(instance.instance_id, 0, instance.ip, instance.mq_port, instance.p2p_advertised_url),
                *(epoch_seconds + instance.joined_at, epoch_seconds + instance.heard_at),
            )
            for instance in self._fleet.instances.all()
        ]

    async def key_stats(self, call: Call) -> c.KeyStats:
        def count() -> c.KeyStats:
            fleet = self._fleet
            held = {
                instance.instance_id: sum(usage.objects for usage in fleet.directory.usage(instance.instance_id))
                for instance in fleet.instances.all()
            }
            return c.KeyStats(fleet.directory.stats().keys, held)

        return await self._context.in_thread(count)
