from collections.abc import Iterator
from typing import Any

import pytest

from lmcache.core import limits
from lmcache.errors import RemoteError
from lmcache.protocol import messages as m
from unit.service.support import FRAME_BYTES, LAYOUT, LEASE_TTL, RESERVATION_TTL, Service, a_service, chunks

SILENT = 21.0  # beyond two heartbeats of 10 s


@pytest.fixture
def service() -> Iterator[Service]:
    with a_service() as service:
        service.register()
        yield service


def test_heartbeats_keep_leases_and_reservations_beyond_their_ttl(service: Service) -> None:
    service.store(chunks(1))
    service.lookup("r", chunks(1))
    reply = service.reserve(chunks(2))
    for _ in range(200):
        service.clock.advance(10.0)
        assert service.beat()
        assert service.beat(0)
        service.liveness.sweep()
    assert service.stat("leases") == 1
    assert service.commit(reply.reservation) == 1
    service.end("r")
    assert service.stat("leases") == 0


def test_which_layouts_belong_together_is_noted_when_all_ranks_are_there() -> None:
    with a_service() as service:
        service.register("of one layout", ranks=2)
        service.liveness.register_instance(m.RegisterInstance("engine", "model", 2, 1, 10.0))
        service.register_worker("engine", 1, layout="1" * 32)
        assert not service.noted_ranks
        service.register_worker("engine", 0, layout="0" * 32)
        names = [[(name.rank, name.layout) for name in rank] for rank in service.noted_ranks.pop()]
        assert names == [[(0, "0" * 32)], [(1, "1" * 32)]] and not service.noted_ranks


def test_the_ttl_counts_from_the_last_heartbeat(service: Service) -> None:
    service.store(chunks(1))
    service.lookup("r", chunks(1))
    service.clock.advance(LEASE_TTL - 1)
    service.beat()
    service.clock.advance(LEASE_TTL - 1)
    service.liveness.sweep()
    assert service.stat("leases") == 1
    service.clock.advance(2)
    service.liveness.sweep()
    assert service.stat("leases") == 0
    service.end("r")


def test_the_dead_lose_everything_at_once(service: Service) -> None:
    service.store(chunks(1))
    service.lookup("r", chunks(1))
    service.reserve(chunks(2))
    service.locks.alive.clear()
    service.clock.advance(19.0)
    service.liveness.sweep()
    assert (service.stat("leases"), service.stat("reservations")) == (1, 1)
    service.clock.advance(2.0)
    service.liveness.sweep()
    assert (service.stat("leases"), service.stat("reservations"), service.stat("quarantined_bytes")) == (0, 0, 0)
    assert service.registry.instances == {}
    assert not service.liveness.needed
    service.register("other")
    assert service.lookup("r", chunks(1), instance="other").chunks == 1
    assert service.lookup("s", chunks(2), instance="other").chunks == 0


def test_stores_that_end_with_their_worker_are_counted(service: Service) -> None:
    """What was begun less what has ended is what is under way, whatever has died."""

    def under_way() -> float:
        return service.sample("num_submitted_stores_total") - service.sample("num_finished_stores_total")

    service.reserve(chunks(1))
    service.reserve(chunks(2))
    assert under_way() == 2
    service.locks.alive.clear()
    service.register_worker("engine", 0)  # it began again
    assert under_way() == 0
    service.reserve(chunks(3))
    service.locks.alive.clear()
    service.clock.advance(SILENT)
    service.liveness.sweep()
    assert service.registry.instances == {} and under_way() == 0


def test_the_death_of_a_process_that_held_its_lock_is_noticed_before_its_silence(service: Service) -> None:
    service.store(chunks(1))
    service.lookup("r", chunks(1))
    service.reserve(chunks(2))
    service.liveness.sweep()
    service.locks.alive.clear()
    service.clock.advance(1.0)
    service.liveness.sweep()
    assert (service.stat("leases"), service.stat("reservations"), service.stat("quarantined_bytes")) == (0, 0, 0)
    assert service.registry.instances == {}


def test_the_silent_that_live_keep_what_they_hold_until_it_expires(service: Service) -> None:
    service.store(chunks(1))
    service.lookup("r", chunks(1))
    service.reserve(chunks(2))
    service.clock.advance(SILENT)
    service.liveness.sweep()
    assert (service.stat("leases"), service.stat("reservations")) == (1, 1)
    service.clock.advance(RESERVATION_TTL)
    service.liveness.sweep()
    assert (service.stat("leases"), service.stat("quarantined_bytes")) == (0, FRAME_BYTES)
    assert service.liveness.needed
    service.locks.alive.clear()
    service.liveness.sweep()
    assert service.stat("quarantined_bytes") == 0
    assert service.registry.instances == {}


def test_the_silent_that_come_back_go_on(service: Service) -> None:
    service.clock.advance(SILENT)
    service.liveness.sweep()
    assert service.beat()
    assert service.beat(0)
    service.store(chunks(1))
    assert service.lookup("r", chunks(1)).chunks == 1


def test_operators_see_how_long_the_quietest_process_of_an_engine_is_silent(service: Service) -> None:
    def seen() -> tuple[Any, ...]:
        figures = service.registry.instances["engine"].figures(service.clock.monotonic())
        return tuple(figures[name] for name in ("heartbeat_age_seconds", "heartbeat_interval_seconds", "silent"))

    assert seen() == (0, 10, False)
    service.clock.advance(15)
    service.beat()
    assert seen() == (15, 10, False)  # the worker
    service.clock.advance(SILENT - 15)
    service.beat()
    assert seen() == (SILENT, 10, True)
    service.beat(0)
    assert seen() == (0, 10, False)


def test_a_dead_worker_makes_its_instance_incomplete(service: Service) -> None:
    service.locks.alive.discard(service.registry.instances["engine"].workers[0].owner)
    service.clock.advance(SILENT)
    service.beat()
    service.liveness.sweep()
    assert service.lookup("r", chunks(1)).miss_reason == "instance_incomplete"
    assert not service.beat(0)


def test_a_dead_scheduler_side_leaves_the_workers(service: Service) -> None:
    reply = service.reserve(chunks(1))
    service.locks.alive.discard(service.registry.instances["engine"].scheduler.owner)
    service.clock.advance(SILENT)
    service.beat(0)
    service.liveness.sweep()
    assert not service.beat()
    assert service.commit(reply.reservation) == 1
    service.liveness.register_instance(m.RegisterInstance("engine", "model", 1, 1, 10.0))
    assert service.lookup("r", chunks(1)).chunks == 1


# ---- registration ----------------------------------------------------------------------------------------------------
def test_registering_a_worker_again_ends_its_previous_process(service: Service) -> None:
    reply = service.reserve(chunks(1))
    service.locks.alive.discard(service.registry.instances["engine"].workers[0].owner)
    service.register_worker("engine", 0)
    assert service.stat("reservations") == 0
    assert service.commit(reply.reservation) == 0
    assert service.lookup("r", chunks(1)).chunks == 0


def test_what_a_previous_process_may_still_be_writing_stays_taken(service: Service) -> None:
    previous = service.registry.instances["engine"].workers[0].owner
    reply = service.reserve(chunks(1))
    service.register_worker("engine", 0)
    assert service.commit(reply.reservation) == 0
    assert service.stat("used_bytes") == FRAME_BYTES
    assert service.liveness.needed
    service.liveness.sweep()
    assert service.stat("used_bytes") == FRAME_BYTES
    service.locks.alive.discard(previous)
    service.liveness.sweep()
    assert service.stat("used_bytes") == 0
    assert service.lookup("r", chunks(1)).chunks == 0


def test_registering_the_same_instance_again_is_idempotent(service: Service) -> None:
    service.store(chunks(1))
    service.lookup("r", chunks(1))
    owner = service.registry.instances["engine"].scheduler.owner
    again = service.liveness.register_instance(m.RegisterInstance("engine", "model", 1, 1, 10.0))
    assert again.owner == owner
    assert service.stat("leases") == 1


def test_a_restarted_scheduler_side_starts_with_nothing(service: Service) -> None:
    service.store(chunks(1))
    service.lookup("r", chunks(1))
    previous = service.registry.instances["engine"].scheduler.owner
    service.locks.alive.discard(previous)
    again = service.liveness.register_instance(m.RegisterInstance("engine", "model", 1, 1, 10.0))
    assert again.owner != previous
    assert service.stat("leases") == 0
    assert service.lookup("s", chunks(1)).chunks == 1


@pytest.mark.parametrize("locked", [True, False])
@pytest.mark.parametrize("side", ["scheduler", "worker"])
def test_two_engines_that_live_cannot_have_one_name(locked: Any, side: Any) -> None:
    """`locked`: whether they hold owner bytes; those over the socket do not."""

    def register(service: Service, process: bytes) -> int:
        if side == "scheduler":
            message = m.RegisterInstance("engine", "model", 1, 1, 10.0, process=process)
            return service.liveness.register_instance(message).owner
        return service.liveness.register_worker(
            m.RegisterWorker("engine", 0, 0, [LAYOUT], [4096], process=process)
        ).owner

    with a_service() as service:
        first = register(service, b"one")
        if locked:
            service.locks.alive.add(first)
        for _ in range(3):
            service.liveness.sweep()
            service.clock.advance(9.0)
            service.beat(0 if side == "worker" else -1)
            with pytest.raises(RemoteError, match="another engine that lives") as refusal:
                register(service, b"two")
            assert refusal.value.code == "layout_conflict"
        instance = service.registry.instances["engine"]
        registration = instance.scheduler if side == "scheduler" else instance.workers[0]
        assert registration.owner == first
        if locked:
            service.locks.alive.clear()  # dies: the engine may start again at once
        else:
            service.clock.advance(SILENT)
        assert register(service, b"two") != first


def test_other_properties_conflict_while_the_process_runs(service: Service) -> None:
    changed = m.RegisterInstance("engine", "another model", 1, 1, 10.0)
    with pytest.raises(RemoteError) as refusal:
        service.liveness.register_instance(changed)
    assert refusal.value.code == "layout_conflict"
    service.locks.alive.discard(service.registry.instances["engine"].scheduler.owner)
    service.store(chunks(1))
    service.liveness.register_instance(changed)
    assert service.lookup("r", chunks(1)).chunks == 0  # stored for another model


def test_an_engine_may_ask_for_what_a_lossy_serde_leaves(service: Service) -> None:
    service.liveness.register_instance(m.RegisterInstance("other", "model", 1, 1, 10.0))
    layout = f"{LAYOUT}~rounded"
    service.liveness.register_worker(m.RegisterWorker("other", 0, 0, [layout], [4096]))
    assert service.registry.instances["other"].workers[0].profile.layouts == [layout]


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (m.RegisterWorker("engine", 1, 1, [LAYOUT], [1]), "layout_conflict"),
        (m.RegisterWorker("engine", 1, 0, [LAYOUT, LAYOUT], [4096, 4096]), "layout_conflict"),
        (m.RegisterWorker("engine", 1, 0, ["cd" * 16], [4096]), "layout_conflict"),
        (m.RegisterWorker("engine", 1, 0, [LAYOUT], [8192]), "layout_conflict"),
        (m.RegisterWorker("engine", -1, 0, [LAYOUT], [4096]), "bad_request"),
        (m.RegisterWorker("engine", 1, -1, [LAYOUT], [4096]), "bad_request"),
        (m.RegisterWorker("engine", 1, 0, [], []), "bad_request"),
        (m.RegisterWorker("engine", 1, 0, [LAYOUT], []), "bad_request"),
        (m.RegisterWorker("engine", 1, 0, [LAYOUT], [0]), "bad_request"),
        (m.RegisterWorker("engine", 1, 0, [LAYOUT], [limits.MAX_OBJECT_BYTES + 1]), "bad_request"),
        (m.RegisterWorker("engine", 1, 0, ["../../etc"], [4096]), "bad_request"),
        (m.RegisterWorker("engine", 1, 0, [LAYOUT.upper()], [4096]), "bad_request"),
        (m.RegisterWorker("engine", 1, 0, [f"{LAYOUT}~"], [4096]), "bad_request"),
        (m.RegisterWorker("engine", 1, 0, [f"{LAYOUT}~fp8+fp8"], [4096]), "bad_request"),
        (m.RegisterWorker("engine", 1, 0, [f"{LAYOUT}+exponent"], [4096]), "bad_request"),
        (m.RegisterWorker("engine", 1, 0, [f"{LAYOUT}~{'f' * 33}"], [4096]), "bad_request"),
        (m.RegisterWorker("engine", 1, 0, [f"{LAYOUT}~fp8"], [4096]), "layout_conflict"),
        (m.RegisterWorker("engine", 1, 0, [LAYOUT], [4096], True, float("nan")), "bad_request"),
        (m.RegisterWorker("", 1, 0, [LAYOUT], [4096]), "bad_request"),
        (m.RegisterInstance("", "model", 1, 1, 10.0), "bad_request"),
        (m.RegisterInstance("i" * 513, "model", 1, 1, 10.0), "too_large"),
        (m.RegisterInstance("i", "m" * 513, 1, 1, 10.0), "too_large"),
        (m.RegisterInstance("i", "model", 0, 1, 10.0), "bad_request"),
        (m.RegisterInstance("i", "model", 1025, 1, 10.0), "bad_request"),
        (m.RegisterInstance("i", "model", 1, 65, 10.0), "bad_request"),
        (m.RegisterInstance("i", "model", 1024, 64, 10.0), "too_many"),
        (m.RegisterInstance("i", "model", 1, 1, 0.0), "bad_request"),
        (m.RegisterInstance("i", "model", 1, 1, float("inf")), "bad_request"),
        (m.RegisterInstance("i", "model", 1, 1, 10.0, "e" * 513), "too_large"),
    ],
)
def test_wrong_registrations_are_refused_and_change_nothing(service: Service, message: Any, code: str) -> None:
    register = (
        service.liveness.register_worker
        if isinstance(message, m.RegisterWorker)
        else service.liveness.register_instance
    )
    with pytest.raises(RemoteError) as refusal:
        register(message)
    assert refusal.value.code == code
    assert list(service.registry.instances) == ["engine"]
    assert list(service.registry.instances["engine"].workers) == [0]


def test_copies_of_the_same_rank_count_once(service: Service) -> None:
    message = m.RegisterWorker("engine", 1, 0, [LAYOUT], [4096], False)
    service.locks.alive.add(service.liveness.register_worker(message).owner)
    service.store(chunks(1))
    assert service.lookup("r", chunks(1)).chunks == 1


def test_workers_may_register_first_and_are_checked_when_the_model_is_named() -> None:
    with a_service() as service:
        service.register_worker("engine", 0)
        service.register_worker("engine", 1)
        with pytest.raises(RemoteError) as refusal:
            service.liveness.register_instance(m.RegisterInstance("engine", "model", 1, 1, 10.0))
        assert refusal.value.code == "layout_conflict"
        service.liveness.register_instance(m.RegisterInstance("engine", "model", 2, 1, 10.0))
        assert service.lookup("r", chunks(1)).miss_reason == "not_stored"


def test_instances_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_INSTANCES", 2)
    with a_service() as service:
        service.register("a")
        service.register("b")
        for register in (lambda: service.register("c"), lambda: service.register_worker("c", 0)):
            with pytest.raises(RemoteError) as refusal:
                register()  # type: ignore[no-untyped-call]
            assert refusal.value.code == "too_many"
        assert service.beat(instance="a")


def test_unregistering_is_idempotent_and_ends_everything(service: Service) -> None:
    service.store(chunks(1))
    service.lookup("r", chunks(1))
    service.reserve(chunks(2))
    for _ in range(2):
        service.liveness.unregister(m.Unregister("engine"))
        service.liveness.unregister(m.Unregister("engine", 0))
        service.liveness.unregister(m.Unregister("engine", 5))
        assert (service.stat("leases"), service.stat("reservations")) == (0, 0)
        assert service.registry.instances == {}


@pytest.mark.parametrize("worker", [-1, 0])
def test_an_engine_that_lost_its_name_in_silence_neither_beats_nor_leaves_for_its_successor(worker: Any) -> None:
    """Over the socket nothing but silence tells that an engine is gone, and one that was cut off may come back."""
    with a_service() as service:
        for process in (b"first", b"second"):
            service.liveness.register_instance(m.RegisterInstance("engine", "model", 1, 1, 10.0, process=process))
            service.liveness.register_worker(m.RegisterWorker("engine", 0, 0, [LAYOUT], [4096], process=process))
            service.clock.advance(SILENT)
        first, second = m.Ping("engine", worker, b"first"), m.Ping("engine", worker, b"second")
        assert not service.liveness.beat(first)
        service.liveness.unregister(m.Unregister("engine", worker, b"first"))
        assert service.liveness.beat(second)
        service.liveness.unregister(m.Unregister("engine", worker, b"second"))
        assert not service.liveness.beat(second)
