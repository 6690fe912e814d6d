"""The storage side of a server: one asyncio loop on one thread, with the controllers and the runners of all adapters.

Methods may be called from any thread and wait at most as long as they say.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from lmcache._native import Committed
from lmcache.clock import Clock
from lmcache.core import limits
from lmcache.core.key import ObjectKey
from lmcache.core.key_batch import KeyBatch
from lmcache.core.outcome import MissReason
from lmcache.core.salt_limits import SaltLimits
from lmcache.errors import AdapterError, LMCacheError
from lmcache.l1.store import L1Store
from lmcache.l2.adapter_types import ConfiguredAdapter
from lmcache.l2.background import spawn
from lmcache.l2.runner import Runner
from lmcache.memory.ownership import PIN_OWNER
from lmcache.telemetry.metrics import L2Metrics
from lmcache.telemetry.tracing import StoredTrace
from lmcache.tiering.checked_policies import CheckedPrefetchPolicy, CheckedStorePolicy
from lmcache.tiering.context import PERIOD_SECONDS, TieringContext
from lmcache.tiering.l2_loads import L2Loader
from lmcache.tiering.leases import QueuedObject
from lmcache.tiering.object_deletion import ObjectDeletion
from lmcache.tiering.object_transfer import ObjectTransfer
from lmcache.tiering.pins import Pins
from lmcache.tiering.policies import AdapterInfo, PrefetchPolicy, StorePolicy
from lmcache.tiering.prefetch import PrefetchRequest, PrefetchResult
from lmcache.tiering.prefetch_controller import PrefetchController
from lmcache.tiering.recovered_write_back import RecoveredWriteBack
from lmcache.tiering.verifier import Verifier
from lmcache.tiering.watermark_eviction import WatermarkEviction
from lmcache.tiering.write_back import WriteBack

T = TypeVar("T")

log = logging.getLogger("lmcache.tiering")

TIERS = ("l1", "l2", "all")  # that can be cleared
OPEN_SECONDS = 120.0
CLEAR_SECONDS = 60.0
FLUSH_SECONDS = 10.0
CLOSE_SECONDS = 5.0  # for all adapters
UNDER_WAY_SECONDS = 2.0  # for batches that are being written when the time to drain is over
_MARGIN_SECONDS = 0.1
_LOOK_SECONDS = 0.1
_PINS_SECONDS = 0.5  # after its time at most, a pin ends


def _log_fault(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The root of the loop's own callbacks, and of tasks that are not awaited."""
    log.error("Storage loop: %s", context["message"], exc_info=context.get("exception"))


@dataclass(frozen=True)
class StorageSettings:
    """What an operator decides. `eviction_watermark` and `eviction_ratio` are fractions of L1."""

    store_policy: StorePolicy
    prefetch_policy: PrefetchPolicy
    prefetch_max_in_flight: int
    eviction_watermark: float
    eviction_ratio: float
    verify_threads: int = 1
    period_seconds: float = PERIOD_SECONDS


class StorageLoop:
    def __init__(
        self,
        l1: L1Store,
        adapters: Sequence[ConfiguredAdapter],
        settings: StorageSettings,
        *,
        metrics: L2Metrics,
        clock: Clock,
        salt_limits: SaltLimits | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """`rng` spreads retries, and is used by the loop's thread alone. Read-only adapters come behind all others."""
        self._l1 = l1
        self._prefetches: set[asyncio.Task[None]] = set()
        self._committed: deque[tuple[KeyBatch, Committed, StoredTrace | None]] = deque()
        self._committed_objects = 0
        self._refused_objects = 0
        self._refused_still_read: list[QueuedObject] = []  # to leave L1 later
        self._committed_lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_log_fault)
        self._thread = threading.Thread(target=self._run, name="storage", daemon=True)
        self._stopped = False
        self._drained: bool | None = None  # not asked for yet
        threads = concurrent.futures.ThreadPoolExecutor(settings.verify_threads, thread_name_prefix="verify")
        self._verifier = Verifier(threads)
        self.runners = [Runner(adapter, metrics, clock, salt_limits, rng) for adapter in adapters]
        # Whose objects are this server's: what others decide about is only loaded from.
        self.own_runners = [runner for runner in self.runners if not runner.is_read_only]
        described = [AdapterInfo(runner.name, runner.config.type, runner.config.limit_bytes) for runner in self.runners]
        context = TieringContext(l1, self.runners, metrics, clock, settings.period_seconds)
        prefetch = CheckedPrefetchPolicy(settings.prefetch_policy, described, metrics)
        self._loader = L2Loader(context, self._verifier, retains=prefetch.retains)
        self._prefetch = PrefetchController(
            context, self._loader, prefetch, max_in_flight=settings.prefetch_max_in_flight
        )
        own = replace(context, runners=self.own_runners)
        self._write_back = WriteBack(
            own, CheckedStorePolicy(settings.store_policy, described[: len(self.own_runners)], metrics)
        )
        self._eviction = WatermarkEviction(
            own, self._write_back, watermark=settings.eviction_watermark, ratio=settings.eviction_ratio
        )
        self.pins = Pins(l1, self.own_runners, clock)
        self._deletion = ObjectDeletion(l1, self.own_runners, self.pins)
        self.transfer = ObjectTransfer(own, self._loader)
        self._recovered: RecoveredWriteBack | None = None
        if self.own_runners and l1.recovered.objects:
            self._recovered = RecoveredWriteBack(own, self._write_back, self._verifier)
        self._background: list[asyncio.Task[None]] = []

    # ---- start and stop ----------------------------------------------------------------------------------------------
    def start(self, checkpoint: Callable[[], object] = lambda: None) -> None:
        """Opens the adapters. ConfigError or ResourceError: one of them cannot be used; nothing runs then. `checkpoint`
        is called while they take long; what it raises ends the start."""
        self._thread.start()
        try:
            self._wait_for(self._open(), OPEN_SECONDS, checkpoint)
        except BaseException:
            self.stop()
            raise

    def drain(self, seconds: float) -> bool:
        """Stores what is queued, ends what runs and closes the adapters, within the time given, UNDER_WAY_SECONDS and
        CLOSE_SECONDS. `unwritten` tells what was not stored. False
        when operations of a backend have not ended: they may still touch L1's memory, which must then stay mapped until
        the process ends. From then on nothing is stored or loaded. Idempotent."""
        if self._drained is None:
            try:
                longest_seconds = seconds + UNDER_WAY_SECONDS + CLOSE_SECONDS + 5 * _MARGIN_SECONDS
                self._drained = self._wait_for(self._drain(seconds), longest_seconds)
            except LMCacheError:
                self._drained = False
            if not self._drained:
                log.warning("L2 operations have not ended within %.0f s; they are left behind", seconds)
        return self._drained

    def stop(self, drain_seconds: float = 0.0) -> bool:
        """Drains, unless that was done, and ends the loop. Returns what `drain` did. Idempotent."""
        if self._stopped:
            return True
        self._stopped = True
        if self._thread.ident is None:  # never started
            self._loop.close()
            return True
        drained = self.drain(drain_seconds)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        self._verifier.close()
        return drained

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        # Cancelled tasks see it; those that wait for a backend that never answers do not hold up the end.
        self._loop.call_later(0.1, self._loop.stop)
        self._loop.run_forever()
        self._loop.close()

    async def _open(self) -> None:
        memory = self._l1.memory
        for runner in self.runners:
            runner.lend_memory(memory.address, memory.size_bytes)
            await runner.open()
        self._write_back.start()
        self._background += self._eviction.start()
        self._background.append(spawn(self._end_pins(), "pins"))
        if self._recovered is not None:
            self._background.append(spawn(self._recovered.run(), "recovered-write-back"))
            self._recovered = None  # with the list of what the previous server left

    async def _drain(self, seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        for background in self._background:
            background.cancel()
        if not await self._write_back.flush(seconds) and seconds:
            deadline += UNDER_WAY_SECONDS
        await self._write_back.finish(deadline - loop.time())
        for task in self._prefetches:
            task.cancel()
        drained = [await runner.drain(deadline - loop.time()) for runner in self.runners]
        idle = [runner for runner, has_ended in zip(self.runners, drained, strict=True) if has_ended]
        rest = max(_MARGIN_SECONDS, deadline - loop.time())
        drained += await asyncio.gather(self._loader.drain(rest), self._verifier.drain(rest))
        if ending := {*self._background, *self._prefetches}:
            await asyncio.wait(ending, timeout=_MARGIN_SECONDS)
        rest = max(CLOSE_SECONDS, deadline - loop.time())
        closed = await asyncio.gather(*(runner.close(rest) for runner in idle))
        return all(drained) and all(closed)

    # ---- stores and prefetches ---------------------------------------------------------------------------------------
    def objects_committed(self, keys: KeyBatch, committed: Committed, trace: StoredTrace | None = None) -> None:
        """Objects became resident. `keys` are those of their reservation.

        Never waits. Beyond MAX_L2_STORE_QUEUE_OBJECTS objects are counted and reach no adapter.
        """
        objects = committed.objects
        if not objects or not self.own_runners:
            return
        with self._committed_lock:
            wakes = not self._committed
            if self._committed_objects + objects > limits.MAX_L2_STORE_QUEUE_OBJECTS:
                self._refused_objects += objects
                self._refused_still_read += self._write_back.remove_refused(keys, committed)
            else:
                self._committed.append((keys, committed, trace))
                self._committed_objects += objects
        if wakes:
            self.call_soon(self._take_committed)

    def _take_committed(self) -> None:
        with self._committed_lock:
            taken = list(self._committed)
            self._committed.clear()
            self._committed_objects = 0
            refused, self._refused_objects = self._refused_objects, 0
            still_read, self._refused_still_read = self._refused_still_read, []
        self._write_back.note_refused(refused, still_read)
        for keys, committed, trace in taken:
            self._write_back.add(keys, committed, trace)

    def prefetch(self, request: PrefetchRequest, on_done: Callable[[PrefetchResult], None]) -> Callable[[], None]:
        """Loads and leases the longest prefix that L2 has. `on_done` is called once, on the storage loop, also after
        the returned cancel function was called (then usually with nothing). Whoever gets a lease gives it back."""
        cancelled = asyncio.Event()

        async def run() -> None:
            result = PrefetchResult(MissReason.L2_FAILED)
            try:
                result = await self._prefetch.run(request, cancelled)
            finally:
                try:
                    on_done(result)
                except Exception:  # the root of a request
                    log.exception("The answer of a prefetch could not be delivered")
                    self._l1.core.release(result.lease)
                self._prefetch.note_use(request, result.chunks)

        if not self.call_soon(lambda: self._track(run())):
            on_done(PrefetchResult(MissReason.L2_FAILED))

        def cancel() -> None:
            self.call_soon(cancelled.set)

        return cancel

    def find(self, keys: KeyBatch, tiers: bytearray, deadline_seconds: float, on_done: Callable[[], None]) -> None:
        """`PrefetchController.find`, as far as the deadline allows. `on_done` is called once, on the storage loop."""

        async def run() -> None:
            try:
                work = asyncio.ensure_future(self._prefetch.find(keys, tiers))
                await asyncio.wait({work}, timeout=deadline_seconds)
                work.cancel()
            finally:
                on_done()

        if not self.call_soon(lambda: self._track(run())):
            on_done()

    def _track(self, request: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(request)
        self._prefetches.add(task)
        task.add_done_callback(self._prefetches.discard)

    # ---- administration ----------------------------------------------------------------------------------------------
    def responsive(self, within_seconds: float) -> bool:
        """Whether the loop answers."""
        answered = threading.Event()
        return self.call_soon(answered.set) and answered.wait(within_seconds)

    def publish(self) -> None:
        """Brings metrics that are read up to date. Any thread."""
        self._write_back.publish()
        for runner in self.runners:
            runner.publish()

    def status(self) -> dict[str, Any]:
        return {
            "store": {
                "queued_objects": self._write_back.queued_objects,
                "batches_in_flight": self._write_back.batches_in_flight,
                "unstored_objects": self._write_back.unstored_objects,
                "dropped_objects": self._write_back.dropped,
            },
            "prefetch": {
                "in_flight": self._prefetch.in_flight,
                "waiting": self._prefetch.waiting,
                "bytes_in_flight": self._loader.bytes_in_flight,
                "abandoned_bytes": self._loader.abandoned_bytes,
            },
            "adapters": [runner.status() for runner in self.runners],
        }

    def unwritten(self) -> dict[str, int]:
        """Objects by the adapter that was to have them and has not; under "" those that none has taken. Also after
        `drain`."""
        nowhere = {"": self._write_back.unstored_objects} if self._write_back.unstored_objects else {}
        return {**self._write_back.unwritten(), **nowhere}

    def flush(self, seconds: float) -> bool:
        """Waits until everything committed so far was handed to the adapters. False when that took longer."""
        return self._wait_for(self._write_back.flush(seconds), seconds + CLOSE_SECONDS)

    def clear(self, tier: str, *, force: bool = False) -> tuple[int, int]:
        """Removes every object that is not being read from "l1", "l2" or "all": (objects, bytes). Pinned ones stay,
        with `force` their pins end. LMCacheError when that does not end in time."""
        return self._wait_for(self._clear(tier, force), CLEAR_SECONDS)

    def delete(self, keys: Sequence[ObjectKey], tier: str, *, force: bool) -> tuple[int, int, int]:
        """`ObjectDeletion.delete`. LMCacheError when that does not end in time; it then goes on no further."""
        return self._wait_for(self._deletion.delete(keys, tier, force=force), CLEAR_SECONDS)

    def run(self, coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
        """On the loop. LMCacheError when that does not end in time."""
        return self._wait_for(coroutine, seconds)

    async def _end_pins(self) -> None:
        while True:
            await asyncio.sleep(_PINS_SECONDS)
            self.pins.end_expired()

    async def _clear(self, tier: str, force: bool) -> tuple[int, int]:
        if tier not in TIERS:
            raise LMCacheError(f"The tier must be l1, l2 or all; got {tier!r}.")
        if force:
            self.pins.let_go()
        objects = size_bytes = 0
        faults: list[str] = []
        if tier == "l1":
            await self._write_back.flush(FLUSH_SECONDS)  # what was promised to L2 is not lost by emptying L1
        else:
            self._write_back.discard()
            await self._write_back.flush(FLUSH_SECONDS)
            self._write_back.discard()  # what was being written, and failed
            for runner in self.own_runners:
                try:
                    pinned = self.pins.held_in(runner)
                    cleared = await (runner.delete_known(pinned) if pinned else runner.clear())
                except AdapterError as error:
                    faults.append(str(error))
                else:
                    objects += cleared[0]
                    size_bytes += cleared[1]
        if tier != "l2":
            removed = self._l1.core.clear(spared_owner=PIN_OWNER)
            objects += removed.objects
            size_bytes += removed.size_bytes
            self._write_back.l1_cleared()
        if faults:
            raise AdapterError(f"Not everything could be cleared: {'; '.join(faults)}")
        return objects, size_bytes

    def check_idle(self) -> None:
        """AssertionError if a controller or a runner holds anything. To be called on the storage loop when nothing is
        under way."""
        assert not self._prefetches and not self._committed, "Requests or commits are under way"
        self._write_back.check_idle()
        self._prefetch.check_idle()
        self._loader.check_idle()
        for runner in self.runners:
            runner.check_idle()

    # ---- between threads ---------------------------------------------------------------------------------------------
    def call_soon(self, callback: Callable[[], None]) -> bool:
        """Runs it on the storage loop. False once that has ended."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            return False  # closed
        return True

    def _wait_for(
        self, coroutine: Coroutine[Any, Any, T], seconds: float, checkpoint: Callable[[], object] | None = None
    ) -> T:
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise AdapterError("The storage loop has ended") from None
        left_seconds = seconds
        try:
            while True:
                wait_seconds = left_seconds if checkpoint is None else min(left_seconds, _LOOK_SECONDS)
                concurrent.futures.wait([future], wait_seconds)
                if future.done():
                    return future.result()
                left_seconds -= wait_seconds
                if left_seconds <= 0:
                    raise AdapterError(f"The storage loop did not finish within {seconds:g} s")
                if checkpoint is not None:
                    checkpoint()
        except concurrent.futures.CancelledError:
            raise AdapterError("The storage loop has ended") from None
        finally:
            future.cancel()


assert limits.MAX_L2_BATCH_OBJECTS <= limits.MAX_L2_STORE_QUEUE_OBJECTS
