"""Servers that join, live and leave."""

from __future__ import annotations

from collections.abc import Mapping, Set

from starlette.exceptions import HTTPException
from starlette.responses import Response

from lmcache.fleet import messages as m
from lmcache.fleet.directory import PlaceUsage
from lmcache.fleet.instances import Instance
from lmcache.fleet.routes.base import RouteContext
from lmcache.http.fleet_messages import FleetOverview, FleetServer, Told
from lmcache.http.operation import Access, Call, Operation


class InstanceRoutes:
    def __init__(self, context: RouteContext) -> None:
        self._context = context
        self._fleet = context.fleet

    def operations(self) -> list[Operation]:
        read, change = Access.READ, Access.CHANGE
        path = "/instances/{instance_id}"
        return [
            Operation(
                *("POST", "/instances", "A server joins, or joins again", change, self.register, m.Registered),
                body=m.RegisterRequest,
            ),
            Operation(
                *("PUT", f"{path}/heartbeat", "A server lives", change, self.heartbeat, m.HeartbeatAnswer),
                refusals={
                    404: "it has not joined, was silent for too long, or joined with another token: it is to join again"
                },
            ),
            Operation(
                *("POST", f"{path}/resync", "A server asks when it may tell everything", change, self.resync),
                m.ResyncTurn,
                refusals={404: "it has not joined: it is to join first"},
            ),
            Operation("DELETE", path, "A server leaves", change, self.remove, None, status=204),
            Operation(
                *("GET", "/instances", "The servers that have joined", read, self.all, m.Instances),
                query=m.InstancesQuery,
            ),
            Operation("GET", "/fleet", "The same at a glance, for the page at /", read, self.overview, FleetOverview),
            Operation("GET", "/instances/usage", "What each of them has", read, self.all_usage, m.FleetUsage),
            Operation(
                *("GET", f"{path}/usage", "What one of them has, by tier and backend", read, self.usage),
                m.InstanceUsage,
                refusals={404: "it has not joined"},
            ),
        ]

    async def register(self, call: Call) -> m.Registered:
        def register() -> m.Registered:
            instance, was_there = self._fleet.instances.register(call.body, token=call.admin_token)
            known = self._fleet.intake.stream(instance.instance_id).incarnation
            return m.Registered(instance.instance_id, was_there, known, self._fleet.settings.event_transport)

        return await self._context.in_thread(register)

    async def heartbeat(self, call: Call) -> m.HeartbeatAnswer:
        name = call.path("instance_id")
        if not self._fleet.instances.heartbeat(name, call.admin_token):
            raise HTTPException(
                404, "It has not joined, was silent for too long, or joined with another token: join again."
            )
        fleet = self._fleet
        return m.HeartbeatAnswer("ok", fleet.instances.members, *fleet.intake.glance(name), fleet.log_requests(name))

    async def resync(self, call: Call) -> m.ResyncTurn:
        name = call.path("instance_id")
        if not self._fleet.instances.knows(name):
            raise HTTPException(404, "It has not joined: join first.")
        return m.ResyncTurn(self._fleet.intake.turns.ask(name))

    async def remove(self, call: Call) -> Response:
        name = call.path("instance_id")
        await self._context.in_thread(lambda: self._fleet.instances.remove(name))
        return Response(status_code=204)

    async def all(self, call: Call) -> m.Instances:
        def shown() -> m.Instances:
            members, instances = self._fleet.instances.members, self._fleet.instances.all()
            return m.Instances([self._shown(instance, call.query.detail) for instance in instances], members)

        return await self._context.in_thread(shown)

    def _shown(self, instance: Instance, detail: str) -> m.InstanceEntry:
        monotonic = self._fleet.clock.monotonic()
        stream = self._fleet.intake.stream(instance.instance_id)
        return m.InstanceEntry(
            *(instance.instance_id, instance.ip, instance.http_port, instance.metadata if detail == "full" else {}),
            *(instance.p2p_advertised_url, instance.mq_port),
            *(round(monotonic - instance.joined_at, 3), round(monotonic - instance.heard_at, 3)),
            incarnation=stream.incarnation,
            seq=stream.seq,
            needs_resync=stream.needs_resync,
        )

    async def overview(self, call: Call) -> FleetOverview:
        def look() -> FleetOverview:
            behind = {"pins": self._fleet.pins.behind(), "quotas": self._fleet.quotas.behind()}
            servers = [self._at_a_glance(instance, behind) for instance in self._fleet.instances.all()]
            return FleetOverview(servers, self._fleet.settings.instance_timeout)

        return await self._context.in_thread(look)

    def _at_a_glance(self, instance: Instance, behind: Mapping[str, Set[str]]) -> FleetServer:
        name, monotonic = instance.instance_id, self._fleet.clock.monotonic()
        stream = self._fleet.intake.stream(name)
        usage = self._fleet.directory.usage(name)
        l1 = [place for place in usage if place.place.tier == "l1"]
        told: Told = "gap" if stream.needs_resync else "everything" if stream.incarnation else "nothing"
        return FleetServer(
            *(name, instance.url),
            *(round(monotonic - instance.joined_at, 3), round(monotonic - instance.heard_at, 3)),
            l1_objects=sum(place.objects for place in l1),
            l1_used_bytes=sum(place.used_bytes for place in l1),
            l1_capacity_bytes=sum(place.place.capacity_bytes for place in l1),
            l2_objects=sum(place.objects for place in usage if place.place.tier == "l2"),
            told="waits" if self._fleet.intake.turns.waits(name) else "resync" if stream.resyncs else told,
            behind=[of for of, names in behind.items() if name in names],
        )

    async def all_usage(self, call: Call) -> m.FleetUsage:
        def usage() -> m.FleetUsage:
            return m.FleetUsage([self._usage(instance.instance_id) for instance in self._fleet.instances.all()])

        return await self._context.in_thread(usage)

    async def usage(self, call: Call) -> m.InstanceUsage:
        name = call.path("instance_id")
        if not self._fleet.instances.knows(name):
            raise HTTPException(404, f"No server {name!r} has joined; GET /instances lists those that have.")
        return await self._context.in_thread(lambda: self._usage(name))

    def _usage(self, instance_id: str) -> m.InstanceUsage:
        return m.InstanceUsage(instance_id, [_shown_usage(usage) for usage in self._fleet.directory.usage(instance_id)])


def _shown_usage(usage: PlaceUsage) -> m.Usage:
    place = usage.place
    ratio = round(usage.used_bytes / place.capacity_bytes, 6) if place.capacity_bytes else 0.0
    return m.Usage(
        *(place.tier, place.backend, place.shared, usage.objects, usage.used_bytes, place.capacity_bytes, ratio)
    )
