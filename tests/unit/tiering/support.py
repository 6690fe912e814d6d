"""A real L1 and a real storage loop, with adapters of the test's choice."""

from __future__ import annotations

import os
import queue
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lmcache import _native
from lmcache.core.frame import header_template
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.l1.store import L1Store
from lmcache.l2.registry import ConfiguredAdapter, build, parse_adapter
from lmcache.telemetry.metrics import Metrics
from lmcache.testing.faults import FaultyAdapter
from lmcache.testing.frames import keys, namespace
from lmcache.tiering.policy_selection import select_prefetch_policy, select_store_policy
from lmcache.tiering.prefetch import PrefetchRequest, PrefetchResult
from lmcache.tiering.storage import Storage
from polling import until

PAYLOAD_BYTES = 8192 - FRAME_HEADER_BYTES
FRAME_BYTES = 8192
MOCK = {"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 1000}
ENGINE = 7
FOREVER = 1e18


def faulty(spec: dict[str, Any] = MOCK, index: int = 0, **common: Any) -> tuple[ConfiguredAdapter, FaultyAdapter]:
    configured = build(parse_adapter({**spec, **common}, index))
    adapter = FaultyAdapter(configured.adapter)
    return ConfiguredAdapter(configured.config, adapter), adapter


class Rig:
    def __init__(self, l1: L1Store, storage: Storage, metrics: Metrics) -> None:
        self.l1 = l1
        self.storage = storage
        self.metrics = metrics

    def be_impatient(self, seconds: float = 0.2) -> None:
        """The first adapter's deadline from now on: what a test needs before it may take its time."""
        runner = self.storage._runners[0]
        runner.config = replace(runner.config, timeout_seconds=seconds)

    def payload(self, key: ObjectKey) -> bytes:
        return (key.namespace.digest + key.chunk_hash) * (PAYLOAD_BYTES // 64)

    def reserve(self, chunks: Sequence[ObjectKey]) -> tuple[int, bytes]:
        of, hashes = chunks[0].namespace, b"".join(key.chunk_hash for key in chunks)
        sizes = array("Q", [FRAME_BYTES]).tobytes()
        reservation, packed, _ = self.l1.core.reserve(ENGINE, of.digest, of.cache_salt, sizes, hashes, FOREVER)
        return reservation, packed

    def put(self, chunks: Sequence[ObjectKey], tell: bool = True) -> int:
        """Stores chunks of one namespace as an engine does; how many became resident."""
        of = chunks[0].namespace
        hashes = b"".join(key.chunk_hash for key in chunks)
        reservation, packed = self.reserve(chunks)
        template = header_template(of, PAYLOAD_BYTES)
        for key, offset in zip(chunks, array("Q", packed), strict=True):
            if offset != _native.NO_SLOT:
                self.l1.memory.view(offset + FRAME_HEADER_BYTES, PAYLOAD_BYTES)[:] = self.payload(key)
                _native.frame_seal(self.l1.address_of(offset), template, key.chunk_hash)
        written = bytes(offset != _native.NO_SLOT for offset in array("Q", packed))
        count, _, records = self.l1.core.commit(reservation, written)
        if tell:
            self.storage.objects_committed([of], hashes, records)
        return count

    def resident(self, chunks: Sequence[ObjectKey]) -> int:
        return self.l1.core.probe(chunks[0].namespace.digest, b"".join(key.chunk_hash for key in chunks))

    def begin_fetch(
        self,
        chunks: Sequence[ObjectKey],
        deadline_seconds: float = 20.0,
        namespaces: Sequence[Namespace] = (),
        in_l1: Sequence[ObjectKey] = (),
        tails: Sequence[int] = (),
    ) -> tuple[queue.Queue[PrefetchResult], Callable[[], None]]:
        answers: queue.Queue[PrefetchResult] = queue.Queue()
        of = list(namespaces) or [chunks[0].namespace]
        hashes = b"".join(key.chunk_hash for key in chunks)
        before = b"".join(key.chunk_hash for key in in_l1)
        request = PrefetchRequest(ENGINE, FOREVER, of, [FRAME_BYTES] * len(of), hashes, deadline_seconds, before, tails)
        return answers, self.storage.prefetch(request, answers.put)

    def fetch(self, chunks: Sequence[ObjectKey], **options: Any) -> PrefetchResult:
        return self.begin_fetch(chunks, **options)[0].get(timeout=30)

    def holds(self, result: PrefetchResult, chunks: Sequence[ObjectKey], namespaces: Sequence[Namespace] = ()) -> bool:
        """Whether the leased slots have exactly the payloads of the keys."""
        offsets = array("Q", result.offsets)
        of = list(namespaces) or [chunks[0].namespace]
        for position, name in enumerate(of):
            for index, key in enumerate(chunks[: result.chunks]):
                wanted = ObjectKey(name, key.chunk_hash)
                if offsets[position * result.chunks + index] == _native.NO_SLOT:
                    continue
                offset = offsets[position * result.chunks + index] + FRAME_HEADER_BYTES
                if bytes(self.l1.memory.view(offset, PAYLOAD_BYTES)) != self.payload(wanted):
                    return False
        return True

    def idle(self) -> bool:
        try:
            self.l1.check_idle()
        except AssertionError:
            return False
        return True

    def sample(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"lmcache_mp_{name}", labels) or 0.0


def idle_fault(storage: Storage) -> str:
    """What the storage loop still holds, "" for nothing."""
    answers: queue.Queue[str] = queue.Queue()

    def look() -> None:
        try:
            storage.check_idle()
        except AssertionError as fault:
            answers.put(str(fault))
        else:
            answers.put("")

    assert storage.call_soon(look)
    return answers.get(timeout=20)


@contextmanager
def rig(
    adapters: Sequence[ConfiguredAdapter] = (), *, slots: int = 1024, l1_policy: str = "LRU", **options: Any
) -> Iterator[Rig]:
    """After the test nothing is leased or reserved, and nothing is left in /dev/shm."""
    metrics = Metrics()
    name = f"lmcache-test-l2-{os.getpid()}-{time.monotonic_ns()}"
    l1 = L1Store.open(name, slots * FRAME_BYTES, os.urandom(16), policy=l1_policy, init_bytes=slots * FRAME_BYTES)
    settings: dict[str, Any] = {
        "store_policy": "default",
        "prefetch_policy": "default",
        "prefetch_max_in_flight": 8,
        "eviction_watermark": 1.0,
        "eviction_ratio": 0.2,
    }
    try:
        settings.update(options)
        settings["store_policy"] = select_store_policy(settings["store_policy"])
        settings["prefetch_policy"] = select_prefetch_policy(settings["prefetch_policy"])
        storage = Storage(l1, list(adapters), metrics=metrics, **settings)
    except BaseException:
        l1.close()
        raise
    try:
        storage.start()
        it = Rig(l1, storage, metrics)
        yield it
        l1.core.drop_owner(ENGINE)
        if storage.responsive(10):
            until(lambda: not idle_fault(storage), tell=lambda: idle_fault(storage))
        assert storage.stop(10)
        l1.check_idle()
    finally:
        storage.stop(0)
        l1.close()
    assert not os.path.exists(f"/dev/shm/{name}")


__all__ = ["ENGINE", "FRAME_BYTES", "MOCK", "Rig", "faulty", "keys", "namespace", "rig"]
