"""Metrics have the unit of their name: each is compared with what the test moved, and with its own clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache.core.limits import GIB
from lmcache.protocol import messages as m
from lmcache.testing.processes import http_json
from polling import until
from process.metric_traffic import CHUNKS, FRAME_BYTES, Watched, watched_server
from process.support import CALL_SECONDS, unpack_slots

MOVED_BYTES = CHUNKS * FRAME_BYTES
SLOW_SECONDS = 0.3  # what the controlled adapter takes for a batch
HELD_SECONDS = 0.3


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    with watched_server("units", tmp_path / "units") as watched:
        yield watched


def held(began: float) -> None:
    until(lambda: time.monotonic() - began > HELD_SECONDS)


def test_what_engines_hold_and_move(watched: Watched) -> None:
    engine, tokens = watched.engine, watched.tokens(0)
    hashes = engine.hashes(tokens)
    began = time.monotonic()
    reserved = engine.reserve(hashes)
    began_held = time.monotonic()
    engine.fill(hashes, unpack_slots(reserved.slots))
    held(began_held)
    oldest = watched.see("lmcache_mp_reservation_oldest_seconds", lambda seconds: seconds >= HELD_SECONDS)
    assert oldest <= time.monotonic() - began
    engine.commit(reserved.reservation)
    reservation_seconds = time.monotonic() - began
    began = time.monotonic()
    with watched.lookup(tokens) as reply:
        assert reply.chunks == CHUNKS
        held(time.monotonic())
        oldest = watched.see("lmcache_mp_lease_oldest_seconds", lambda seconds: seconds >= HELD_SECONDS)
        assert oldest <= time.monotonic() - began
        engine.client.call("release", m.Release(engine.instance_id, reply.lease), CALL_SECONDS)
        lease_seconds = time.monotonic() - began
    watched.see("lmcache_mp_lease_seconds_count")
    found = watched.look()
    assert HELD_SECONDS <= found["lmcache_mp_reservation_seconds_sum"] <= reservation_seconds
    assert HELD_SECONDS <= found["lmcache_mp_lease_seconds_sum"] <= lease_seconds
    assert found["lmcache_mp_lookup_requested_tokens_total"] == found["lmcache_mp_lookup_hit_l1_tokens_total"]
    assert found["lmcache_mp_lookup_hit_tokens_total"] == len(tokens) / 4
    assert found['lmcache_mp_tier_hit_bytes_total{tier="l1"}'] == MOVED_BYTES
    assert found["lmcache_mp_l1_memory_usage_bytes"] == MOVED_BYTES
    assert found["lmcache_mp_l1_write_chunks_total"] == found["lmcache_mp_l1_read_chunks_total"] == CHUNKS


def test_what_goes_to_l2_and_back(watched: Watched) -> None:
    engine, tokens = watched.engine, watched.tokens(0)
    watched.tell_backend(store="slow", load="slow")
    began = time.monotonic()
    engine.store(tokens)
    watched.see("lmcache_mp_l2_stored_bytes_total", lambda size: size == MOVED_BYTES)
    watched.see("lmcache_mp_l2_store_seconds_count")
    check_times(watched.look(), "store", time.monotonic() - began)
    watched.stored_in_l2(CHUNKS)
    watched.server.clear("l1")
    began = time.monotonic()
    with watched.lookup(tokens) as reply:
        seconds = time.monotonic() - began
        assert reply.chunks == CHUNKS
    watched.see('lmcache_mp_tier_hit_bytes_total{tier="l2"}')
    found = watched.look()
    check_times(found, "load", seconds)
    assert found["lmcache_mp_l2_loaded_bytes_total"] == found["lmcache_mp_l2_usage_bytes"] == MOVED_BYTES
    assert found['lmcache_mp_tier_hit_bytes_total{tier="l2"}'] == MOVED_BYTES
    assert SLOW_SECONDS <= found['lmcache_mp_call_seconds_sum{method="lookup"}'] <= seconds
    assert found["lmcache_mp_l2_prefetch_queue_seconds_sum"] + found["lmcache_mp_l2_probe_seconds_sum"] < seconds


def check_times(found: dict[str, float], direction: str, seconds: float) -> None:
    """`seconds`: what all batches took together, seen from outside; each took the adapter SLOW_SECONDS."""
    name = f"lmcache_mp_l2_{direction}"
    batches = found[f"{name}_seconds_count"]
    assert batches * SLOW_SECONDS <= found[f"{name}_seconds_sum"] <= batches * seconds
    speed = found[f"{name}_throughput_GB_per_second_sum"]
    assert MOVED_BYTES / seconds / 1e9 <= speed <= MOVED_BYTES / SLOW_SECONDS / 1e9


def test_what_is_evicted_and_what_a_tenant_may_keep(watched: Watched) -> None:
    http_json(watched.server.http_port, "PUT", "/quota/tenant", {"limit_gb": 0.25})
    began = time.monotonic()
    watched.engine.store(watched.tokens(0), salt="tenant")
    held(time.monotonic())
    assert watched.see("lmcache_mp_quota_limit_bytes") == 0.25 * GIB
    assert watched.see("lmcache_mp_quota_usage_bytes") == MOVED_BYTES
    for first in range(1000, 1000 + 6 * CHUNKS, CHUNKS):
        watched.engine.store(watched.tokens(first))
    watched.see("lmcache_mp_l1_evicted_chunks_total", lambda chunks: chunks >= CHUNKS)
    found, seconds = watched.look(), time.monotonic() - began
    oldest = found["lmcache_mp_l1_chunk_lifetime_seconds_sum"]  # of CHUNKS that were held, and of others that were not
    assert CHUNKS * HELD_SECONDS <= oldest <= found["lmcache_mp_l1_chunk_lifetime_seconds_count"] * seconds
    idle = found["lmcache_mp_l1_chunk_idle_before_evict_seconds_sum"]
    assert CHUNKS * HELD_SECONDS <= idle <= oldest
    assert 0 < found["lmcache_mp_l1_eviction_age_seconds"] <= seconds
