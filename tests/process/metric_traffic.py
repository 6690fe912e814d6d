"""Real traffic that moves the metrics: servers with a cause for each, and what their /metrics said meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from lmcache.client.transfer_mode import WantedTransfer
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.core.limits import FRAME_HEADER_BYTES, GIB
from lmcache.errors import RemoteError
from lmcache.protocol import messages as m
from lmcache.testing.processes import CacheServer, CoordinatorProcess, free_port, http_json
from polling import STALL_SECONDS, until
from process.support import CALL_SECONDS, SmallEngine, unpack_slots

PAYLOAD_BYTES = 1 << 18
FRAME_BYTES = FRAME_HEADER_BYTES + PAYLOAD_BYTES
L1_FRAMES = 48
CHUNKS = 8
HEARTBEAT_SECONDS = STALL_SECONDS / 2  # what is held is renewed in time, and silence has room for a stall
CONTROLLED = """
import asyncio, json
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.l2.adapter import Adapter

class Controlled(Adapter):
    '''Keeps objects in memory and does what a file says: {"store": ..., "load": ...}.'''
    def __init__(self, path): self.path, self.frames, self.operations = path, {}, 0
    def told(self, what):
        self.operations += 1
        with open(self.path) as file: return json.load(file).get(what, "works")
    def status(self): return {"buffered_fallbacks": self.operations}
    async def store(self, keys, buffers):
        told = self.told("store")
        if told == "slow": await asyncio.sleep(0.3)
        outcome = {"full": StoreOutcome.FULL, "fails": StoreOutcome.FAILED}.get(told, StoreOutcome.STORED)
        if outcome is StoreOutcome.STORED: self.frames |= zip(keys, map(bytes, buffers))
        return [outcome] * len(keys)
    async def load(self, keys, buffers):
        told = self.told("load")
        if told == "slow": await asyncio.sleep(0.3)
        while self.told("load") == "hangs": await asyncio.sleep(0.1)
        for key, buffer in zip(keys, buffers): buffer[:] = self.frames.get(key, buffer)
        if told == "damages": buffers[0][5000] ^= 1
        return [LoadOutcome.LOADED if key in self.frames else LoadOutcome.MISSING for key in keys]
    async def probe(self, keys): return [len(self.frames[key]) if key in self.frames else None for key in keys]
    async def delete(self, keys, *, corrupt=False): return [self.frames.pop(key, None) is None or True for key in keys]
    async def clear(self):
        cleared = len(self.frames), sum(map(len, self.frames.values()))
        self.frames.clear()
        return cleared
    async def close(self): pass
"""


class Watched:
    """A server, an engine beside it, and every value that a metric had when it was looked at."""

    def __init__(self, server: CacheServer) -> None:
        self.server = server
        self.engine = SmallEngine(server.port, payload_bytes=PAYLOAD_BYTES, heartbeat=HEARTBEAT_SECONDS)
        self.values: dict[str, set[float]] = {}  # by metric and by metric{label="value"}
        self._requests = itertools.count()
        self.stack = contextlib.ExitStack()  # of what the traffic starts
        self.coordinator_port = 0

    def look(self) -> dict[str, float]:
        """Sums over all labels, and each labelled value."""
        status, text = self.server.ask(self.server.http_port, "GET", "/metrics")
        assert status == 200, text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(str(text)):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
                for label, label_value in sample.labels.items():
                    name = f'{sample.name}{{{label}="{label_value}"}}'
                    found[name] = found.get(name, 0.0) + sample.value
        for name, value in found.items():
            self.values.setdefault(name, set()).add(value)
        return found

    def see(self, name: str, is_there: Callable[[float], bool] = lambda value: value > 0) -> float:
        """Looks until the metric has such a value, which is returned."""
        seen: list[float] = []

        def look() -> bool:
            seen.append(self.look().get(name, 0.0))
            return is_there(seen[-1])

        until(look, tell=lambda: f"{name} of {self.look()}")
        return seen[-1]

    def moved(self, name: str) -> bool:
        """Whether it had two values, or one that is not 0 if it is there from its first event on."""
        return len(self.values.get(name, set()) | {0.0}) > 1

    def tokens(self, first: int, chunks: int = CHUNKS) -> bytes:
        return self.engine.tokens(*range(first, first + chunks))

    @contextlib.contextmanager
    def lookup(self, tokens: bytes, *, salt: str = "", seconds: float = 10.0) -> Iterator[m.LookupReply]:
        """A request that lives as long as the block."""
        request = f"r{next(self._requests)}"
        reply = self.engine.lookup(request, tokens, salt=salt, deadline_seconds=seconds)
        yield reply
        self.engine.end(request)

    def tell_backend(self, **what: str) -> None:
        """What the controlled adapter is to do from now on, by direction."""
        tell_adapter(self.server.log_path.parent, **what)

    def stored_in_l2(self, objects: int) -> None:
        until(lambda: self.server.status()["l2"]["adapters"][0]["objects"] >= objects, tell=self.server.status)


# ---- what happens on each server -------------------------------------------------------------------------------------
def hits_and_stores(watched: Watched) -> None:
    """Misses, stores, hits from both tiers, evictions of both, a tenant with a quota."""
    engine, tokens = watched.engine, watched.tokens(0)
    with watched.lookup(tokens) as reply:
        assert not reply.chunks
        watched.see("lmcache_mp_sessions")
        hashes = engine.hashes(tokens)
        reserved = engine.reserve(hashes)
        watched.see("lmcache_mp_reservation_oldest_seconds")
        engine.fill(hashes, unpack_slots(reserved.slots))
        engine.commit(reserved.reservation)
    with watched.lookup(tokens) as reply:
        assert reply.chunks == CHUNKS and engine.read(reply)
        watched.see("lmcache_mp_lease_oldest_seconds")
        loaded = m.Release(engine.instance_id, reply.lease, loaded_tokens=256, prefill_seconds=1.0)
        engine.client.call("release", loaded, CALL_SECONDS)
    watched.stored_in_l2(CHUNKS)
    follow_changes(watched, tokens)
    tell_a_proxy(watched)
    watched.server.clear("l1")
    with watched.lookup(tokens) as reply:
        assert reply.chunks == CHUNKS and engine.read(reply)
        loaded = m.Release(engine.instance_id, reply.lease, loaded_tokens=256, prefill_seconds=1.0)
        engine.client.call("release", loaded, CALL_SECONDS)
    with watched.lookup(watched.tokens(500)):
        pass
    with watched.lookup(watched.tokens(500)) as reply:  # an endless cache would have it
        assert not reply.chunks
    watched.see("lmcache_mp_lookup_ceiling_distance_ratio")
    http_json(watched.server.http_port, "PUT", "/quota/tenant", {"limit_gb": 0.01})
    for first in range(1000, 1000 + 4 * L1_FRAMES, CHUNKS):
        engine.store(watched.tokens(first), salt="tenant")
        with watched.lookup(watched.tokens(first), salt="tenant"):
            watched.look()
    watched.see("lmcache_mp_l1_evicted_chunks_total")
    watched.see("lmcache_mp_l2_evicted_objects_total")
    hand_over(watched)


def hand_over(watched: Watched) -> None:
    """Lookups that name the engine that is storing what they ask for: it ends its store, aborts it, or takes long."""
    engine, hello = watched.engine, watched.engine.client.hello
    assert hello is not None
    for outcome, first, seconds in (("stored", 7000, 60.0), ("gone", 7100, 60.0), ("late", 7200, 0.05)):
        tokens = watched.tokens(first)
        hashes = engine.hashes(tokens)
        reserved = engine.reserve(hashes)
        engine.fill(hashes, unpack_slots(reserved.slots))
        source = m.Source(engine.instance_id, "", hello.server_epoch, len(tokens) // 4, seconds)
        message = m.Lookup(engine.instance_id, outcome, "", 0, tokens, deadline_seconds=60.0, source=source)
        pending = engine.client.submit("lookup", message, CALL_SECONDS)
        if outcome != "late":
            assert not pending.wait(0.05)
            engine.commit(reserved.reservation, bytes(CHUNKS) if outcome == "gone" else b"")
        pending.result()
        watched.see(f'lmcache_mp_handover_waits_total{{outcome="{outcome}"}}')
        engine.commit(reserved.reservation, bytes(CHUNKS))
        engine.end(outcome)


def follow_changes(watched: Watched, tokens: bytes) -> None:
    """As an engine that publishes KV events does; one that comes with the cursor of another server lost some."""
    engine, hello = watched.engine, watched.engine.client.hello
    assert hello is not None
    hashes = engine.hashes(tokens)
    salts = bytes(len(hashes) // CHUNK_HASH_BYTES * 4)
    ask = m.ChunkChanges(engine.instance_id, hello.server_epoch, [9, 9], [""], salts, hashes, counts=[CHUNKS, 1, 1, 1])
    reply = engine.client.call("chunk_changes", ask, CALL_SECONDS)
    assert reply.lost and len(reply.tiers) == CHUNKS


def tell_a_proxy(watched: Watched) -> None:
    """As a prefill engine does whose proxy waits for what is stored, and did not hear of one request."""
    counts = [0, 0]
    watched.engine.client.report(lambda: tuple(counts))
    counts[:] = [3, 1]
    watched.see('lmcache_mp_request_telemetry_requests_total{result="lost"}')


def engines_that_fail(watched: Watched) -> None:
    """One that reads damage, one that sends damage, one that vanishes, one that is silent in the middle of a store."""
    engine, tokens = watched.engine, watched.tokens(0)
    engine.store(tokens)
    with watched.lookup(tokens) as reply:
        damaged = m.Release(engine.instance_id, reply.lease, unreadable_chunks=[0])
        engine.client.call("release", damaged, CALL_SECONDS)
    with contextlib.suppress(RemoteError):
        engine.client.call("reserve", m.Hello(99), CALL_SECONDS)
    remote = SmallEngine(
        watched.server.port, transfer=WantedTransfer.SOCKET, payload_bytes=PAYLOAD_BYTES, heartbeat=HEARTBEAT_SECONDS
    )
    with remote:
        hashes = remote.hashes(watched.tokens(100, 1))
        whole = remote.frame
        remote.frame = lambda chunk_hash, salt="": damage(whole(chunk_hash, salt=salt))
        reserved = remote.reserve(hashes)
        remote.send(hashes, reserved)
        remote.commit(reserved.reservation)
    watched.see('lmcache_mp_corrupt_frames_total{tier="socket"}')
    silent = SmallEngine(watched.server.port, payload_bytes=PAYLOAD_BYTES, heartbeat=600.0)
    with silent:
        silent.reserve(silent.hashes(watched.tokens(200)))
        watched.see("lmcache_mp_quarantined_bytes")
    vanishing = itertools.count()

    def one_is_silent() -> bool:
        """It is for a part of a second, until the server finds that it has gone."""
        name = f"vanishing-{next(vanishing)}"
        lost = m.RegisterInstance(name, "model", 1, 1, 0.1)
        engine.client.call("register_instance", lost, CALL_SECONDS)
        until(lambda: watched.look()["lmcache_mp_instances_silent"] or name not in str(watched.server.status()))
        return max(watched.values["lmcache_mp_instances_silent"]) > 0

    until(one_is_silent, 60.0)
    watched.see("lmcache_mp_registrations_lost_total")


def damage(frame: memoryview) -> memoryview:
    frame[FRAME_HEADER_BYTES + 100] ^= 1
    return frame


def a_backend_that_fails(watched: Watched) -> None:
    """Slow, full, failing, damaging, hanging: each for some objects."""
    told, engine = watched.tell_backend, watched.engine
    told(store="slow")
    for first in range(0, 4 * CHUNKS, CHUNKS):
        engine.store(watched.tokens(first))
    watched.see("lmcache_mp_num_inflight_l2_stores")
    watched.see("lmcache_mp_l2_store_queue_depth", lambda depth: depth == 0)
    watched.stored_in_l2(4 * CHUNKS)
    until(lambda: not watched.server.status()["l1"]["objects"])
    told(load="damages")
    stored = itertools.cycle(first for first in range(0, 4 * CHUNKS, CHUNKS) if first != CHUNKS)

    def one_is_damaged() -> bool:
        """Unless its load is given up first, because this machine stands still for as long."""
        with watched.lookup(watched.tokens(next(stored))) as reply:
            assert reply.chunks < CHUNKS
        return watched.look().get('lmcache_mp_corrupt_frames_total{tier="l2"}', 0.0) > 0

    until(one_is_damaged)
    told(store="full")
    engine.store(watched.tokens(100))
    watched.see("lmcache_mp_l2_is_full")
    told(store="fails")
    for first in range(200, 200 + 2 * L1_FRAMES, CHUNKS):  # more than L1 holds: what no adapter took is lost
        engine.store(watched.tokens(first))
        watched.look()
    watched.see("lmcache_mp_l2_store_lost_chunks_total")
    told(load="hangs")
    lookup = m.Lookup(engine.instance_id, "hanging", "", 0, watched.tokens(CHUNKS), deadline_seconds=5.0)
    pending = engine.client.submit("lookup", lookup, CALL_SECONDS)
    watched.see("lmcache_mp_num_inflight_l2_loads")
    assert pending.result().chunks == 0
    engine.end("hanging")
    watched.see("lmcache_mp_l2_breaker_open")
    watched.see('lmcache_mp_misses_total{reason="l2_deadline"}')
    prompts = itertools.count(3000, CHUNKS)

    def one_finds_it_suspended() -> bool:
        """What the adapter has is not known, and it is not asked, but now and then for a trial."""
        with watched.lookup(watched.tokens(next(prompts)), seconds=1.0) as reply:
            assert not reply.chunks
        return watched.look().get('lmcache_mp_misses_total{reason="l2_suspended"}', 0.0) > 0

    until(one_finds_it_suspended)
    told()


def an_l1_that_is_full(watched: Watched) -> None:
    """Nothing is evicted, so that stores find no room."""
    for first in range(0, 2 * L1_FRAMES, CHUNKS):
        watched.engine.store(watched.tokens(first))
    watched.see("lmcache_mp_l1_allocation_failure_chunks_total")


def a_tenant_beyond_its_quota(watched: Watched) -> None:
    """It keeps its newest objects; of the others it is said why they went."""
    kept = 2 * CHUNKS
    http_json(watched.server.http_port, "PUT", "/quota/tenant", {"limit_gb": (kept + 0.5) * FRAME_BYTES / GIB})
    for first in range(0, 2 * kept, CHUNKS):
        watched.engine.store(watched.tokens(first), salt="tenant")
    watched.see("lmcache_mp_l1_evicted_chunks_total", lambda chunks: chunks >= kept)
    with watched.lookup(watched.tokens(0), salt="tenant") as reply:
        assert not reply.chunks
    watched.see('lmcache_mp_misses_total{reason="over_quota"}')


def a_fleet(watched: Watched) -> None:
    """A coordinator that comes, goes and comes back, without a checkpoint."""
    engine, folder = watched.engine, watched.server.log_path.parent

    def coordinator(name: str) -> CoordinatorProcess:
        started = CoordinatorProcess(folder, port=watched.coordinator_port, log_name=name)
        return watched.stack.enter_context(started)

    first = coordinator("first.log")
    watched.see("lmcache_mp_coordinator_joined")
    watched.see("lmcache_mp_coordinator_members")
    engine.store(watched.tokens(0))
    watched.see("lmcache_mp_coordinator_events_chunks_total", lambda chunks: chunks >= CHUNKS)
    first.kill()
    engine.store(watched.tokens(CHUNKS))
    watched.see('lmcache_mp_coordinator_failures_total{call="events"}')
    coordinator("second.log")
    watched.see("lmcache_mp_coordinator_resyncs_total")
    watched.see("lmcache_mp_coordinator_events_chunks_total", lambda chunks: chunks >= 3 * CHUNKS)


SCENARIOS: dict[str, Callable[[Watched], None]] = {
    "hits": hits_and_stores,
    "engines": engines_that_fail,
    "backend": a_backend_that_fails,
    "full": an_l1_that_is_full,
    "quota": a_tenant_beyond_its_quota,
    "fleet": a_fleet,
}


def controlled_adapter(folder: Path, timeout_seconds: float = 1.0) -> str:
    """Its setting. Its module, for PYTHONPATH, and what it is told lie in the folder."""
    (folder / "controlled_adapter.py").write_text(CONTROLLED)
    tell_adapter(folder)
    place = {"type": "plugin", "module_path": "controlled_adapter", "class_name": "Controlled"}
    parameters = {"path": str(folder / "told.json")}
    return json.dumps({**place, "adapter_params": parameters, "timeout_seconds": timeout_seconds})


def tell_adapter(folder: Path, **what: str) -> None:
    """What the controlled adapter is to do from now on, by direction."""
    path = folder / "told.json"
    path.with_suffix(".new").write_text(json.dumps(what))
    path.with_suffix(".new").replace(path)


def with_modules_of(folder: Path) -> dict[str, str]:
    """The environment in which a server finds the folder's modules, beside its own."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def options_of(scenario: str, folder: Path) -> list[str]:
    """Of the server that the scenario is for. Its files lie in the folder."""
    files: dict[str, Any] = {"type": "fs_native", "base_path": str(folder / "l2"), "serde": {"type": "exponent"}}
    files |= {"max_capacity_gb": 2 * L1_FRAMES * FRAME_BYTES / GIB, "eviction": {"eviction_policy": "LRU"}}
    return {
        "hits": ["--metrics-sample-rate", "1", "--lookup-hash-log-dir", str(folder), "--l2-adapter", json.dumps(files)],
        "engines": ["--l1-write-ttl-seconds", str(STALL_SECONDS)],  # only one engine is silent for longer
        "backend": ["--l2-store-policy", "skip_l1", "--l2-adapter", controlled_adapter(folder)],
        "full": ["--eviction-policy", "noop"],
        "quota": ["--eviction-policy", "IsolatedLRU"],
        "fleet": ["--coordinator-heartbeat-interval", "0.3", "--coordinator-event-flush-interval", "0.1"],
        "units": ["--metrics-sample-rate", "1", "--l2-adapter", controlled_adapter(folder, CALL_SECONDS)],
    }[scenario]


@contextlib.contextmanager
def watched_server(scenario: str, folder: Path) -> Iterator[Watched]:
    folder.mkdir()
    extra = options_of(scenario, folder)
    coordinator_port = free_port() if scenario == "fleet" else 0
    if coordinator_port:
        extra += ["--coordinator-url", f"http://127.0.0.1:{coordinator_port}"]
    l1_gb = L1_FRAMES * FRAME_BYTES / GIB
    with CacheServer(folder, l1_size_gb=l1_gb, extra=extra, environment=with_modules_of(folder)) as server:
        server.wait_ready()
        watched = Watched(server)
        watched.coordinator_port = coordinator_port
        watched.look()
        with watched.engine, watched.stack:
            yield watched
        watched.look()
        assert server.stop() == 0, server.log()
