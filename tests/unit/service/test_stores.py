from collections.abc import Iterator
from typing import Any

import pytest

from lmcache.core import limits
from lmcache.errors import RemoteError
from lmcache.protocol import messages as m
from unit.service.support import FRAME_BYTES, NO_SLOT, RESERVATION_TTL, Service, a_service, chunks, slots


@pytest.fixture
def service() -> Iterator[Service]:
    with a_service(with_l2=True) as service:
        service.register()
        yield service


def found(service: Service, tokens: Any) -> Any:
    """Chunks that L1 answers with."""
    return service.lookup("probe", tokens, deadline_seconds=0.0).chunks


def test_what_is_reserved_is_invisible_until_its_commit(service: Service) -> None:
    tokens = chunks(1, 2)
    reply = service.reserve(tokens)
    assert len(set(slots(reply.slots))) == 2
    assert found(service, tokens) == 0
    assert service.commit(reply.reservation) == 2
    assert found(service, tokens) == 2
    assert service.sample("num_submitted_stores_total") == service.sample("num_finished_stores_total") == 1
    assert service.sample("l1_write_chunks_total") == 2


def test_a_commit_is_idempotent_and_tells_the_storage_loop_once(service: Service) -> None:
    tokens = chunks(1, 2, 3)
    reply = service.reserve(tokens)
    assert service.commit(reply.reservation, b"\1\0\1") == 2
    assert service.commit(reply.reservation) == 0
    assert found(service, tokens) == 1
    [(keys, committed)] = service.storage.commits
    assert committed.objects == 2
    assert keys.hashes.packed == service.hashes(tokens)


def test_the_speed_of_a_store_is_in_gb_per_second(service: Service) -> None:
    """Of what was committed, from the reservation on."""
    reply = service.reserve(chunks(1, 2, 3))
    service.clock.advance(0.25)
    assert service.commit(reply.reservation, b"\1\1\0") == 2
    assert service.sample("l0_l1_store_throughput_GB_per_second_count") == 1
    wanted = 2 * FRAME_BYTES / 0.25 / 1e9
    assert service.sample("l0_l1_store_throughput_GB_per_second_sum") == pytest.approx(wanted)


def test_an_abort_publishes_nothing(service: Service) -> None:
    reply = service.reserve(chunks(1, 2))
    assert service.commit(reply.reservation, b"\0\0") == 0
    assert found(service, chunks(1, 2)) == 0
    assert service.storage.commits == []
    assert service.stat("used_bytes") == 0


def test_only_the_missing_chunks_get_slots(service: Service) -> None:
    service.store(chunks(1))
    reply = service.reserve(chunks(1, 2))
    assert slots(reply.slots)[0] == NO_SLOT
    assert slots(reply.slots)[1] != NO_SLOT
    service.commit(reply.reservation)
    reply = service.reserve(chunks(1, 2))
    assert (reply.reservation, slots(reply.slots)) == (0, [NO_SLOT, NO_SLOT])


def test_a_reservation_belongs_to_its_worker() -> None:
    with a_service() as service:
        service.register(ranks=2)
        reply = service.reserve(chunks(1), worker=0)
        assert service.commit(reply.reservation, worker=1) == 0
        assert service.commit(reply.reservation, worker=0) == 1


def test_what_finds_no_room_is_reported() -> None:
    with a_service(capacity_bytes=2 * FRAME_BYTES) as service:
        service.register()
        first = service.reserve(chunks(1))
        reply = service.reserve(chunks(2, 3, 4))
        assert reply.chunks_without_room == 2
        assert [slot != NO_SLOT for slot in slots(reply.slots)] == [True, False, False]
        service.commit(first.reservation)
        service.commit(reply.reservation)
        assert service.stat("objects") == 2


@pytest.mark.parametrize("hashes", [b"", bytes(31), bytes(33)])
def test_wrong_hashes_are_refused(service: Service, hashes: Any) -> None:
    with pytest.raises(RemoteError) as refusal:
        service.stores.reserve(m.Reserve("engine", 0, "", hashes))
    assert refusal.value.code == "bad_request"


def test_limits(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CHUNKS_PER_CALL", 2)
    monkeypatch.setattr(limits, "MAX_RESERVATIONS_PER_WORKER", 1)
    with pytest.raises(RemoteError) as refusal:
        service.reserve(chunks(1, 2, 3))
    assert refusal.value.code == "too_large"
    service.reserve(chunks(1))
    with pytest.raises(RemoteError) as refusal:
        service.reserve(chunks(2))
    assert refusal.value.code == "too_many"


def test_the_memory_of_reservations_is_limited(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets of chunks that get no slot take memory of the server, too."""
    monkeypatch.setattr(limits, "MAX_RESERVATION_BYTES_PER_WORKER", 100)
    first = service.reserve(chunks(1, 2))
    with pytest.raises(RemoteError) as refusal:
        service.reserve(chunks(3))
    assert refusal.value.code == "too_many"
    assert service.commit(first.reservation) == 2
    assert service.commit(service.reserve(chunks(3)).reservation) == 1
    [worker] = service.registry.instances["engine"].workers.values()
    assert worker.reservations.size_bytes == 0


def test_flags_must_fit_the_reservation(service: Service) -> None:
    reply = service.reserve(chunks(1, 2))
    for written in (b"\1", b"\1\1\1"):
        with pytest.raises(RemoteError) as refusal:
            service.commit(reply.reservation, written)
        assert refusal.value.code == "bad_request"
    assert service.commit(reply.reservation, b"\1\1") == 2


def test_nothing_can_be_stored_before_the_scheduler_side_names_the_model() -> None:
    with a_service() as service:
        service.register_worker("engine", 0)
        with pytest.raises(RemoteError) as refusal:
            service.reserve(chunks(1))
        assert refusal.value.code == "unknown_instance"


def test_a_commit_after_the_deadline_publishes_nothing_and_frees_the_memory(service: Service) -> None:
    reply = service.reserve(chunks(1))
    service.clock.advance(RESERVATION_TTL + 1)
    service.liveness.sweep()  # its worker is silent and its process runs
    assert service.stat("quarantined_bytes") == FRAME_BYTES
    assert service.commit(reply.reservation) == 0
    assert service.stat("quarantined_bytes") == 0
    assert found(service, chunks(1)) == 0
