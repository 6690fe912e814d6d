"""A real L1 and a real storage loop, with adapters of the test's choice."""

from __future__ import annotations

import os
import queue
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from lmcache import _native
from lmcache.core.frame import header_template
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.key_batch import ChunkHashes, KeyBatch, NamespaceSet
from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.environment import SYSTEM
from lmcache.l1.store import L1Options, L1Store
from lmcache.l2.adapter_types import ConfiguredAdapter, build, parse_adapter
from lmcache.telemetry.metrics import Metrics
from lmcache.testing.frames import keys, namespace
from lmcache.tiering.policy_selection import select_prefetch_policy, select_store_policy
from lmcache.tiering.prefetch import PrefetchRequest, PrefetchResult
from lmcache.tiering.storage_loop import StorageLoop, StorageSettings
from polling import until
from support.faults import FaultyAdapter

PAYLOAD_BYTES = 8192 - FRAME_HEADER_BYTES
FRAME_BYTES = 8192
MOCK = {"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 1000}
ENGINE = 7
FOREVER = 1e18


def faulty(spec: dict[str, Any] = MOCK, index: int = 0, **common: Any) -> tuple[ConfiguredAdapter, FaultyAdapter]:
    configured = build(parse_adapter({**spec, **common}, index))
    adapter = FaultyAdapter(configured.adapter)
    return ConfiguredAdapter(configured.config, adapter), adapter


def batch(
    chunks: Sequence[ObjectKey], namespaces: Sequence[Namespace] = (), tail_chunks: Sequence[int] = ()
) -> KeyBatch:
    """Those chunks in all of the namespaces, by default in that of the keys."""
    of = tuple(namespaces) or (chunks[0].namespace,)
    hashes = ChunkHashes(b"".join(key.chunk_hash for key in chunks))
    return KeyBatch(NamespaceSet(of, (FRAME_BYTES,) * len(of), tuple(tail_chunks)), hashes)


class Rig:
    def __init__(self, l1: L1Store, storage: StorageLoop, metrics: Metrics) -> None:
        self.l1 = l1
        self.storage = storage
        self.metrics = metrics

    def be_impatient(self, seconds: float = 0.2) -> None:
        """The first adapter's deadline from now on: what a test needs before it may take its time."""
        runner = self.storage.runners[0]
        runner.context.config = replace(runner.context.config, timeout_seconds=seconds)

    def payload(self, key: ObjectKey) -> bytes:
        return (key.namespace.digest + key.chunk_hash) * (PAYLOAD_BYTES // 64)

    def reserve(self, chunks: Sequence[ObjectKey]) -> tuple[int, bytes]:
        reserved = self.l1.reserve(ENGINE, batch(chunks), FOREVER)
        return reserved.reservation, reserved.slots

    def put(self, chunks: Sequence[ObjectKey], tell: bool = True) -> int:
        """Stores chunks of one namespace as an engine does; how many became resident."""
        of = chunks[0].namespace
        reservation, packed = self.reserve(chunks)
        template = header_template(of, PAYLOAD_BYTES)
        for key, offset in zip(chunks, array("Q", packed), strict=True):
            if offset != _native.NO_SLOT:
                self.l1.memory.view(offset + FRAME_HEADER_BYTES, PAYLOAD_BYTES)[:] = self.payload(key)
                _native.frame_seal(self.l1.address_of(offset), template, key.chunk_hash)
        written = bytes(offset != _native.NO_SLOT for offset in array("Q", packed))
        committed = self.l1.core.commit(reservation, written)
        if tell:
            self.storage.objects_committed(batch(chunks), committed)
        return committed.objects

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
        prompt = batch([*in_l1, *chunks], namespaces, tails)
        request = PrefetchRequest(ENGINE, FOREVER, prompt, len(in_l1), deadline_seconds)
        return answers, self.storage.prefetch(request, answers.put)

    def fetch(self, chunks: Sequence[ObjectKey], **options: Any) -> PrefetchResult:
        return self.begin_fetch(chunks, **options)[0].get(timeout=30)

    def holds(self, result: PrefetchResult, chunks: Sequence[ObjectKey], namespaces: Sequence[Namespace] = ()) -> bool:
        """Whether the leased slots have exactly the payloads of the keys."""
        of = list(namespaces) or [chunks[0].namespace]
        for position, name in enumerate(of):
            for index, key in enumerate(chunks[: result.chunks]):
                wanted = ObjectKey(name, key.chunk_hash)
                slot = result.slots[position, index]
                if slot == _native.NO_SLOT:
                    continue
                if bytes(self.l1.memory.view(slot + FRAME_HEADER_BYTES, PAYLOAD_BYTES)) != self.payload(wanted):
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


def idle_fault(storage: StorageLoop) -> str:
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


def storage_settings(
    store_policy: str = "default", prefetch_policy: str = "default", **options: Any
) -> StorageSettings:
    policies = select_store_policy(store_policy), select_prefetch_policy(prefetch_policy)
    return StorageSettings(
        *policies,
        **{
            "prefetch_max_in_flight": 8,
            "eviction_watermark": 1.0,
            "eviction_ratio": 0.2,
            "period_seconds": 0.02,
            **options,
        },
    )


@contextmanager
def open_rig(
    adapters: Sequence[ConfiguredAdapter] = (), *, slots: int = 1024, l1_policy: str = "LRU", **options: Any
) -> Iterator[Rig]:
    """After the test nothing is leased or reserved, and nothing is left in /dev/shm."""
    metrics = Metrics()
    name = f"lmcache-test-l2-{os.getpid()}-{time.monotonic_ns()}"
    l1 = L1Store.open(
        name, os.urandom(16), L1Options(slots * FRAME_BYTES, policy=l1_policy, init_bytes=slots * FRAME_BYTES)
    )
    options.setdefault("clock", SYSTEM.clock)
    beside = {name: options.pop(name) for name in ("clock", "salt_limits", "rng") if name in options}
    try:
        storage = StorageLoop(l1, list(adapters), storage_settings(**options), metrics=metrics.l2, **beside)
    except BaseException:
        l1.close()
        raise
    try:
        storage.start()
        rig = Rig(l1, storage, metrics)
        yield rig
        l1.core.drop_owner(ENGINE)
        if storage.responsive(10):
            until(lambda: not idle_fault(storage), tell=lambda: idle_fault(storage))
        assert storage.stop(10)
        l1.check_idle()
    finally:
        storage.stop(0)
        l1.close()
    assert not os.path.exists(f"/dev/shm/{name}")


__all__ = ["ENGINE", "FRAME_BYTES", "MOCK", "Rig", "batch", "faulty", "keys", "namespace", "open_rig"]
