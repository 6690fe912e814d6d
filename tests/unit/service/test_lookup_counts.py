"""What the metrics have of a request: once, however often it is asked about, and why it missed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmcache._native import SeenChunks
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.protocol import messages as m
from unit.service.support import CHUNK_TOKENS, FRAME_BYTES, LAYOUT, RESERVATION_TTL, Service, a_service, chunks

TENANT = {"model_name": "model", "cache_salt": ""}
OTHER_LAYOUT = "cd" * 16


@pytest.fixture
def service() -> Iterator[Service]:
    with a_service() as service:
        service.register()
        yield service


def misses(service: Service) -> dict[str, float]:
    """By reason, those that there are."""
    return {
        sample.labels["reason"]: sample.value
        for family in service.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "lmcache_mp_misses_total" and sample.value
    }


# ---- once ------------------------------------------------------------------------------------------------------------
def test_a_request_that_is_asked_about_again_counts_once(service: Service) -> None:
    tokens = chunks(1, 2, 3)
    service.store(chunks(1))
    for _ in range(5):
        assert service.lookup("r", tokens).chunks == 1
    assert service.sample("lookups_total", **TENANT) == 1
    assert service.sample("lookup_requested_tokens_total", **TENANT) == 3 * CHUNK_TOKENS
    assert service.sample("lookup_hit_tokens_total", **TENANT) == CHUNK_TOKENS
    assert service.sample("tier_hit_bytes_total", tier="l1") == FRAME_BYTES
    assert misses(service) == {"not_stored": 1}
    assert service.sample("l1_read_chunks_total") == 5, "what is leased is leased"


def test_a_request_that_waited_for_another_counts_with_what_it_got(service: Service) -> None:
    tokens = chunks(1, 2, 3)
    service.lookup("r", tokens)
    service.store(tokens)
    service.lookup("r", tokens)
    assert service.sample("lookup_hit_tokens_total", **TENANT) == 3 * CHUNK_TOKENS
    assert service.sample("lookup_hit_l1_tokens_total", **TENANT) == 3 * CHUNK_TOKENS
    assert service.sample("lookups_total", **TENANT) == 1


def test_a_preempted_request_does_not_count_what_it_stored_itself(service: Service) -> None:
    tokens = chunks(1, 2, 3)
    service.lookup("r", tokens)
    service.store(tokens)
    message = m.Lookup("engine", "r", "", 0, tokens, resumed=True)
    assert service.lookups.lookup(message).chunks == 3
    assert service.sample("lookup_hit_tokens_total", **TENANT) == 0
    assert service.sample("lookup_requested_tokens_total", **TENANT) == 3 * CHUNK_TOKENS


def test_a_request_that_grows_counts_what_is_new(service: Service) -> None:
    service.lookup("r", chunks(1, 2))
    service.lookup("r", chunks(1, 2, 3))
    assert service.sample("lookup_requested_tokens_total", **TENANT) == 3 * CHUNK_TOKENS
    assert misses(service) == {"not_stored": 2}


# ---- why -------------------------------------------------------------------------------------------------------------
def test_what_was_evicted_is_told_from_what_was_never_there(service: Service) -> None:
    service.store(chunks(1))
    service.l1.core.evict(1)
    assert service.lookup("a", chunks(1)).miss_reason == "evicted"
    assert service.lookup("b", chunks(2)).miss_reason == "not_stored"
    service.store(chunks(1))
    assert service.lookup("c", chunks(1)).miss_reason == ""
    assert misses(service) == {"evicted": 1, "not_stored": 1}


def test_what_an_operator_cleared(service: Service) -> None:
    service.store(chunks(1))
    service.l1.core.clear()
    assert service.lookup("a", chunks(1)).miss_reason == "cleared"


def test_what_another_engine_is_storing(service: Service) -> None:
    reserved = service.reserve(chunks(1))
    assert service.lookup("a", chunks(1)).miss_reason == "being_stored"
    service.commit(reserved.reservation)
    assert service.lookup("a", chunks(1)).chunks == 1


def test_what_a_writer_left_behind(service: Service) -> None:
    service.reserve(chunks(1))
    service.clock.advance(RESERVATION_TTL + 1)
    service.l1.core.expire(service.clock.monotonic())
    assert service.lookup("a", chunks(1)).miss_reason == "abandoned"


def test_what_found_no_room() -> None:
    with a_service(capacity_bytes=2 * FRAME_BYTES) as service:
        service.register()
        service.store(chunks(1, 2))
        held = service.lookup("reader", chunks(1, 2))
        service.reserve(chunks(3))
        assert service.lookup("a", chunks(3)).miss_reason == "no_room_to_store"
        service.lookups.release(m.Release("engine", held.lease))


def test_what_did_not_verify(service: Service) -> None:
    service.store(chunks(1, 2))
    lease = service.lookup("a", chunks(1, 2)).lease
    service.lookups.release(m.Release("engine", lease, [1]))
    assert service.lookup("b", chunks(1, 2)).miss_reason == "corrupt"


def test_what_another_layout_has(service: Service) -> None:
    service.register("other", layout=OTHER_LAYOUT)
    service.lookup("first", chunks(1), instance="other")
    service.store(chunks(1), instance="other")
    assert service.lookup("a", chunks(1)).miss_reason == "other_layout"
    assert service.lookup("b", chunks(2)).miss_reason == "not_stored"


def test_a_tenant_does_not_hear_of_another(service: Service) -> None:
    service.store(chunks(1), salt="tenant")
    service.l1.core.evict(1)
    assert service.lookup("a", chunks(1)).miss_reason == "not_stored"
    assert service.lookup("b", chunks(1), salt="tenant").miss_reason == "evicted"
    assert LAYOUT != OTHER_LAYOUT


# ---- what an endless cache would find --------------------------------------------------------------------------------
def test_the_distance_from_an_endless_cache(service: Service) -> None:
    service.lookup("a", chunks(1, 2, 3, 4))
    service.end("a")
    service.store(chunks(1))
    service.lookup("b", chunks(1, 2, 3, 4))  # an endless cache had all, this one a quarter
    service.lookups.publish()
    assert service.sample("lookup_ceiling_tokens_total") == 4 * CHUNK_TOKENS
    assert service.sample("lookup_ceiling_distance_ratio") == pytest.approx(3 / 8)
    assert service.sample("lookup_ceiling_sampled_ratio") == 1


def test_a_sample_stands_for_many_chunks() -> None:
    """400,000 chunks, each asked for twice, where 131,072 are kept at most."""
    seen, requested, found = SeenChunks(), 0.0, 0.0
    total, batch = 400_000, 1000
    for _ in range(2):
        for first in range(0, total, batch):
            hashes = b"".join(number.to_bytes(CHUNK_HASH_BYTES, "little") for number in range(first, first + batch))
            counts = seen.observe(1, hashes)
            requested += counts.requested
            found += counts.seen
    assert seen.rate() < 1
    assert requested == pytest.approx(2 * total, rel=0.02)
    assert found / requested == pytest.approx(0.5, abs=0.02)
    assert seen.observe(2, bytes(CHUNK_HASH_BYTES)).seen == 0, "another namespace"


# ---- seconds of prefill ----------------------------------------------------------------------------------------------
def test_prefill_saved_is_what_the_engine_measured(service: Service) -> None:
    service.store(chunks(1, 2, 3))
    lease = service.lookup("a", chunks(1, 2, 3)).lease
    service.lookups.release(m.Release("engine", lease, loaded_tokens=2 * CHUNK_TOKENS, prefill_seconds=0.5))
    assert service.sample("prefill_saved_seconds_total", tier="l1") == pytest.approx(0.5)


def test_the_speed_of_a_load_is_in_gb_per_second(service: Service) -> None:
    """Of what the engine loaded, which is the end of the hit, over the time that it held the lease."""
    service.store(chunks(1, 2, 3))
    lease = service.lookup("a", chunks(1, 2, 3)).lease
    service.clock.advance(0.5)
    service.lookups.release(m.Release("engine", lease, loaded_tokens=CHUNK_TOKENS + 1))
    assert service.sample("l0_l1_load_throughput_GB_per_second_count") == 1
    wanted = 2 * FRAME_BYTES / 0.5 / 1e9
    assert service.sample("l0_l1_load_throughput_GB_per_second_sum") == pytest.approx(wanted)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 1e9])
def test_prefill_that_is_no_measure_is_left_out(service: Service, seconds: float) -> None:
    service.store(chunks(1))
    lease = service.lookup("a", chunks(1)).lease
    service.lookups.release(m.Release("engine", lease, loaded_tokens=CHUNK_TOKENS, prefill_seconds=seconds))
    assert service.sample("prefill_saved_seconds_total", tier="l1") == 0
