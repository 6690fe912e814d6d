"""Who counts as silent: not who was not heard because the coordinator could hear nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
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
    again.instances.look(1.0)
    assert again.instances.expire() == [] and again.instances.knows("a")
    clock.advance(TIMEOUT_SECONDS + 1)
    assert again.instances.expire() == ["a"]
    again.stop()


class Waits(threading.Event):
    """Does what is next of `during` in each round, and ends the last one only when this is set."""

    during: Iterator[Callable[[], object]] = iter(())
    all_done = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        for act in Waits.during:
            act()
            return False
        Waits.all_done.set()
        return super().wait()


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """It writes a checkpoint and looks for silent servers in every round. Its clock is a `ManualClock`."""
    clock = ManualClock()
    monkeypatch.setattr(fleet_module, "threading", SimpleNamespace(**{**vars(threading), "Event": Waits}))
    settings = CoordinatorSettings(
        checkpoint_path=str(tmp_path / "directory"),
        checkpoint_interval=1.0,
        health_check_interval=1.0,
        instance_timeout=TIMEOUT_SECONDS,
    )
    made = Fleet(settings, str, replace(SYSTEM, clock=clock))
    join(made.instances, "a", "b")
    yield made
    made.stop()


def run(fleet: Fleet, *during: Callable[[], object]) -> None:
    Waits.during, Waits.all_done = iter(during), threading.Event()
    fleet.start()
    assert Waits.all_done.wait(60.0)


def test_a_coordinator_that_stood_still_forgets_nobody(fleet: Fleet) -> None:
    heard_at = fleet.instances.find("a").heard_at
    run(fleet, lambda: fleet.clock.sleep(2 * TIMEOUT_SECONDS), lambda: fleet.clock.sleep(1.0))
    assert fleet.instances.knows("a") and fleet.instances.knows("b")
    assert fleet.instances.find("a").heard_at == heard_at  # as /instances shows it


def test_nor_does_it_where_it_stood_still_at_its_work(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """`b` is heard first when it goes on, `a` soon."""
    write, standstills = checkpoint.write, iter([2 * TIMEOUT_SECONDS])

    def write_slowly(*given: object) -> None:
        write(*given)  # type: ignore[arg-type]
        for seconds in standstills:
            fleet.clock.sleep(seconds)
            fleet.instances.heartbeat("b")

    monkeypatch.setattr(checkpoint, "write", write_slowly)
    run(fleet, *[lambda: fleet.clock.sleep(1.0)] * 5)
    assert fleet.instances.knows("a")


def test_a_dead_server_goes_where_that_thread_alone_is_late(fleet: Fleet) -> None:
    def others_are_heard() -> None:
        fleet.clock.sleep(4.0)
        fleet.instances.heartbeat("b")

    run(fleet, *[others_are_heard] * round(TIMEOUT_SECONDS / 4 + 2))
    assert not fleet.instances.knows("a") and fleet.instances.knows("b")
