"""The real reporter tells the real intake over a network that loses, repeats and delays, while either side is started
again: after one resync the directory is what the servers have. TEST_FLEET_FAULTS rounds, in simulated time."""

from __future__ import annotations

import io
import logging
import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from lmcache.core.limits import REPORTED_ENTRIES
from lmcache.environment import Environment
from lmcache.errors import ServerUnavailable
from lmcache.fleet import checkpoint
from lmcache.fleet import messages as m
from lmcache.fleet.event_batches import MSGPACK_TYPE, decode_events
from lmcache.fleet.events import EventIntake
from lmcache.fleet.instances import Instance, Instances
from lmcache.fleet.reporter import Reporter, ResyncNeeded
from lmcache.http.client import JSON_TYPE
from lmcache.telemetry.metrics import Metrics
from manual_clock import ManualClock
from seeds import SEED
from unit.fleet.support import DictTier, told, truth

ROUNDS = int(os.environ.get("TEST_FLEET_FAULTS", "400"))
TIMEOUT_SECONDS = 30.0
CHANGES_A_ROUND = 30


class Coordinator:
    """Everything that one forgets when it is killed."""

    def __init__(self, clock: ManualClock, saved: bytes = b"") -> None:
        environment = Environment(clock, lambda size: bytes(size))
        self.instances = Instances(environment, TIMEOUT_SECONDS, self)
        self.intake = EventIntake(self.instances.knows, clock)
        if saved:
            checkpoint.restore(io.BytesIO(saved), self.instances, self.intake, clock.monotonic())

    def joined(self, instance: Instance) -> None:
        pass

    def left(self, instance_id: str) -> None:
        self.intake.forget(instance_id)

    def saved(self) -> bytes:
        file = io.BytesIO()
        checkpoint.write(file, self.instances, self.intake)
        return file.getvalue()


class Network:
    """Between servers and the coordinator that there is at the moment."""

    def __init__(self, rng: random.Random, clock: ManualClock) -> None:
        self.rng = rng
        self.clock = clock
        self.coordinator = Coordinator(clock)
        self.faults = True
        self.late: list[list[m.Batch]] = []  # that come once more, or for the first time
        self.fault_count = self.packed = self.text = 0

    def read(self, kind: Any, method: str, path: str, body: Any = None, content_type: str = JSON_TYPE) -> Any:
        if path.endswith("/resync"):
            if self.faults and self.rng.random() < 0.2:
                raise ServerUnavailable("The request was lost.")
            return {"wait_seconds": self.coordinator.intake.turns.ask(path.split("/")[2])}
        batches = decode_events(body).batches
        assert all(len(batch.entries) <= REPORTED_ENTRIES for batch in batches)
        fate = self.rng.random() if self.faults else 1.0
        self.fault_count += fate < 0.5
        if fate < 0.1:
            raise ServerUnavailable("The request was lost.")
        if fate < 0.2:
            self.late.append(batches)
            raise ServerUnavailable("The request is late.")
        if fate < 0.25:  # somebody in between threw it away, and says that it came: the next one comes as text
            return m.EventsAnswer(1, 0, 0)
        self.packed += content_type == MSGPACK_TYPE
        self.text += content_type == JSON_TYPE
        answer = self.coordinator.intake.apply(batches)
        if fate < 0.4:
            self.late.append(batches)
        if fate < 0.5:
            raise ServerUnavailable("The answer was lost.")
        return answer

    def deliver_late(self) -> None:
        self.rng.shuffle(self.late)
        while self.late and self.rng.random() < 0.5:
            self.coordinator.intake.apply(self.late.pop())


class Server:
    """A reporter with dicts for tiers, one step at a time."""

    def __init__(self, name: str, network: Network, wall_skew: float = 0.0) -> None:
        self.name = name
        self.network = network
        self.tiers = [DictTier(), DictTier("l2", "disk")]
        self.start()

    def start(self) -> None:
        """The process begins: nobody has joined, nothing has been told."""
        self.joined = self.told_everything = False
        self.reporter = Reporter(
            *(self.name, self.tiers, self.network, Metrics().fleet, self.network.clock, self.pause),
            capacity_seconds=5.0,
        )

    def pause(self, seconds: float) -> None:
        """As the thread does: whatever can happen meanwhile happens."""
        self.network.clock.advance(seconds)
        if seconds and self.network.faults:
            self.change(2)
        if not self.beat():
            raise ResyncNeeded("joined again")

    def beat(self) -> bool:
        """False: it had to join again."""
        instances = self.network.coordinator.instances
        if self.joined and instances.heartbeat(self.name):
            return True
        instances.register(m.RegisterRequest("127.0.0.1", 1, self.name), token="a token")
        self.reporter.know(self.network.coordinator.intake.stream(self.name).incarnation)
        was_joined, self.joined = self.joined, True
        return not was_joined

    def step(self) -> None:
        try:
            if not self.told_everything:
                self.reporter.tell_everything()
                self.told_everything = True
            else:
                self.reporter.tell_changes()
        except ResyncNeeded:
            self.told_everything = False
            self.network.clock.advance(self.reporter.seconds_until_resync())

    def change(self, most: int) -> None:
        rng = self.network.rng
        for _ in range(rng.randrange(most + 1)):
            tier = rng.choice(self.tiers)
            key = (rng.randrange(4), rng.randrange(40))
            if rng.random() < 0.6:
                tier.add(key, rng.randrange(1, 5) * 4096)
            else:
                tier.remove(key)

    def restart(self) -> None:
        """L1 is gone, L2 is as others left it."""
        rng = self.network.rng
        self.tiers = [DictTier(), self.tiers[1]]
        for key in list(self.tiers[1].held):
            if rng.random() < 0.2:
                self.tiers[1].lose(key)
        self.start()


def faults_of(network: Network, servers: list[Server]) -> list[Callable[[], None]]:
    rng = network.rng
    saved: list[bytes] = []

    def restart_coordinator() -> None:
        """From nothing, or from a checkpoint of whatever age."""
        network.coordinator = Coordinator(network.clock, rng.choice([b"", *saved]))

    def write_checkpoint() -> None:
        saved.append(network.coordinator.saved())
        del saved[:-3]

    def expire() -> None:
        network.coordinator.instances.expire()

    return [
        restart_coordinator,
        write_checkpoint,
        lambda: rng.choice(servers).restart(),
        lambda: network.clock.advance(TIMEOUT_SECONDS + 1),
        expire,
        network.deliver_late,
        network.deliver_late,
    ]


def test_after_one_resync_the_directory_is_what_the_servers_have(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "lmcache.fleet")  # a line for each fault
    rng = random.Random(SEED)
    clock = ManualClock(1_700_000_000.0)
    network = Network(rng, clock)
    servers = [Server(name, network) for name in ("a", "b", "c")]
    faults = faults_of(network, servers)
    checked = 0
    for number in range(ROUNDS):
        for server in servers:
            server.change(CHANGES_A_ROUND)
            server.step()
        clock.advance(1.0)
        if rng.random() < 0.3:
            rng.choice(faults)()
            network.fault_count += 1
        if number % 10 == 9:
            settle(network, servers)
            expected = {name: size for server in servers for name, size in truth(server.name, server.tiers).items()}
            assert told(network.coordinator.intake.directory) == expected, f"round {number}"
            network.coordinator.intake.directory.check()
            checked += len(expected)
    assert checked > ROUNDS and network.packed > ROUNDS and network.text > ROUNDS / 4
    print(f"{network.fault_count} faults in {ROUNDS} rounds")


def settle(network: Network, servers: list[Server]) -> None:
    """No more faults: heartbeats show a restart, the next batch a gap, and one resync mends it."""
    network.faults = False
    for batches in network.late:
        network.coordinator.intake.apply(batches)
    network.late.clear()
    for _ in range(6):
        network.clock.advance(6.0)
        for server in servers:
            server.beat() or setattr(server, "told_everything", False)
            server.step()
    network.faults = True
