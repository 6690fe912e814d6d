"""What sessions take is counted as it is, a refused call changes nothing of it, and every instance has its share."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache._native import L1Core
from lmcache.core import limits
from lmcache.core.chunking import ChunkHasher
from lmcache.errors import RemoteError
from lmcache.protocol import messages as m
from lmcache.protocol.tokens import pack_tokens
from lmcache.service.instances import Instance
from lmcache.service.session_table import SessionTable
from lmcache.telemetry.metrics import Metrics
from lmcache.tiering.prefetch import PrefetchResult
from lmcache.transport.deferred import Deferred
from manual_clock import ManualClock
from unit.service.support import CHUNK_TOKENS, Service, a_service, chunks

EXTRA = bytes(range(32))


@pytest.fixture
def service() -> Iterator[Service]:
    with a_service() as service:
        service.register()
        yield service


def state(service: Service) -> Any:
    """All that a call may change of sessions."""
    return [
        (
            name,
            instance.session_bytes,
            sorted(instance.leases),
            [
                (
                    session.request_id,
                    session.chain.hashes,
                    session.chain.token_count,
                    session.chain.plan(session.chain.token_count, b"", []).extras.between(0, 1 << 30),
                    session.prefix,
                    session.cancel_lookup is None,
                )
                for session in instance.sessions.values()
            ],
        )
        for name, instance in service.registry.instances.items()
    ]


def refusal(service: Service, call: Any) -> str:
    before = state(service)
    with pytest.raises(RemoteError) as refused:
        call()
    assert state(service) == before
    service.sessions.check()
    return refused.value.code


@pytest.mark.parametrize(
    ("first", "tokens", "extras", "code"),
    [
        (CHUNK_TOKENS, chunks(7), [(0, EXTRA)], "bad_request"),  # of a chunk that is hashed
        (CHUNK_TOKENS, chunks(7), [(1, b"short")], "bad_request"),
        (CHUNK_TOKENS, b"12345", [], "bad_request"),
        (1, b"", [], "unknown_session"),
        (0, chunks(7), [(-1, EXTRA)], "bad_request"),
        (0, chunks(7), [(number, EXTRA) for number in range(limits.MAX_EXTRAS_PER_SESSION + 1)], "too_many"),
        (limits.MAX_TOKENS_PER_SESSION, chunks(7), [], "too_large"),
    ],
)
def test_a_refused_call_changes_nothing(service: Service, first: Any, tokens: Any, extras: Any, code: str) -> None:
    """Going back in a session and then being refused once emptied it without subtracting what it had."""
    service.append("r", chunks(1, 2, 3))
    for _ in range(3):
        assert refusal(service, lambda: service.append("r", tokens, first, extras)) == code
        assert (
            refusal(service, lambda: service.lookups.lookup(m.Lookup("engine", "r", "", first, tokens, b"", extras)))
            == code
        )


def test_a_lookup_that_is_refused_keeps_the_lease_of_the_previous_one(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.store(chunks(1))
    assert service.lookup("r", chunks(1)).lease
    monkeypatch.setattr(limits, "MAX_CHUNKS_PER_CALL", 2)
    assert refusal(service, lambda: service.lookup("r", chunks(1, 2, 3))) == "too_large"
    assert refusal(service, lambda: service.append("r", chunks(1, 2, 3))) == "too_large"
    monkeypatch.setattr(limits, "MAX_SLOTS_PER_CALL", 1)
    assert refusal(service, lambda: service.lookup("r", chunks(1, 2))) == "too_large"


# ---- shares ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(limits, "SESSION_BASE_BYTES", 0)
    monkeypatch.setattr(limits, "MAX_SESSION_BYTES", 100 * 33)
    with a_service(with_l2=True) as service:
        service.register("greedy")
        service.register("modest")
        yield service


def open_requests(service: Service, instance: str, count: int) -> None:
    for number in range(count):
        service.append(chr(number), chunks(number), instance=instance)  # 33 bytes each


def test_an_instance_may_take_what_others_leave(two: Service) -> None:
    open_requests(two, "greedy", 100)
    assert two.sessions.size_bytes == limits.MAX_SESSION_BYTES
    two.append("x", chunks(1), instance="greedy")
    assert len(two.registry.instances["greedy"].sessions) == 100


def test_an_instance_within_its_share_is_never_refused(two: Service) -> None:
    open_requests(two, "greedy", 100)
    open_requests(two, "modest", 50)
    greedy, modest = (two.registry.instances[name] for name in ("greedy", "modest"))
    assert (len(greedy.sessions), len(modest.sessions)) == (50, 50)
    assert min(greedy.sessions) == chr(50)  # the least recently used ones went
    open_requests(two, "modest", 60)
    assert (len(greedy.sessions), len(modest.sessions)) == (50, 50)


def test_not_even_by_sessions_that_hold_something(two: Service) -> None:
    """All of the greedy one's requests hold a lease or wait for L2: those that are beyond its share end."""
    two.store(chunks(1), instance="greedy")
    for number in range(0, 20, 2):
        two.lookup(chr(number), chunks(1), instance="greedy")
        assert isinstance(two.ask(chr(number + 1), chunks(1, 2), instance="greedy"), Deferred)
    greedy = two.registry.instances["greedy"]
    assert not any(session.idle for session in greedy.sessions.values())
    leases = two.stat("leases")
    with pytest.raises(RemoteError) as refused:
        for number in range(100, 200):
            two.lookup(chr(number), chunks(1), instance="greedy")
    assert refused.value.code == "too_many"
    open_requests(two, "modest", 50)
    assert greedy.session_bytes <= limits.MAX_SESSION_BYTES // 2
    assert two.registry.instances["modest"].session_bytes == 50 * 33
    assert two.stat("leases") < leases + 20
    assert two.storage.cancelled
    two.sessions.check()


# ---- what is counted is what is taken --------------------------------------------------------------------------------
def taken_bytes(make: Any) -> tuple[int, SessionTable]:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        sessions = make()
        return tracemalloc.get_traced_memory()[0] - before, sessions
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("requests", "chunk_count", "extra_count"), [(2000, 0, 0), (20, 1000, 0), (20, 10, 5000), (5, 500, 16_384)]
)
def test_memory_is_what_is_counted(requests: Any, chunk_count: Any, extra_count: Any) -> None:
    core, metrics = L1Core(1 << 20, 0, 4096, "LRU"), Metrics().service

    def make() -> SessionTable:
        instance = Instance("engine")
        sessions = SessionTable(core, ChunkHasher("blake3", 16), metrics, ManualClock())
        for number in range(requests):
            tokens = pack_tokens(range(16 * chunk_count + 3))
            extras = [(chunk, chunk.to_bytes(32, "little")) for chunk in range(extra_count)]
            sessions.grow(sessions.plan(instance, m.Append("engine", f"request {number}", "", 0, tokens, b"", extras)))
        sessions.check()
        return sessions

    taken, sessions = taken_bytes(make)
    assert 0.4 * sessions.size_bytes - 100_000 < taken < sessions.size_bytes + 200_000


# ---- random sequences ------------------------------------------------------------------------------------------------
REQUESTS = st.sampled_from(["a", "b", "c"])
EXTRAS = st.lists(st.tuples(st.integers(-1, 9), st.sampled_from([EXTRA, bytes(32), b"x" * 32, b"short"])), max_size=4)
CALLS = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["append", "lookup"]),
            st.sampled_from(["engine", "other"]),
            REQUESTS,
            st.integers(-1, 26),  # first token
            st.integers(0, 14),  # tokens
            EXTRAS,
            st.sampled_from(["", "", "salt"]),
            st.sampled_from([b"", b"", b"lora", bytes(limits.MAX_IDENTITY_BYTES + 1)]),
        ),
        st.tuples(st.sampled_from(["end", "release"]), st.sampled_from(["engine", "other"]), REQUESTS),
        st.tuples(st.just("answer"), st.integers(0, 5)),
    ),
    max_size=40,
)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(calls=CALLS)
def test_random_calls(calls: Any) -> None:
    with pytest.MonkeyPatch.context() as patch, a_service(with_l2=True) as service:
        patch.setattr(limits, "SESSION_BASE_BYTES", 0)
        patch.setattr(limits, "MAX_SESSION_BYTES", 900)
        patch.setattr(limits, "MAX_SESSIONS_PER_INSTANCE", 2)
        patch.setattr(limits, "MAX_EXTRAS_PER_SESSION", 5)
        patch.setattr(limits, "MAX_TOKENS_PER_SESSION", 32)
        for name in ("engine", "other"):
            service.register(name)
        service.store(pack_tokens(range(8)))
        for call in calls:
            before = state(service)
            try:
                run(service, *call)
            except RemoteError:
                assert state(service) == before
            service.sessions.check()
            assert service.sessions.size_bytes <= limits.MAX_SESSION_BYTES


def run(service: Service, kind: str, *arguments: Any) -> None:
    if kind == "answer":
        if service.storage.asked:
            _, on_done = service.storage.asked[arguments[0] % len(service.storage.asked)]
            on_done(PrefetchResult())
            service.loop.run()
        return
    instance, request_id, *rest = arguments
    session = service.registry.instances[instance].sessions.get(request_id)
    if kind == "end":
        service.end(request_id, instance)
    elif kind == "release":
        service.lookups.release(m.Release(instance, session.prefix.number if session and session.prefix else 1 << 40))
    else:
        first, count, extras, salt, identity = rest
        tokens = pack_tokens(range(max(first, 0), max(first, 0) + count))
        if kind == "append":
            service.lookups.append(m.Append(instance, request_id, salt, first, tokens, identity, extras))
        else:
            service.lookups.lookup(m.Lookup(instance, request_id, salt, first, tokens, identity, extras))
