from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from lmcache.core import limits
from lmcache.core.key_batch import SlotGrid
from lmcache.core.outcome import MissReason
from lmcache.errors import AdapterError, RemoteError
from lmcache.protocol import messages as m
from lmcache.protocol.tokens import pack_tokens
from lmcache.service import lookup as lookup_module
from lmcache.telemetry.tracing import Span
from lmcache.tiering.prefetch import PrefetchResult
from lmcache.transport.deferred import Deferred
from unit.service.support import CHUNK_TOKENS, LEASE_TTL, Service, a_service, chunks, has_answer, slots


@pytest.fixture
def service() -> Iterator[Service]:
    with a_service() as service:
        service.register()
        yield service


@pytest.fixture
def tiered() -> Iterator[Service]:
    with a_service(with_l2=True) as service:
        service.register()
        yield service


def answer_of(deferred: m.LookupReply | Deferred) -> m.LookupReply:
    assert isinstance(deferred, Deferred)
    answers: list[object] = []
    deferred.bind(answers.append)
    assert len(answers) == 1, "not answered"
    if isinstance(answers[0], Exception):
        raise answers[0]
    assert isinstance(answers[0], m.LookupReply)
    return answers[0]


def load(service: Service, which: int, *numbers: int, reason: MissReason | None = None) -> PrefetchResult:
    """What the storage loop does: makes the first chunks of a request resident, leases them, and says so."""
    request, on_done = service.storage.asked[which]
    result = PrefetchResult(reason)
    if numbers:
        wanted = request.keys[request.first_chunk :][: len(numbers)]
        service.l1.core.commit(service.l1.reserve(1_000_000, wanted, 1e9).reservation)
        acquired = service.l1.acquire(request.owner, wanted, request.lease_deadline)
        assert acquired.chunks == len(numbers)
        result = PrefetchResult(reason, acquired.lease, SlotGrid(acquired.slots, acquired.chunks))
    on_done(result)
    service.loop.run()
    return result


# ---- L1 decides ------------------------------------------------------------------------------------------------------
def test_a_hit_is_leased_and_released_once(service: Service) -> None:
    tokens = chunks(1, 2, 3)
    service.store(tokens)
    reply = service.lookup("r", tokens)
    assert (reply.chunks, reply.chunks_l1, reply.miss_reason) == (3, 3, "")
    assert reply.hashes == service.hashes(tokens)
    assert len(set(slots(reply.slots))) == 3
    assert service.stat("leased_objects") == 3
    for _ in range(2):
        service.lookups.release(m.Release("engine", reply.lease))
        assert service.stat("leases") == 0
    assert service.sample("num_submitted_retrieves_total") == service.sample("num_finished_retrieves_total") == 1


def test_a_request_is_sampled_once_however_often_it_is_looked_up() -> None:
    spans: list[Span] = []
    with a_service(put_span=spans.append, sample_rate=0.1) as service:
        service.register()
        for number in range(300):
            for _ in range(10):
                service.lookup(f"r{number}", chunks(1))
            service.end(f"r{number}")
    names = Counter(span.name for span in spans)
    assert 5 <= names["request"] <= 70  # of 300 at a rate of 0.1: 30, with a standard deviation of 5
    assert names["mp.lookup_prefetch"] == 10 * names["request"]


def test_the_longest_prefix_hits_and_the_reason_is_reported(service: Service) -> None:
    service.store(chunks(1, 2))
    reply = service.lookup("r", chunks(1, 2, 9, 3))
    assert (reply.chunks, reply.miss_reason) == (2, "not_stored")
    assert len(reply.hashes) == 4 * 32
    assert service.lookup("s", chunks(9, 2)).lease == 0
    assert service.sample("misses_total", reason="not_stored") == 2


def test_fewer_tokens_than_a_chunk_are_too_short(service: Service) -> None:
    reply = service.lookup("r", pack_tokens([1, 2, 3]))
    assert (reply.chunks, reply.lease, reply.miss_reason) == (0, 0, "too_short")


def test_tokens_are_counted_by_model_and_salt(service: Service) -> None:
    service.store(chunks(1, 2), salt="tenant")
    service.lookup("r", chunks(1, 2, 3) + pack_tokens([1]), salt="tenant")
    labels = {"model_name": "model", "cache_salt": "tenant"}
    assert service.sample("lookups_total", **labels) == 1
    assert service.sample("lookup_requested_tokens_total", **labels) == 3 * CHUNK_TOKENS
    assert service.sample("lookup_hit_tokens_total", **labels) == 2 * CHUNK_TOKENS
    assert service.sample("lookup_hit_l1_tokens_total", **labels) == 2 * CHUNK_TOKENS
    assert service.sample("lookup_hit_l2_tokens_total", **labels) == 0


def test_salts_do_not_share(service: Service) -> None:
    service.store(chunks(1), salt="a")
    assert service.lookup("r", chunks(1), salt="b").chunks == 0
    assert service.lookup("s", chunks(1), salt="a").chunks == 1
    assert service.lookup("t", chunks(1), salt="").chunks == 0


def test_identity_does_not_share(service: Service) -> None:
    service.store(chunks(1))
    assert service.lookup("r", chunks(1), identity=b"lora").chunks == 0


def test_every_rank_and_group_must_have_a_chunk() -> None:
    with a_service() as service:
        service.register(ranks=2, groups=2)
        tokens = chunks(1, 2)
        service.store(tokens, workers=1)
        assert service.lookup("r", tokens).chunks == 0
        reply = service.reserve(tokens, worker=1)
        assert len(slots(reply.slots)) == 2 * 2
        assert service.commit(reply.reservation, b"\1\1\1\0", worker=1) == 3
        found = service.lookup("r", tokens)
        assert found.chunks == 1
        assert len(set(slots(found.slots))) == 2 * 2 * 1
        assert service.stat("leased_objects") == 4


def test_an_instance_without_all_its_ranks_misses() -> None:
    with a_service() as service:
        service.liveness.register_instance(m.RegisterInstance("engine", "model", 2, 1, 10.0))
        service.register_worker("engine", 0)
        reply = service.lookup("r", chunks(1))
        assert (reply.chunks, reply.miss_reason) == (0, "instance_incomplete")
        assert service.sample("misses_total", reason="instance_incomplete") == 1
        service.register_worker("engine", 1)
        assert service.lookup("s", chunks(1)).miss_reason == "not_stored"


def test_an_unknown_instance_is_asked_to_register(service: Service) -> None:
    for call in (
        lambda: service.lookup("r", chunks(1), instance="other"),
        lambda: service.end("r", instance="other"),
        lambda: service.lookups.release(m.Release("other", 1)),
        lambda: service.reserve(chunks(1), worker=7),
        lambda: service.commit(1, worker=7),
    ):
        with pytest.raises(RemoteError) as refusal:
            call()
        assert refusal.value.code == "unknown_instance"
    assert not service.liveness.beat(m.Ping("other", -1))
    assert not service.liveness.beat(m.Ping("engine", 7))


def test_instances_of_one_model_share_and_other_layouts_do_not(service: Service) -> None:
    service.store(chunks(1))
    service.register("twin")
    assert service.lookup("r", chunks(1), instance="twin").chunks == 1
    service.register("stranger", layout="cd" * 16)
    assert service.lookup("r", chunks(1), instance="stranger").chunks == 0


def test_a_lease_belongs_to_its_instance(service: Service) -> None:
    service.store(chunks(1))
    reply = service.lookup("r", chunks(1))
    service.register("twin")
    service.lookups.release(m.Release("twin", reply.lease))
    assert service.stat("leases") == 1


# ---- sessions --------------------------------------------------------------------------------------------------------
def test_a_later_lookup_sends_only_what_is_new_and_ends_the_previous_lease(service: Service) -> None:
    service.store(chunks(1, 2, 3))
    first = service.lookup("r", chunks(1, 2))
    second = service.lookup("r", chunks(3), 2 * CHUNK_TOKENS)
    assert second.chunks == 3
    assert second.lease != first.lease
    assert service.stat("leases") == 1
    service.lookups.release(m.Release("engine", first.lease))
    assert service.stat("leases") == 1
    service.end("r")
    assert service.stat("leases") == 0


def test_append_gives_the_hashes_of_what_became_full(service: Service) -> None:
    service.lookup("r", chunks(1) + pack_tokens([2, 2, 2]))
    reply = service.lookups.append(m.Append("engine", "r", "", 7, pack_tokens([2]) + chunks(3)))
    assert reply.first_chunk == 1
    assert reply.hashes == service.hashes(chunks(1, 2, 3))[32:]
    assert service.lookups.append(m.Append("engine", "r", "", 12, b"")).hashes == b""


def test_a_session_that_is_not_there_asks_for_the_tokens(service: Service) -> None:
    with pytest.raises(RemoteError) as refusal:
        service.lookup("r", chunks(1), CHUNK_TOKENS)
    assert refusal.value.code == "unknown_session"
    service.lookup("r", chunks(1))
    service.end("r")
    with pytest.raises(RemoteError):
        service.lookups.append(m.Append("engine", "r", "", CHUNK_TOKENS, b""))
    service.end("r")


def test_tokens_from_zero_start_the_request_anew(service: Service) -> None:
    service.store(chunks(5))
    service.lookup("r", chunks(1, 2))
    reply = service.lookup("r", chunks(5))
    assert reply.chunks == 1
    assert reply.hashes == service.hashes(chunks(5))


def test_the_least_recently_used_idle_session_makes_room(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SESSIONS_PER_INSTANCE", 2)
    service.store(chunks(1))
    service.lookup("leased", chunks(1))
    service.lookup("idle", chunks(2))
    service.lookup("new", chunks(3))
    with pytest.raises(RemoteError) as refusal:
        service.lookup("idle", chunks(2), CHUNK_TOKENS)
    assert refusal.value.code == "unknown_session"
    service.lookup("leased", b"", CHUNK_TOKENS)
    service.lookup("new", b"", CHUNK_TOKENS)


def test_when_every_session_holds_a_lease_another_is_too_many(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_SESSIONS_PER_INSTANCE", 2)
    service.store(chunks(1))
    for request in ("a", "b"):
        service.lookup(request, chunks(1))
    with pytest.raises(RemoteError) as refusal:
        service.lookup("c", chunks(1))
    assert refusal.value.code == "too_many"
    assert service.stat("leases") == 2
    assert list(service.registry.instances["engine"].sessions) == ["a", "b"]


def test_the_memory_of_sessions_is_limited(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SESSION_BASE_BYTES", 0)
    monkeypatch.setattr(limits, "MAX_SESSION_BYTES", 4 * 32)
    service.append("a", chunks(1, 2, 3))
    assert service.sessions.size_bytes == 3 * 32 + 1
    service.append("b", chunks(1))
    assert list(service.registry.instances["engine"].sessions) == ["b"]
    with pytest.raises(RemoteError) as refusal:
        service.append("c", chunks(1, 2, 3, 4))
    assert refusal.value.code == "too_many"
    assert list(service.registry.instances["engine"].sessions) == ["b"]
    assert service.sessions.size_bytes == 33
    service.end("b")


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (m.Lookup("engine", "", "", 0, b""), "bad_request"),
        (m.Lookup("engine", "r" * 513, "", 0, b""), "too_large"),
        (m.Lookup("engine", "r", "s" * 513, 0, b""), "too_large"),
        (m.Lookup("engine", "r", "", 0, b"123"), "bad_request"),
        (m.Lookup("engine", "r", "", -4, b""), "unknown_session"),
        (m.Lookup("engine", "r", "", 0, b"", b"", [], float("nan")), "bad_request"),
        (m.Lookup("engine", "r", "", 0, b"", b"", [], float("inf")), "bad_request"),
    ],
)
def test_wrong_lookups_are_refused_and_leave_no_session(service: Service, message: Any, code: str) -> None:
    with pytest.raises(RemoteError) as refusal:
        service.lookups.lookup(message)
    assert refusal.value.code == code
    assert not service.registry.instances["engine"].sessions


def test_a_lookup_of_too_many_chunks_is_refused(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CHUNKS_PER_CALL", 2)
    with pytest.raises(RemoteError) as refusal:
        service.lookup("r", chunks(1, 2, 3))
    assert refusal.value.code == "too_large"
    service.end("r")


def test_unreadable_chunks_are_removed(service: Service) -> None:
    tokens = chunks(1, 2, 3)
    service.store(tokens)
    reply = service.lookup("r", tokens)
    for wrong in ([3], [-1], [0, 7]):
        with pytest.raises(RemoteError):
            service.lookups.release(m.Release("engine", reply.lease, wrong))
    service.lookups.append(m.Append("engine", "r", "", 0, chunks(7, 8, 9)))  # what is leased stays what it was
    service.lookups.release(m.Release("engine", reply.lease, [1, 1]))
    assert service.lookup("s", tokens).chunks == 1
    assert service.stat("objects") == 2
    assert service.sample("l1_read_failure_chunks_total") == 1
    assert service.sample("corrupt_frames_total", tier="l1") == 1


def test_the_end_of_a_request_puts_a_suffix_before_its_prefix() -> None:
    with a_service(capacity_bytes=4 * 8192) as service:
        service.register()
        tokens = chunks(1, 2, 3)
        service.lookup("r", tokens)
        for step in (chunks(1), chunks(1, 2), tokens):  # stored as the request goes on: the prefix is the oldest
            service.store(step)
        service.end("r")
        service.store(chunks(50, 51))
        assert service.lookup("s", tokens).chunks == 2


# ---- L2 --------------------------------------------------------------------------------------------------------------
def test_the_missing_suffix_is_loaded_and_joined(tiered: Service) -> None:
    tiered.store(chunks(1))
    deferred = tiered.ask("r", chunks(1, 2, 3))
    assert isinstance(deferred, Deferred)
    request, _ = tiered.storage.asked[0]
    assert request.first_chunk == 1 and request.keys.hashes.packed == tiered.hashes(chunks(1, 2, 3))
    assert request.lease_deadline == tiered.clock.monotonic() + LEASE_TTL
    assert not has_answer(deferred)
    result = load(tiered, 0, 2, 3)
    reply = answer_of(deferred)
    assert (reply.chunks, reply.chunks_l1, reply.miss_reason) == (3, 1, "")
    assert slots(reply.slots)[1:] == slots(result.slots.packed)
    assert tiered.stat("leases") == 2
    labels = {"model_name": "model", "cache_salt": ""}
    assert tiered.sample("lookup_hit_l2_tokens_total", **labels) == 2 * CHUNK_TOKENS
    release = m.Release("engine", reply.lease, loaded_tokens=3 * CHUNK_TOKENS, prefill_seconds=0.6)
    tiered.lookups.release(release)
    saved = {tier: tiered.sample("prefill_saved_seconds_total", tier=tier) for tier in ("l1", "l2")}
    assert saved == {"l1": pytest.approx(0.2), "l2": pytest.approx(0.4)}
    tiered.lookups.release(m.Release("engine", reply.lease))
    assert tiered.stat("leases") == 0
    assert not tiered.timers()


def test_slots_of_several_namespaces_are_joined_by_namespace() -> None:
    with a_service(with_l2=True) as service:
        service.register(ranks=2, groups=2)
        service.store(chunks(1), workers=2)
        deferred = service.ask("r", chunks(1, 2, 3))
        result = load(service, 0, 2, 3)
        reply = answer_of(deferred)
        loaded = slots(result.slots.packed)
        joined = slots(reply.slots)
        assert len(joined) == 4 * 3
        for namespace in range(4):
            assert joined[namespace * 3 + 1 : namespace * 3 + 3] == loaded[namespace * 2 : namespace * 2 + 2]
        assert len(set(joined)) == 12


def test_l2_alone_and_l2_without_anything(tiered: Service) -> None:
    deferred = tiered.ask("r", chunks(1, 2))
    load(tiered, 0, 1, reason=MissReason.NO_ROOM)
    reply = answer_of(deferred)
    assert (reply.chunks, reply.chunks_l1, reply.miss_reason) == (1, 0, "no_room")
    deferred = tiered.ask("s", chunks(5))
    load(tiered, 1, reason=MissReason.CORRUPT)
    reply = answer_of(deferred)
    assert (reply.chunks, reply.lease, reply.miss_reason) == (0, 0, "corrupt")


def test_l1_alone_decides_when_it_has_everything_or_there_is_no_time(tiered: Service) -> None:
    tiered.store(chunks(1))
    assert tiered.lookup("r", chunks(1)).chunks == 1
    reply = tiered.lookup("s", chunks(1, 2), deadline_seconds=0.0)
    assert (reply.chunks, reply.miss_reason) == (1, "l2_deadline")
    assert tiered.storage.asked == []


def test_a_storage_loop_that_says_nothing_does_not_hold_up_the_answer(tiered: Service) -> None:
    tiered.store(chunks(1))
    deferred = tiered.ask("r", chunks(1, 2), deadline_seconds=2.0)
    tiered.clock.advance(2.0)
    tiered.loop.run()
    assert not has_answer(deferred)
    tiered.clock.advance(0.3)
    tiered.loop.run()
    reply = answer_of(deferred)
    assert (reply.chunks, reply.miss_reason) == (1, "l2_deadline")
    assert tiered.storage.cancelled == [0]
    assert tiered.sample("timeouts_total") == 1
    load(tiered, 0, 2)  # late: nobody wants it
    assert tiered.stat("leases") == 1
    tiered.end("r")


@pytest.mark.parametrize("how", ["end_session", "lookup again", "instance dies", "unregister"])
def test_a_lookup_that_nobody_waits_for_is_cancelled_and_its_late_lease_released(tiered: Service, how: str) -> None:
    tiered.store(chunks(1))
    deferred = tiered.ask("r", chunks(1, 2))
    assert tiered.stat("leases") == 1
    if how == "end_session":
        tiered.end("r")
    elif how == "lookup again":
        tiered.lookup("r", b"", 2 * CHUNK_TOKENS, deadline_seconds=0.0)
        tiered.end("r")
    elif how == "unregister":
        tiered.liveness.unregister(m.Unregister("engine"))
    else:
        tiered.locks.alive.clear()
        tiered.clock.advance(31.0)
        tiered.liveness.sweep()
    with pytest.raises(RemoteError) as refusal:
        answer_of(deferred)
    assert refusal.value.code == "cancelled"
    assert tiered.storage.cancelled == [0]
    assert tiered.stat("leases") == 0
    load(tiered, 0, 2)
    assert tiered.stat("leases") == 0


def test_appending_while_a_lookup_waits_does_not_change_its_answer(tiered: Service) -> None:
    deferred = tiered.ask("r", chunks(1, 2))
    tiered.lookups.append(m.Append("engine", "r", "", 2 * CHUNK_TOKENS, chunks(3)))
    load(tiered, 0, 1, 2)
    reply = answer_of(deferred)
    assert (reply.chunks, reply.miss_reason) == (2, "")
    assert reply.hashes == tiered.hashes(chunks(1, 2))


def test_a_fault_of_the_storage_loop_leaves_no_lease(tiered: Service) -> None:
    tiered.store(chunks(1))
    tiered.storage.fault = AdapterError("gone")
    with pytest.raises(AdapterError):
        tiered.ask("r", chunks(1, 2))
    assert tiered.stat("leases") == 0
    tiered.storage.fault = None
    tiered.end("r")


def test_the_deadline_of_a_lookup_is_bounded(tiered: Service) -> None:
    tiered.ask("r", chunks(1), deadline_seconds=1e9)
    assert tiered.storage.asked[0][0].deadline_seconds == lookup_module.MAX_LOOKUP_DEADLINE_SECONDS
    tiered.end("r")


# ---- the lookup log --------------------------------------------------------------------------------------------------
class Events:
    active = True

    def __init__(self) -> None:
        self.published: list[Any] = []

    def publish(self, event: Any) -> None:
        self.published.append(event)


def test_a_lookup_is_published_with_the_layout_of_every_rank() -> None:
    events = Events()
    with a_service(events=events) as service:
        service.register(ranks=2)
        tensors = [("bfloat16", [2, 2, 16])]
        service.liveness.unregister(m.Unregister("engine", 1))
        service.liveness.register_worker(m.RegisterWorker("engine", 1, 1, ["ab" * 16], [4096], tensors=tensors))
        service.lookup("r", chunks(1, 2), salt="tenant")
        (event,) = events.published
        assert event.tensors == (("bfloat16", [2, 2, 16]),)
        assert (event.cache_salt, event.hit_chunks, len(event.chunk_hashes)) == ("tenant", 0, 64)


def test_a_hit_that_would_be_slower_than_computing_is_left_out_and_counted() -> None:
    with a_service(with_l2=True) as service:
        service.register()
        service.store(chunks(1))
        message = m.Lookup("engine", "r", "", 0, chunks(1, 2), recompute=True)
        reply = service.lookups.lookup(message)
        assert isinstance(reply, m.LookupReply)
        assert (reply.chunks, reply.miss_reason) == (1, "recompute_faster")
        assert service.storage.asked == []
        service.lookups.release(m.Release("engine", reply.lease, recomputed=True))
        assert service.sample("misses_total", reason="recompute_faster") == 2


def test_the_salts_at_hand_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_NAMESPACES_KEPT_PER_INSTANCE", 7)
    with a_service() as service:
        service.register(ranks=2)
        for user in range(20):
            assert service.lookup(f"r{user}", chunks(1, 2), salt=f"user {user}").chunks == 0
        instance = service.registry.instances["engine"]
        assert list(instance.tenants) == ["user 17", "user 18", "user 19"]
        assert service.l1.core.stats()["namespaces"] == 0
