"""After a restart of the coordinator a hundred servers tell everything, a few at a time: real reporters and the real
intake, in simulated time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from lmcache.core.limits import MAX_FLEET_RESYNCS
from lmcache.errors import ServerUnavailable
from lmcache.fleet.event_batches import decode_events
from lmcache.fleet.events import EventIntake
from lmcache.fleet.reporter import Reporter, ResyncNeeded
from lmcache.fleet.resync_turns import LONGEST_SECONDS, SILENT_SECONDS
from lmcache.http.client import HttpRefused
from lmcache.telemetry.metrics import Metrics
from seeds import SEED
from simulation.world import World
from unit.fleet.support import DictTier, told, truth

SERVERS = 100
OBJECTS = 40
REQUEST_SECONDS = 0.2  # of events
REQUESTS = 1 + 1 + math.ceil(OBJECTS / 7) + 1  # of a resync: begin, capacities, pages, end
FLUSH_SECONDS = 1.0


class Coordinator:
    """Which servers tell everything at the moment is seen by what passes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.intake: EventIntake | None = None  # none: it is away
        self.resyncing: set[str] = set()
        self.most = 0
        self.asks = 0
        self.has_turns = True
        self.refuses_ends_of: set[str] = set()
        self.order: list[str] = []  # in which they began

    def start(self) -> None:
        self.intake = EventIntake(lambda name: True, self.world)
        self.resyncing.clear()
        self.most = self.asks = 0
        self.order.clear()

    def read(self, kind: Any, method: str, path: str, body: Any = None, content_type: str = "") -> Any:
        if self.intake is None:
            raise ServerUnavailable("nothing answers")
        if path.endswith("/resync"):
            self.asks += 1
            if not self.has_turns:
                raise HttpRefused(404, "no such path")
            return {"wait_seconds": self.intake.turns.ask(path.split("/")[2])}
        self.world.sleep(REQUEST_SECONDS)
        batches = decode_events(body).batches
        if any(batch.resync == "end" and batch.instance_id in self.refuses_ends_of for batch in batches):
            raise HttpRefused(413, "a proxy says so")
        for batch in batches:
            if batch.resync == "begin":
                self.resyncing.add(batch.instance_id)
                self.order.append(batch.instance_id)
            self.most = max(self.most, len(self.resyncing))
            if batch.resync == "end":
                self.resyncing.discard(batch.instance_id)
        if self.intake is None:
            raise ServerUnavailable("it has just been killed")
        return self.intake.apply(batches)


class Server:
    """As `EventReporting` does, without joining: the intake takes it for one that has joined."""

    def __init__(self, name: str, world: World, coordinator: Coordinator) -> None:
        self.name = name
        self.tier = DictTier()
        for number in range(OBJECTS):
            self.tier.add((number % 4, number), 4096)
        self._world = world
        self._reporter = Reporter(
            *(name, [self.tier], coordinator, Metrics().fleet, world, world.sleep), capacity_seconds=5.0
        )

    def run(self) -> None:
        while True:
            try:
                self._reporter.tell_everything()
                while True:
                    self._world.sleep(FLUSH_SECONDS)
                    self._reporter.tell_changes()
            except ResyncNeeded:
                self._world.sleep(self._reporter.seconds_until_resync())


@pytest.fixture
def world() -> Any:
    world = World(SEED)
    yield world
    world.close()


def fleet(world: World) -> tuple[Coordinator, list[Server]]:
    coordinator = Coordinator(world)
    coordinator.start()
    servers = [Server(f"server-{number:02}", world, coordinator) for number in range(SERVERS)]
    for server in servers:
        world.start_thread(server.run, server.name)
    return coordinator, servers


def known(coordinator: Coordinator, servers: list[Server]) -> Callable[[], bool]:
    def is_known() -> bool:
        assert coordinator.intake is not None
        return coordinator.intake.counts.resyncs >= len(servers) and told(coordinator.intake.directory) == {
            name: size for server in servers for name, size in truth(server.name, [server.tier]).items()
        }

    return is_known


def test_a_few_at_a_time_until_all_have(world: World) -> None:
    coordinator, servers = fleet(world)
    assert world.block(known(coordinator, servers), 600.0)
    coordinator.intake = None
    world.sleep(20.0)
    coordinator.start()
    restarted_at = world.now
    assert world.block(known(coordinator, servers), 600.0)
    assert coordinator.most == MAX_FLEET_RESYNCS
    assert coordinator.resyncing == set() and len(coordinator.order) == SERVERS
    rounds = math.ceil(SERVERS / MAX_FLEET_RESYNCS)
    took = world.now - restarted_at
    assert rounds * REQUESTS * REQUEST_SECONDS < took < 4 * rounds * REQUESTS * REQUEST_SECONDS + 30.0
    assert coordinator.asks < 40 * SERVERS


def test_servers_that_die_in_their_turn_do_not_keep_it(world: World) -> None:
    coordinator, servers = fleet(world)
    assert world.block(lambda: len(coordinator.resyncing) == MAX_FLEET_RESYNCS, 60.0)
    dead = set(coordinator.resyncing)
    world.kill(lambda name: name in dead)
    alive = [server for server in servers if server.name not in dead]
    died_at = world.now

    def all_others() -> bool:
        return set(coordinator.order) == {server.name for server in servers}

    world.sleep(SILENT_SECONDS - 1.0)
    assert not all_others()
    assert world.block(all_others, 600.0)
    assert world.now < died_at + SILENT_SECONDS + len(alive)


def test_a_coordinator_without_turns_is_told_at_once(world: World) -> None:
    coordinator = Coordinator(world)
    coordinator.has_turns = False
    coordinator.start()
    server = Server("server", world, coordinator)
    world.start_thread(server.run, server.name)
    assert world.block(known(coordinator, [server]), 10.0)
    assert coordinator.asks == 1


def test_servers_whose_end_is_refused_do_not_keep_their_turns(world: World) -> None:
    """They go on telling what changes, and their capacities."""
    coordinator, servers = fleet(world)
    assert world.block(lambda: len(coordinator.resyncing) == MAX_FLEET_RESYNCS, 60.0)
    coordinator.refuses_ends_of = set(coordinator.resyncing)
    world.sleep(LONGEST_SECONDS - 60.0)
    assert set(coordinator.order) == coordinator.refuses_ends_of
    assert world.block(lambda: len(set(coordinator.order)) == len(servers), 300.0)
