"""Who counts as silent: not who was not heard because the coordinator could hear nobody."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmcache.environment import SYSTEM
from lmcache.fleet import checkpoint
from lmcache.fleet import fleet as fleet_module
from lmcache.fleet import messages as m
from lmcache.fleet.fleet import Fleet
from lmcache.fleet.instances import Instance, Instances
from lmcache.fleet.settings import CoordinatorSettings
from manual_clock import ManualClock
from polling import until

TIMEOUT_SECONDS = 30.0


def join(instances: Instances, *names: str) -> None:
    for name in names:
        instances.register(m.RegisterRequest("127.0.0.1", 1, name))


def test_who_is_heard_while_others_are_forgotten_stays() -> None:
    clock = ManualClock()

    class Listener:
        def joined(self, instance: Instance) -> None:
            pass

        def left(self, instance_id: str) -> None:
            assert instance_id == "a" and instances.heartbeat("b")

    instances = Instances(replace(SYSTEM, clock=clock), TIMEOUT_SECONDS, Listener())
    join(instances, "a", "b")
    clock.advance(TIMEOUT_SECONDS + 1)
    assert instances.expire() == ["a"]
    assert instances.knows("b")


def test_a_checkpoint_that_takes_long_to_read_makes_nobody_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    environment = replace(SYSTEM, clock=clock)
    settings = CoordinatorSettings(checkpoint_path=str(tmp_path / "directory"), instance_timeout=TIMEOUT_SECONDS)
    before = Fleet(settings, str, environment)
    join(before.instances, "a")
    before.stop()
    restore = checkpoint.restore

    def restore_slowly(*given: object) -> None:
        restore(*given)  # type: ignore[arg-type]
        clock.advance(2 * TIMEOUT_SECONDS)

    monkeypatch.setattr(checkpoint, "restore", restore_slowly)
    again = Fleet(settings, str, environment)
    assert again.instances.expire() == [] and again.instances.knows("a")
    clock.advance(TIMEOUT_SECONDS + 1)
    assert again.instances.expire() == ["a"]
    again.stop()


def test_a_coordinator_that_stood_still_forgets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    waits: list[float] = []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            clock.advance(timeout if waits else 2 * TIMEOUT_SECONDS)
            waits.append(timeout)
            return super().wait(timeout if len(waits) > 2 else 0.0)

    monkeypatch.setattr(fleet_module, "threading", SimpleNamespace(**{**vars(threading), "Event": Stop}))
    fleet = Fleet(CoordinatorSettings(instance_timeout=TIMEOUT_SECONDS), str, replace(SYSTEM, clock=clock))
    join(fleet.instances, "a")
    fleet.start()
    until(lambda: len(waits) > 2)
    assert fleet.instances.knows("a")
    fleet.stop()
