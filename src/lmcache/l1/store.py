"""L1 as the server sees it: the native core and the memory behind it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from lmcache._native import Acquired, L1Core, Removed, Reserved
from lmcache.clock import Clock
from lmcache.core import frame
from lmcache.core.key_batch import KeyBatch
from lmcache.environment import SYSTEM
from lmcache.l1.growth import Growth
from lmcache.l1.overuse import OveruseLog
from lmcache.l1.recovery import RecoveredL1, recover
from lmcache.memory.header import HEADER_BYTES
from lmcache.memory.memory_limit import MemoryProbe
from lmcache.memory.numa import NumaPlacement
from lmcache.memory.restart_compatibility import RestartCompatibility
from lmcache.memory.server_memory import ServerMemory
from lmcache.telemetry.metrics import L1Metrics


@dataclass(frozen=True, slots=True)
class L1Options:
    """What an operator decides about L1.

    Without `init_bytes` all of `capacity_bytes` is taken before L1 opens. With it L1 is lazy: that much is prepared in
    the background, more as it fills. With `compatibility` the memory stays at the end, and what a previous server left
    that was compatible is resident at once; that stays on its NUMA nodes, whatever `placement` says.
    """

    capacity_bytes: int  # of slots
    policy: str  # of eviction, by its name
    align_bytes: int = 4096
    init_bytes: int | None = None
    hugepages: bool = False
    compatibility: RestartCompatibility | None = None
    placement: NumaPlacement | None = None


class L1Store:
    """The index of L1 and the memory that it describes. What takes a batch of keys is here; everything else is called
    on `core`. Thread-safe.

    Shapes and units: sizes, capacities and slots are bytes, slots as offsets in `memory`. A batch of n namespaces and m
    chunks has flags and slots [namespace][chunk], one byte and one u64 each, NO_SLOT where there is none. Deadlines are
    seconds of the clock given to `open`.

    Errors: what is not there, or finds no room, is said by the result. ResourceError from `open` when the machine does
    not give the memory; ServerUnavailable after `close`; ValueError for sizes that do not fit each other.

    Example, in shared memory of a `name` that nobody else uses:

    >>> from lmcache.core.key import Namespace
    >>> from lmcache.core.key_batch import ChunkHashes, KeyBatch, NamespaceSet
    >>> from lmcache.l1.store import L1Options, L1Store
    >>> store = L1Store.open(name, bytes(16), L1Options(1 << 20, policy="LRU"))
    >>> namespaces = NamespaceSet((Namespace("model", 1, 0, 0, "00" * 16),), frame_bytes=(8192,))
    >>> keys = KeyBatch(namespaces, ChunkHashes(b"a" * 32 + b"b" * 32))
    >>> reserved = store.reserve(1, keys, deadline=60.0)
    >>> store.core.commit(reserved.reservation).objects
    2
    >>> acquired = store.acquire(1, keys, deadline=60.0)
    >>> acquired.chunks, store.core.release(acquired.lease)
    (2, True)
    >>> store.close()
    """

    def __init__(
        self,
        memory: ServerMemory,
        core: L1Core,
        metrics: L1Metrics | None = None,
        *,
        align_bytes: int = 4096,
        growth: Growth | None = None,
    ) -> None:
        """Without `growth` over a core whose committed memory the caller has provided. Servers use `open`."""
        self.memory = memory
        self.core = core
        self.align_bytes = align_bytes
        self.recovered = RecoveredL1()  # from the previous server
        self.growth = growth
        self.evicts = True  # without being told which objects
        self._metrics = metrics
        self._overuse = OveruseLog()
        self._lock = threading.Lock()  # guards what follows
        self._published = {"evicted_objects": 0, "allocation_failures": 0}

    @classmethod
    def open(
        cls,
        name: str,
        server_epoch: bytes,
        options: L1Options,
        *,
        metrics: L1Metrics | None = None,
        clock: Clock = SYSTEM.clock,
        checkpoint: Callable[[], object] = lambda: None,
        probe: MemoryProbe | None = None,
    ) -> L1Store:
        """Makes shared memory `name`. ResourceError when the machine does not give it. `checkpoint` is called between
        the steps of what takes long; what it raises ends this."""
        capacity_bytes, align_bytes, compatibility = options.capacity_bytes, options.align_bytes, options.compatibility
        first_offset = compatibility.first_offset if compatibility else max(HEADER_BYTES, align_bytes)
        size_bytes = first_offset + capacity_bytes
        recovered = None
        if compatibility is not None:
            recovered = ServerMemory.recover(
                name, size_bytes, server_epoch, compatibility, hugepages=options.hugepages, probe=probe
            )
        memory = recovered or ServerMemory.create(
            name, size_bytes, server_epoch, hugepages=options.hugepages, compatibility=compatibility, probe=probe
        )
        try:
            if options.placement is not None:
                memory.place(options.placement)
            core = L1Core(
                capacity_bytes, first_offset, align_bytes, options.policy, slot_table=memory.slot_table_address
            )
            growth = Growth(memory, core, capacity_bytes, first_offset, clock)
            store = cls(memory, core, metrics, align_bytes=align_bytes, growth=growth)
            store.evicts = options.policy != "noop"
            if recovered is not None:
                store.recovered = recover(memory, core, growth.recover(), first_offset, align_bytes, clock)
                if metrics is not None:
                    metrics.l1_adopted.inc(store.recovered.objects)
            if options.init_bytes is None:
                growth.commit_all(checkpoint)
            else:
                growth.start(options.init_bytes)
        except BaseException:
            memory.close()
            raise
        return store

    def close(self, *, in_use: bool = False) -> None:
        """Stops growth, closes the core and gives the memory back; removes the file unless the next server may recover
        it. With `in_use` the memory stays mapped until the process ends, for I/O that has not ended. Idempotent."""
        if self.growth is not None:
            self.growth.stop()
        self.core.close()
        self.memory.close(in_use=in_use)

    def address_of(self, offset: int) -> int:
        """Where an offset from the core lies in this process."""
        return self.memory.address + offset

    def acquire(self, owner: int, keys: KeyBatch, deadline: float) -> Acquired:
        """`L1Core.acquire` as a use, with the tails of the namespaces."""
        namespaces = keys.namespaces
        return self.core.acquire(owner, namespaces.digests, keys.hashes.packed, deadline, tails=namespaces.tails)

    def reserve(self, owner: int, keys: KeyBatch, deadline: float, *, wanted: bytes = b"") -> Reserved:
        """`L1Core.reserve`, which evicts nothing as long as memory can be had within the capacity."""
        left_bytes = 0
        if self.growth is not None:
            left_bytes = self.growth.make_room(sum(keys.namespaces.frame_bytes) * keys.chunks)
        digests, salt, sizes = keys.namespaces.digests, keys.namespaces.cache_salt, keys.namespaces.sizes
        reserved = self.core.reserve(owner, digests, salt, sizes, keys.hashes.packed, deadline, wanted=wanted)
        if self.growth is not None:
            self.growth.note_left(left_bytes)
        return reserved

    def frame_bytes(self, payload_bytes: int) -> int:
        """Size of the slot that holds such a payload: header and payload, rounded up to the alignment."""
        return frame.frame_bytes(payload_bytes, self.align_bytes)

    def enforce_limits(self) -> Removed:
        """To be called regularly. Evicts what salts have beyond their limits, as far as nobody reads it. What is new
        stays until the next call, so that it can reach L2. Logs once for each salt that it goes beyond its limit."""
        self._overuse.log(self.core.take_overuses())
        return self.core.enforce_limits(spare_new=True)

    def stats(self) -> dict[str, int]:
        """The core's figures; brings the metrics up to date on the way."""
        with self._lock:
            stats = self.core.stats()
            if self._metrics is not None:
                self._publish(self._metrics, stats)
                self._publish_ages(self._metrics)
        return stats

    def _publish(self, metrics: L1Metrics, stats: dict[str, int]) -> None:
        metrics.l1_memory_usage_bytes.set(stats["used_bytes"])
        metrics.l1_usage_ratio.set(stats["used_bytes"] / stats["capacity_bytes"])
        metrics.quarantined_bytes.set(stats["quarantined_bytes"])
        for counter, name in (
            (metrics.l1_evicted, "evicted_objects"),
            (metrics.l1_allocation_failure, "allocation_failures"),
        ):
            counter.inc(stats[name] - self._published[name])
            self._published[name] = stats[name]

    def _publish_ages(self, metrics: L1Metrics) -> None:
        ages = self.core.take_ages()
        idle_seconds = ages.idle_before_eviction
        for histogram, samples in (
            (metrics.l1_chunk_lifetime, ages.lifetimes),
            (metrics.l1_chunk_idle_before_evict, idle_seconds),
            (metrics.l1_chunk_reuse_gap, ages.reuse_gaps),
        ):
            for seconds in samples:
                histogram.observe(seconds)
        if idle_seconds:
            metrics.l1_eviction_age_seconds.set(sum(idle_seconds) / len(idle_seconds))

    def check_idle(self) -> None:
        """AssertionError or RuntimeError unless L1 is consistent and nobody holds or writes anything."""
        self.core.check()
        stats = self.core.stats()
        held = {
            name: stats[name] for name in ("leases", "leased_objects", "reservations", "staged", "quarantined_bytes")
        }
        assert not any(held.values()), f"L1 is not idle: {held}"
        assert stats["used_bytes"] + stats["free_bytes"] == stats["committed_bytes"], f"L1 lost memory: {stats}"
