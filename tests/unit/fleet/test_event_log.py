"""A log between servers and coordinator that loses what it likes: in the end the directory says what servers have."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from lmcache.errors import ServerUnavailable
from lmcache.fleet import fleet, reporting
from lmcache.fleet.event_log import ValkeySettings
from polling import until
from seeds import SEED
from unit.fleet.test_reporting import Joined, coordinator, url_of


class LossyLog:
    """In memory. It loses a fifth of what it takes, refuses a fifth, and says some of it twice."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.bodies: list[tuple[str, bytes]] = []
        self.is_lossy = True
        self.loses_all = False
        self.lost = 0

    def append(self, body: bytes) -> None:
        chance = self._rng.random() if self.is_lossy else 1.0
        if chance < 0.2:
            raise ServerUnavailable("The log is away.")
        if self.loses_all:
            self.lost += 1
        elif chance > 0.4:
            self.bodies.append((f"{len(self.bodies) + 1:06}", body))

    def read(self, position: str, wait_seconds: float) -> Sequence[tuple[str, bytes]]:
        found = [entry for entry in self.bodies if entry[0] > position]
        if self.is_lossy and self._rng.random() < 0.2:
            raise ServerUnavailable("The log is away.")
        if not found:
            time.sleep(0.01)
        return self.bodies[-2:-1] + found if self.is_lossy else found

    def retained(self, position: str) -> str:
        return position or "0"

    def close(self) -> None:
        pass


BY_LOG: dict[str, Any] = {"event_transport": "valkey", "event_log": ValkeySettings("redis://h:1")}


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> LossyLog:
    """Of servers that soon wait for the coordinator."""
    log = LossyLog(random.Random(SEED + 1))
    for module in (fleet, reporting):
        monkeypatch.setattr(module, "open_log", lambda settings: log)
    monkeypatch.setattr("lmcache.fleet.log_reader._WAIT_SECONDS", 0.01)
    monkeypatch.setattr("lmcache.fleet.reporter._FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr("lmcache.fleet.fleet.MAX_LOGGED_EVENT_REQUESTS", 8)  # servers wait for the coordinator
    monkeypatch.setattr("lmcache.fleet.event_log.MAX_TOLD_LOG_REQUESTS", 2)
    monkeypatch.setattr("lmcache.fleet.event_log._ASK_SECONDS", 0.01)
    monkeypatch.setattr("lmcache.fleet.event_log._STALLED_SECONDS", 0.05)
    for name in ("_FIRST_RESYNC_SECONDS", "_LAST_RESYNC_SECONDS"):
        monkeypatch.setattr(f"lmcache.fleet.reporter.{name}", 0.01)
    return log


def test_whatever_a_log_loses_the_directory_says_what_servers_have(log: LossyLog) -> None:
    rng = random.Random(SEED)
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(coordinator(event_transport="valkey"))
        servers = [stack.enter_context(Joined(url_of(process), name, **BY_LOG)) for name in ("a", "b")]
        for number in range(300):
            tier = rng.choice(rng.choice(servers).tiers)
            key = (rng.randrange(4), rng.randrange(30))
            tier.add(key, 4096) if rng.random() < 0.6 else tier.remove(key)
            if number % 10 == 0:
                time.sleep(0.02)  # so that there are many batches
        log.is_lossy = False
        until(lambda: all(server.is_told(process) for server in servers))
        assert process.fleet.intake.counts.gaps and process.fleet.intake.counts.duplicates
        assert process.fleet.log_reader is not None and process.fleet.log_reader.failures


def test_a_server_that_waits_for_what_is_lost_tells_everything(log: LossyLog) -> None:
    log.is_lossy = False
    with coordinator(event_transport="valkey") as process, Joined(url_of(process), **BY_LOG) as server:
        until(lambda: server.is_told(process) and process.fleet.intake.counts.resyncs == 1)
        log.loses_all = True
        for number in range(8):  # a request each, beyond what may be unread
            server.tiers[0].add((0, number), 4096)
            until(lambda number=number: log.lost > number or log.lost >= 4)
        log.loses_all = False
        until(lambda: server.is_told(process))
        assert process.fleet.intake.counts.gaps
