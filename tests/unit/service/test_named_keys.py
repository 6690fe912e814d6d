"""Lookups and probes of objects that an engine names itself."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache.errors import RemoteError
from lmcache.protocol import messages as m
from lmcache.tiering.prefetch import PrefetchResult
from lmcache.transport.deferred import Deferred
from unit.service.support import FRAME_BYTES, Service, a_service, chunks, has_answer, slots

HASHES = b"".join(bytes([number]) * 32 for number in range(1, 6))


def store(service: Service, hashes: bytes, *, worker: int = 0, salt: str = "") -> None:
    reply = service.stores.reserve(m.Reserve("engine", worker, salt, hashes))
    service.commit(reply.reservation, worker=worker)


def lookup(service: Service, hashes: bytes = HASHES, request: str = "r", **options: Any) -> Any:
    message = m.LookupKeys("engine", options.get("worker", 0), request, options.get("salt", ""), hashes, 5.0)
    return service.lookups.lookup_keys(message)


def probe(service: Service, hashes: bytes = HASHES, *, worker: int = 0, tokens: int = 0, seconds: float = 5.0) -> Any:
    return service.probes.probe_keys(m.ProbeKeys("engine", worker, "", hashes, seconds, tokens))


def test_the_prefix_that_is_there_is_leased_until_the_end_of_the_request() -> None:
    with a_service() as service:
        service.register()
        store(service, HASHES[:64])
        store(service, HASHES[96:])
        reply = lookup(service)
        assert (reply.chunks, len(slots(reply.slots))) == (2, 2)
        assert service.stat("leased_objects") == 2
        service.end("r")
        assert service.stat("leased_objects") == 0
        again = lookup(service, HASHES[96:])
        assert again.chunks == 2
        assert lookup(service, HASHES[:32]).chunks == 1  # the same request: its lease takes the place of the last
        assert service.stat("leased_objects") == 1


def test_a_rank_gets_its_own_objects_alone() -> None:
    with a_service() as service:
        service.register(ranks=2)
        store(service, HASHES, worker=1)
        assert lookup(service, worker=0).chunks == 0
        assert lookup(service, worker=1).chunks == 5
        assert list(probe(service, worker=0).tiers) == [0] * 5
        assert list(probe(service, worker=1).tiers) == [1] * 5
        assert lookup(service, worker=1, salt="other", request="s").chunks == 0


def test_it_needs_no_other_rank_to_be_registered() -> None:
    with a_service() as service:
        message = m.RegisterInstance("engine", "model", 8, 1, 10.0)
        service.locks.alive.add(service.liveness.register_instance(message).owner)
        service.register_worker("engine", 5)
        store(service, HASHES, worker=5)
        assert lookup(service, worker=5).chunks == 5


def test_unreadable_objects_are_removed_from_that_rank_alone() -> None:
    with a_service() as service:
        service.register(ranks=2)
        store(service, HASHES, worker=0)
        store(service, HASHES, worker=1)
        reply = lookup(service, worker=1)
        service.lookups.release(m.Release("engine", reply.lease, [2]))
        service.end("r")
        assert list(probe(service, worker=1).tiers) == [1, 1, 0, 1, 1]
        assert list(probe(service, worker=0).tiers) == [1] * 5


def test_a_lookup_waits_for_l2() -> None:
    with a_service(with_l2=True) as service:
        service.register()
        store(service, HASHES[:64])
        deferred = lookup(service)
        assert isinstance(deferred, Deferred) and not has_answer(deferred)
        (request, on_done) = service.storage.asked[0]
        assert (request.first_chunk, request.keys.chunks, request.deadline_seconds) == (2, 5, 5.0)
        on_done(PrefetchResult())
        service.loop.run()
        answers: list[Any] = []
        deferred.bind(answers.append)
        assert answers[0].chunks == 2
        service.end("r")


@pytest.mark.parametrize("found", [True, False])
def test_a_probe_asks_l2_for_what_l1_lacks_until_its_deadline(found: bool) -> None:
    with a_service(with_l2=True) as service:
        service.register()
        store(service, HASHES)
        assert list(probe(service).tiers) == [1] * 5  # nobody is asked
        assert not service.storage.searched
        deferred = probe(service, HASHES + bytes(32), tokens=64)
        (search,) = service.storage.searched
        answers: list[Any] = []
        deferred.bind(answers.append)
        assert not answers
        if found:
            search.tiers[5] = 2
            search.on_done()
        else:
            service.clock.advance(6.0)
        service.loop.run()
        (reply,) = answers
        assert list(reply.tiers) == [1, 1, 1, 1, 1, 2 if found else 0]
        if not found:
            search.on_done()  # late
            service.loop.run()
        labels = {"model_name": "model", "cache_salt": ""}
        assert service.sample("lookup_requested_tokens_total", **labels) == 6 * 64
        assert service.sample("lookup_hit_l1_tokens_total", **labels) == 5 * 64
        assert service.sample("lookup_hit_l2_tokens_total", **labels) == (64 if found else 0)
        assert service.sample("tier_hit_bytes_total", tier="l1") == 5 * FRAME_BYTES
        assert not service.timers()


def test_lookups_by_keys_are_not_counted_beside_their_probes() -> None:
    with a_service() as service:
        service.register()
        store(service, HASHES)
        lookup(service)
        probe(service)
        assert service.sample("lookups_total", model_name="model", cache_salt="") == 0
        probe(service, tokens=64)
        assert service.sample("lookups_total", model_name="model", cache_salt="") == 1


def test_a_request_may_be_one_of_tokens_next() -> None:
    with a_service() as service:
        service.register()
        store(service, HASHES)
        lookup(service)
        with pytest.raises(RemoteError) as refusal:
            service.lookup("r", chunks(1), first=4)
        assert refusal.value.code == m.ErrorCode.UNKNOWN_SESSION
        assert service.lookup("r", chunks(1, 2)).chunks == 0
        assert service.stat("leased_objects") == 0
        lookup(service)
        assert service.stat("leased_objects") == 5


@pytest.mark.parametrize(
    ("hashes", "code"),
    [
        (b"", m.ErrorCode.BAD_REQUEST),
        (bytes(33), m.ErrorCode.BAD_REQUEST),
        (bytes(32 * 16_385), m.ErrorCode.TOO_LARGE),
    ],
)
def test_what_are_no_hashes_is_refused(hashes: bytes, code: m.ErrorCode) -> None:
    with a_service() as service:
        service.register()
        for call in (lookup, probe):
            with pytest.raises(RemoteError) as refusal:
                call(service, hashes)
            assert refusal.value.code == code


def test_what_else_is_refused() -> None:
    with a_service() as service:
        service.register()
        with pytest.raises(RemoteError):
            lookup(service, worker=3)
        with pytest.raises(RemoteError):
            lookup(service, request="")
        with pytest.raises(RemoteError):
            probe(service, worker=3)
        with pytest.raises(RemoteError):
            probe(service, seconds=float("nan"))
        with pytest.raises(RemoteError):
            probe(service, tokens=-1)
        assert service.stat("leases") == 0
