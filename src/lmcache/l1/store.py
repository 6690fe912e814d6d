"""L1 as the server sees it: the native core and the memory behind it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lmcache._native import L1Core
from lmcache.clock import Clock, SystemClock
from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.l1.adoption import Adoption, adopt
from lmcache.l1.growth import GrowingCore
from lmcache.l1.overuse import OveruseLog
from lmcache.memory.header import HEADER_BYTES
from lmcache.memory.inheritance import Inheritance
from lmcache.memory.shared_memory import SharedMemory
from lmcache.telemetry.metrics import Metrics


class L1Store:
    """`core` is called directly, with packed keys. Thread-safe."""

    def __init__(
        self, memory: SharedMemory, core: L1Core, metrics: Metrics | None = None, *, align_bytes: int = 4096
    ) -> None:
        """Over a core whose committed memory the caller has provided. Servers use `open`."""
        self.memory = memory
        self.core = core
        self.align_bytes = align_bytes
        self.adoption = Adoption()  # what a former server left
        self._metrics = metrics
        self._overuse = OveruseLog()
        self._lock = threading.Lock()  # guards what follows
        self._published = {"evicted_objects": 0, "allocation_failures": 0}

    @classmethod
    def open(
        cls,
        name: str,
        capacity_bytes: int,
        boot_token: bytes,
        *,
        policy: str,
        align_bytes: int = 4096,
        init_bytes: int | None = None,
        hugepages: bool = False,
        metrics: Metrics | None = None,
        clock: Clock | None = None,
        heir: Inheritance | None = None,
        go_on: Callable[[], object] = lambda: None,
    ) -> L1Store:
        """Makes shared memory `name` for `capacity_bytes` of slots. ResourceError when the machine does not give it.

        With `init_bytes` L1 is lazy: that much is prepared in the background, more as it fills. None takes all of it
        before this returns. With an `heir` the memory stays at the end, and what a former server left to such an heir
        is resident at once. `go_on` is called between the steps of what takes long; what it raises ends this.
        """
        clock = clock or SystemClock()
        first_offset = heir.first_offset if heir else max(HEADER_BYTES, align_bytes)
        size_bytes = first_offset + capacity_bytes
        former = SharedMemory.take_over(name, size_bytes, boot_token, heir, hugepages=hugepages) if heir else None
        memory = former or SharedMemory.create(name, size_bytes, boot_token, hugepages=hugepages, heir=heir)
        try:
            core = GrowingCore(memory, capacity_bytes, first_offset, align_bytes, policy, clock)
            store = cls(memory, core, metrics, align_bytes=align_bytes)
            if former is not None:
                store.adoption = adopt(memory, core, first_offset, align_bytes, clock)
                if metrics is not None:
                    metrics.l1_adopted.inc(store.adoption.objects)
            if init_bytes is None:
                core.commit_all(go_on)
            else:
                core.start(init_bytes)
        except BaseException:
            memory.close()
            raise
        return store

    def close(self, *, in_use: bool = False) -> None:
        """Stops growth, closes the core and gives the memory back; removes the file unless it is left to an heir. With
        `in_use` the memory stays mapped until the process ends, for I/O that has not ended. Idempotent."""
        if isinstance(self.core, GrowingCore):
            self.core.stop()
        self.core.close()
        self.memory.close(in_use=in_use)

    def address_of(self, offset: int) -> int:
        """Where an offset from the core lies in this process."""
        return self.memory.address + offset

    def frame_bytes(self, payload_bytes: int) -> int:
        """Size of the slot that holds such a payload: header and payload, rounded up to the alignment."""
        return -(-(FRAME_HEADER_BYTES + payload_bytes) // self.align_bytes) * self.align_bytes

    def enforce_limits(self) -> tuple[int, int]:
        """To be called regularly. Evicts what salts have beyond their limits, as far as nobody reads it: (objects,
        bytes). What is new stays until the next call, so that it can reach L2. Says once of each salt that it goes
        beyond."""
        self._overuse.say(self.core.take_overuses())
        return self.core.enforce_limits(spare_new=True)

    def stats(self) -> dict[str, int]:
        """The core's figures; brings the metrics up to date on the way."""
        with self._lock:
            stats = self.core.stats()
            if self._metrics is not None:
                self._publish(self._metrics, stats)
                self._publish_ages(self._metrics)
        return stats

    def _publish(self, metrics: Metrics, stats: dict[str, int]) -> None:
        metrics.l1_memory_usage_bytes.set(stats["used_bytes"])
        metrics.l1_usage_ratio.set(stats["used_bytes"] / stats["capacity_bytes"])
        metrics.quarantined_bytes.set(stats["quarantined_bytes"])
        for counter, name in (
            (metrics.l1_evicted, "evicted_objects"),
            (metrics.l1_allocation_failure, "allocation_failures"),
        ):
            counter.inc(stats[name] - self._published[name])
            self._published[name] = stats[name]

    def _publish_ages(self, metrics: Metrics) -> None:
        lifetimes, idle, gaps = self.core.take_ages()
        for histogram, seconds in (
            (metrics.l1_chunk_lifetime, lifetimes),
            (metrics.l1_chunk_idle_before_evict, idle),
            (metrics.l1_chunk_reuse_gap, gaps),
        ):
            for one in seconds:
                histogram.observe(one)
        if idle:
            metrics.l1_eviction_age_seconds.set(sum(idle) / len(idle))

    def check_idle(self) -> None:
        """AssertionError or RuntimeError unless L1 is consistent and nobody holds or writes anything."""
        self.core.check()
        stats = self.core.stats()
        held = {
            name: stats[name] for name in ("leases", "leased_objects", "reservations", "staged", "quarantined_bytes")
        }
        assert not any(held.values()), f"L1 is not idle: {held}"
        assert stats["used_bytes"] + stats["free_bytes"] == stats["committed_bytes"], f"L1 lost memory: {stats}"
