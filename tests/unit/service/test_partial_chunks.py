"""Lookups and appends that name what is behind the last full chunk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lmcache.core import limits
from lmcache.core.key_batch import SlotGrid
from lmcache.errors import RemoteError
from lmcache.protocol import messages as m
from lmcache.protocol.tokens import pack_tokens
from lmcache.telemetry.events import LookupEvent
from lmcache.tiering.prefetch import PrefetchResult
from unit.service.support import CHUNK_TOKENS, FRAME_BYTES, Service, a_service, chunks, slots

TENANT = {"model_name": "model", "cache_salt": ""}
FULL = chunks(1, 2)
TOKENS = FULL + pack_tokens([7, 8, 9])  # two full chunks and three more


@pytest.fixture
def service() -> Iterator[Service]:
    with a_service() as service:
        service.register()
        yield service


def lookup(service: Service, tokens: bytes = TOKENS, partial: int = 2, request: str = "r", **fields: Any) -> Any:
    return service.lookups.lookup(m.Lookup("engine", request, "", 0, tokens, partial_tokens=partial, **fields))


def names(service: Service, tokens: bytes = TOKENS, partial: int = 2, **fields: Any) -> bytes:
    return service.lookups.append(m.Append("engine", "names", "", 0, tokens, partial_tokens=partial, **fields)).hashes


def store(service: Service, hashes: bytes) -> None:
    service.commit(service.stores.reserve(m.Reserve("engine", 0, "", hashes)).reservation)


def test_it_is_the_last_chunk_of_a_hit(service: Service) -> None:
    hashes = names(service)
    assert hashes[:64] == service.hashes(FULL)
    assert hashes[64:] == service.hasher.partial(hashes[32:64], TOKENS[-12:-4])
    store(service, hashes)
    reply = lookup(service)
    assert (reply.chunks, reply.chunks_l1, reply.partial_tokens, reply.miss_reason) == (3, 3, 2, "")
    assert reply.hashes == hashes
    assert len(set(slots(reply.slots))) == service.stat("leased_objects") == 3
    service.lookups.release(m.Release("engine", reply.lease, unreadable_chunks=[2]))
    assert lookup(service).chunks == 2, "one that did not verify is removed"


@pytest.mark.parametrize(
    ("tokens", "partial"),
    [(TOKENS, 0), (TOKENS, 1), (TOKENS, 3), (FULL + pack_tokens([7, 9, 9]), 2), (FULL + pack_tokens([7, 8, 9, 1]), 0)],
)
def test_other_lengths_and_other_tokens_do_not_hit_it(service: Service, tokens: bytes, partial: int) -> None:
    store(service, names(service))
    assert lookup(service, tokens, partial).chunks == 2


def test_what_is_behind_it_does_not_matter(service: Service) -> None:
    store(service, names(service))
    assert lookup(service, FULL + pack_tokens([7, 8, 1])).chunks == 3
    assert lookup(service, FULL + pack_tokens([7, 8]), request="shorter").chunks == 3


def test_a_prompt_without_a_full_chunk(service: Service) -> None:
    tokens = pack_tokens([5, 6, 7])
    assert lookup(service, tokens).miss_reason == "not_stored"
    store(service, names(service, tokens))
    reply = lookup(service, tokens, request="s")
    assert (reply.chunks, reply.partial_tokens, len(reply.hashes)) == (1, 2, 32)
    assert lookup(service, tokens, 0, request="t").miss_reason == "too_short"


def test_identity_and_content_are_in_its_name(service: Service) -> None:
    image = b"i" * 32
    plain, adapter, picture = (
        names(service),
        names(service, identity=b"lora"),
        names(service, extras=[(2, image)]),
    )
    assert len({plain[64:], adapter[64:], picture[64:]}) == 3
    assert picture[64:] == service.hasher.partial(plain[32:64], TOKENS[-12:-4], image)


def test_the_session_goes_on_behind_its_full_chunks(service: Service) -> None:
    store(service, lookup(service).hashes)
    more = service.lookups.append(m.Append("engine", "r", "", 11, pack_tokens([1, 2])))
    assert (more.first_chunk, more.partial_tokens) == (2, 0)
    assert more.hashes == service.hashes(TOKENS + pack_tokens([1]))[64:]
    again = service.lookups.lookup(m.Lookup("engine", "r", "", 13, b"", partial_tokens=1))
    assert (again.chunks, len(again.hashes)) == (2, 4 * 32)


@pytest.mark.parametrize("partial", [-1, 4, 2**40])
def test_more_than_there_is_is_refused_and_changes_nothing(service: Service, partial: int) -> None:
    for call in (lookup, names):
        with pytest.raises(RemoteError, match="3 follow the last full chunk") as refusal:
            call(service, partial=partial)
        assert refusal.value.code == "bad_request"
    assert service.sessions.size_bytes == 0


def test_a_call_that_is_full_without_it_is_answered_without_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_CHUNKS_PER_CALL", 2)
    hashes = names(service)
    assert hashes == service.hashes(FULL)
    store(service, hashes)
    reply = lookup(service)
    assert (reply.chunks, reply.hashes, reply.partial_tokens) == (2, hashes, 0)


def test_its_tokens_are_counted(service: Service) -> None:
    hashes = names(service)
    store(service, hashes[:64])
    for _ in range(2):
        lookup(service)
    assert service.sample("lookup_requested_tokens_total", **TENANT) == 2 * CHUNK_TOKENS + 2
    assert service.sample("lookup_hit_tokens_total", **TENANT) == 2 * CHUNK_TOKENS
    assert service.sample("misses_total", reason="not_stored") == 1
    store(service, hashes[64:])
    lookup(service)
    assert service.sample("lookup_hit_tokens_total", **TENANT) == 2 * CHUNK_TOKENS + 2
    assert service.sample("lookup_hit_l1_tokens_total", **TENANT) == 2 * CHUNK_TOKENS + 2
    assert service.sample("tier_hit_bytes_total", tier="l1") == 3 * FRAME_BYTES


def test_it_is_loaded_from_l2_as_any_chunk() -> None:
    with a_service(with_l2=True) as service:
        service.register()
        store(service, service.hashes(FULL))
        answers: list[Any] = []
        lookup(service).bind(answers.append)
        ((request, on_done),) = service.storage.asked
        assert (request.first_chunk, request.keys.chunks) == (2, 3)
        missing = request.keys[2:]
        service.l1.core.commit(service.l1.reserve(1_000_000, missing, 1e9).reservation)
        acquired = service.l1.acquire(request.owner, missing, request.lease_deadline)
        on_done(PrefetchResult(None, acquired.lease, SlotGrid(acquired.slots, acquired.chunks)))
        service.loop.run()
        (reply,) = answers
        assert (reply.chunks, reply.chunks_l1, reply.partial_tokens, reply.miss_reason) == (3, 2, 2, "")
        assert service.sample("lookup_hit_l2_tokens_total", **TENANT) == 2


def test_where_windows_or_states_end_hits_there_is_none() -> None:
    with a_service() as service:
        service.register(groups=2, tails=(0, 3))
        reply = lookup(service)
        assert (reply.partial_tokens, reply.hashes) == (0, service.hashes(FULL))
        service.end("r")


def test_the_prefix_outlives_it() -> None:
    """Suffix before prefix, also where nothing was looked up after the store."""
    with a_service() as service:
        service.register()
        hashes = names(service)
        store(service, hashes)
        service.end("names")
        service.l1.core.evict(1)
        assert lookup(service).chunks == 2


def test_the_lookup_log_has_full_chunks() -> None:
    class Events:
        active = True

        def __init__(self) -> None:
            self.published: list[LookupEvent] = []

        def publish(self, event: LookupEvent) -> None:
            self.published.append(event)

    events = Events()
    with a_service(events=events) as service:
        service.register()
        store(service, names(service))
        assert lookup(service).chunks == 3
        (event,) = events.published
        assert (event.hit_chunks, event.total_tokens) == (2, 11)
        assert event.chunk_hashes == service.hashes(FULL)
