"""Brings into L1, and leases there, the longest prefix that L2 has of what a lookup missed.

A request goes through windows of chunks that grow: ask which objects are there, stop at the first chunk that is not
whole, start loads for the rest. Loads run at once; the request waits for them in prefix order, until its deadline.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache import _native
from lmcache.core import limits
from lmcache.core.key import CHUNK_HASH_BYTES, Namespace, ObjectKey
from lmcache.core.outcome import MissReason
from lmcache.l1.adoption import STORAGE_OWNER
from lmcache.l1.store import L1Store
from lmcache.l2.runner import Runner
from lmcache.telemetry.metrics import Metrics
from lmcache.tiering.checked_policies import CheckedPrefetchPolicy
from lmcache.tiering.leases import FOREVER
from lmcache.tiering.loads import Load, Loader, Slot
from lmcache.tiering.tails import is_needed, longest_whole

log = logging.getLogger("lmcache.tiering")

FIRST_WINDOW_CHUNKS = 32
WINDOW_GROWTH = 4

# Of one chunk, by namespace: the first adapter that has its object, or None.
Sources = list[int | None]


@dataclass(frozen=True)
class PrefetchRequest:
    """`hashes`: the chunks that L1 did not have, in order, 32 bytes each. An object is one chunk in one namespace."""

    owner: int
    lease_deadline: float
    namespaces: Sequence[Namespace]
    frame_bytes: Sequence[int]  # by namespace
    hashes: bytes
    deadline_seconds: float
    l1_hashes: bytes = b""  # the chunks before `hashes`, which L1 had
    tail_chunks: Sequence[int] = ()  # by namespace: how many chunks at the end of a hit it must have, 0 for all


@dataclass(frozen=True)
class PrefetchResult:
    """`chunks` of the request are leased; `offsets` are u64 [namespace][chunk]. `miss_reason` tells why not all are."""

    chunks: int
    lease: int
    offsets: bytes
    miss_reason: MissReason | None


NOTHING_ASKED = PrefetchResult(0, 0, b"", None)


class _Run:
    """A request under way."""

    def __init__(self, request: PrefetchRequest, runners: Sequence[Runner]) -> None:
        """`runners` in the order in which they are asked."""
        self.request = request
        self.runners = runners
        self.digests = b"".join(namespace.digest for namespace in request.namespaces)
        self.width = len(request.namespaces)
        self.hashes = [
            request.hashes[at : at + CHUNK_HASH_BYTES] for at in range(0, len(request.hashes), CHUNK_HASH_BYTES)
        ]
        self.loads: dict[Load, int] = {}  # joined, with the first chunk of this request that each matters to
        self.awaited: set[Load] = set()
        self.leases: list[int] = []  # on objects that were resident already
        self.reason = MissReason.NOT_STORED
        self.chunks = 0  # expected to be resident once the loads are done

    def keys_of(self, chunk: int) -> list[ObjectKey]:
        return [ObjectKey(namespace, self.hashes[chunk]) for namespace in self.request.namespaces]


class PrefetchController:
    """Belongs to the storage loop."""

    def __init__(
        self,
        l1: L1Store,
        runners: Sequence[Runner],
        loader: Loader,
        policy: CheckedPrefetchPolicy,
        *,
        max_in_flight: int,
        metrics: Metrics,
    ) -> None:
        self._l1 = l1
        self._runners = runners
        self._loader = loader
        self._policy = policy
        self._metrics = metrics
        self._slots = asyncio.Semaphore(max_in_flight)
        self.waiting = 0
        self.in_flight = 0

    async def run(self, request: PrefetchRequest, cancelled: asyncio.Event) -> PrefetchResult:
        """Never raises for a fault of L2. After `cancelled`, nothing stays leased."""
        chunks = len(request.hashes) // CHUNK_HASH_BYTES
        if not chunks or not request.namespaces or not self._runners:
            return PrefetchResult(0, 0, b"", MissReason.NOT_STORED if chunks else None)
        l1_chunks = len(request.l1_hashes) // CHUNK_HASH_BYTES
        log.debug(
            "Prefetch request submitted: %d total keys, %d L1 prefix hits, %d remaining for L2",
            (chunks + l1_chunks) * len(request.namespaces),
            l1_chunks * len(request.namespaces),
            chunks * len(request.namespaces),
        )
        self._metrics.l2_prefetch_lookup.inc()
        if self.waiting >= limits.MAX_PREFETCHES_WAITING:
            return PrefetchResult(0, 0, b"", MissReason.L2_DEADLINE)
        runners = [self._runners[index] for index in self._policy.order(request.namespaces)]
        run = _Run(request, runners)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.deadline_seconds
        work = loop.create_task(self._work(run))
        stop = loop.create_task(cancelled.wait())
        try:
            await asyncio.wait({work, stop}, timeout=request.deadline_seconds, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                run.reason = MissReason.L2_DEADLINE
                if loop.time() >= deadline:
                    self._metrics.timeouts.inc()
            elif work.exception() is not None:
                log.error("A prefetch failed", exc_info=work.exception())
                run.reason = MissReason.L2_FAILED
            if cancelled.is_set():
                return NOTHING_ASKED
            return self._lease(run, chunks)
        finally:
            stop.cancel()
            work.cancel()
            await asyncio.gather(stop, work, return_exceptions=True)
            self._give_back(run)

    def check_idle(self) -> None:
        """AssertionError unless no request is under way."""
        assert not self.waiting and not self.in_flight, f"{self.waiting} prefetches wait, {self.in_flight} run"

    # ---- the request -------------------------------------------------------------------------------------------------
    async def _work(self, run: _Run) -> None:
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        self.in_flight += 1
        try:
            for _ in run.runners:
                run.reason = MissReason.NOT_STORED
                await self._start_loads(run)
                await self._await_loads(run)
                if run.reason is not MissReason.L2_DEADLINE:
                    return  # else an adapter was late: it is left alone now, and the others are asked for the rest
        finally:
            self.in_flight -= 1
            self._slots.release()

    async def _await_loads(self, run: _Run) -> None:
        for load in list(run.loads):
            if load in run.awaited:
                continue
            run.awaited.add(load)
            # Shielded: others may wait for the same load.
            missing = await asyncio.shield(load.done)
            self._shorten(run, load, missing)
            if run.chunks <= run.loads[load] and run.reason is not MissReason.L2_DEADLINE:
                return

    async def _start_loads(self, run: _Run) -> None:
        tails, total, window = run.request.tail_chunks, len(run.hashes), FIRST_WINDOW_CHUNKS
        if tails:  # what is needed depends on where the hit ends, so that has to be known first
            run.chunks, window = 0, total
        while run.chunks < total:
            first, last = run.chunks, min(total, run.chunks + window)
            sources = await self._find(run, first, last)
            there = [[source is not None for source in of_chunk] for of_chunk in sources]
            whole = first + longest_whole(there, tails or [0] * run.width)
            found = sources[: whole - first]
            if tails:
                found = [
                    [source if is_needed(chunk, whole, tail) else None for source, tail in zip(row, tails, strict=True)]
                    for chunk, row in enumerate(found)
                ]
            if not await self._load_window(run, first, found) or whole < last:
                return
            window *= WINDOW_GROWTH

    async def _find(self, run: _Run, first: int, last: int) -> list[Sources]:
        """Where the objects of each chunk are. One that L1 has, or that is being loaded, counts as the first adapter's:
        it will not be loaded again."""
        width = run.width
        keys = [key for chunk in range(first, last) for key in run.keys_of(chunk)]
        source: list[int | None] = [None] * len(keys)
        for index, key in enumerate(keys):
            if self._loader.find(key) is not None:
                source[index] = 0
        for position, runner in enumerate(run.runners):
            unknown = [index for index, value in enumerate(source) if value is None]
            if not unknown:
                break
            there = await runner.probe([keys[index] for index in unknown])
            for index, has in zip(unknown, there, strict=True):
                if has:
                    source[index] = position
        found: list[Sources] = []
        for chunk in range(first, last):
            at = (chunk - first) * width
            found.append([self._or_resident(run, chunk, i, source[at + i]) for i in range(width)])
            if None in found[-1] and not run.request.tail_chunks:
                break
        return found

    def _or_resident(self, run: _Run, chunk: int, position: int, source: int | None) -> int | None:
        if source is None and self._l1.core.probe(run.request.namespaces[position].digest, run.hashes[chunk]):
            return 0
        return source

    async def _load_window(self, run: _Run, first: int, sources: Sequence[Sources]) -> bool:
        """Starts loads for the chunks from `first` on, for what has a source. False when L1 lacks the room."""
        chunk_bytes = sum(run.request.frame_bytes)
        width = run.width
        step = max(1, min(limits.MAX_L2_BATCH_OBJECTS // width, limits.L2_LOAD_BATCH_BYTES // chunk_bytes))
        for at in range(0, len(sources), step):
            part = sources[at : at + step]
            await self._admit(len(part) * chunk_bytes)
            started = self._reserve(run, first + at, part)
            run.chunks = first + at + started
            if started < len(part):
                run.reason = MissReason.NO_ROOM
                return False
        return True

    async def _admit(self, size_bytes: int) -> None:
        loader = self._loader
        while loader.bytes_in_flight and loader.bytes_in_flight + size_bytes > limits.MAX_L2_PREFETCH_BYTES_IN_FLIGHT:
            loader.bytes_freed.clear()
            await loader.bytes_freed.wait()

    def _reserve(self, run: _Run, first: int, sources: Sequence[Sources]) -> int:
        """Takes slots for these chunks and starts their load; how many chunks have room. What is resident is leased,
        what somebody else loads is joined."""
        count, width = len(sources), run.width
        core = self._l1.core
        reservation, packed, without_room = core.reserve(
            STORAGE_OWNER,
            run.digests,
            run.request.namespaces[0].cache_salt,
            array("Q", run.request.frame_bytes).tobytes(),
            b"".join(run.hashes[first : first + count]),
            FOREVER,
            bytes(sources[chunk][position] is not None for position in range(width) for chunk in range(count))
            if run.request.tail_chunks
            else b"",
        )
        offsets = array("Q", packed)
        slots = []
        with_room = count - without_room
        for chunk in range(with_room):
            keys = run.keys_of(first + chunk)
            for position in range(width):
                source = sources[chunk][position]
                if source is None:
                    continue
                place = position * count + chunk
                if offsets[place] != _native.NO_SLOT:
                    size_bytes = run.request.frame_bytes[position]
                    slots.append(Slot(keys[position], place, offsets[place], size_bytes, source))
                    continue
                other = self._loader.find(keys[position])
                if other is not None:
                    self._join(run, other, first + chunk)
                    continue
                # Resident: held, so that making room for the rest does not evict it. Or staged by an engine: a miss.
                digest = run.request.namespaces[position].digest
                lease, _, _ = core.acquire(STORAGE_OWNER, digest, run.hashes[first + chunk], FOREVER)
                if lease:
                    run.leases.append(lease)
        if slots:
            load = Load(slots, reservation, width * count, run.runners)
            self._join(run, load, first)
            self._loader.start(load)
            self._metrics.l2_prefetch_load_submitted.inc()
        return int(with_room)

    def _join(self, run: _Run, load: Load, first_chunk: int) -> None:
        if load not in run.loads:
            run.loads[load] = first_chunk
            self._loader.join(load)

    def _shorten(self, run: _Run, load: Load, missing: dict[ObjectKey, MissReason]) -> None:
        """The prefix ends at the first chunk that a load could not deliver whole."""
        if not missing:
            return
        gone = {key.chunk_hash: reason for key, reason in missing.items()}
        for chunk in range(run.loads[load], run.chunks):
            if run.hashes[chunk] in gone:
                run.chunks, run.reason = chunk, gone[run.hashes[chunk]]
                return

    # ---- the end -----------------------------------------------------------------------------------------------------
    def _lease(self, run: _Run, chunks: int) -> PrefetchResult:
        """What is resident now, which at a deadline may be more or less than what was waited for."""
        lease, leased, offsets = self._l1.core.acquire(
            run.request.owner,
            run.digests,
            run.request.hashes,
            run.request.lease_deadline,
            True,
            array("I", run.request.tail_chunks).tobytes(),
        )
        return PrefetchResult(leased, lease, offsets, run.reason if leased < chunks else None)

    def note_use(self, request: PrefetchRequest, chunks: int) -> None:
        """After the answer, of that many chunks. Loads touch what they load, batch by batch, and L1's part of a prompt
        is not loaded at all. So that no prefix leaves L2 before its suffix, all of the prompt has been used once more.
        """
        if not chunks:
            return
        hashes = request.l1_hashes + request.hashes[: chunks * CHUNK_HASH_BYTES]
        total = len(hashes) // CHUNK_HASH_BYTES
        tails = request.tail_chunks or [0] * len(request.namespaces)
        keys = [
            ObjectKey(namespace, hashes[chunk * CHUNK_HASH_BYTES : (chunk + 1) * CHUNK_HASH_BYTES])
            for chunk in range(total)
            for namespace, tail in zip(request.namespaces, tails, strict=True)
            if is_needed(chunk, total, tail)
        ]
        for runner in self._runners:
            runner.used(keys)

    def _give_back(self, run: _Run) -> None:
        for load in run.loads:
            self._loader.leave(load)
        for lease in run.leases:
            self._l1.core.release(lease)
