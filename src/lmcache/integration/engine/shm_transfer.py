"""Transfers with a server whose memory this process maps: copies between the engine's blocks and the slots of L1."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from lmcache import _native
from lmcache.core.key_batch import ChunkHashes, SlotGrid
from lmcache.errors import StaleServer
from lmcache.integration.engine.connector_metadata import LoadOrder, StoreOrder
from lmcache.integration.engine.frame_names import FrameNames
from lmcache.integration.engine.transfer_backend import NOT_FETCHED, WorkerKV
from lmcache.memory.engine_memory import EngineMemory
from lmcache.protocol.messages import HelloReply, ReserveReply


class CopyJob:
    """A copy under way. May be waited for by several threads."""

    def __init__(self, copier: _native.PagedCopier, number: int, lock: threading.Lock, unknown: bytes) -> None:
        """`unknown`: the result where that of the copy was lost to an interrupt of the thread that waited for it."""
        self._copier = copier
        self._number = number
        self._lock = lock
        self._unknown = unknown
        self._result: bytes | None = None

    def wait(self, seconds: float) -> bytes | None:
        """One byte a chunk, 1 = copied and verified; None while the copy runs. Another thread's wait does not
        make this one longer."""
        if self._lock.acquire(timeout=seconds):
            try:
                if self._result is None:
                    self._result = self._copier.wait(self._number, seconds)
            except ValueError:  # it was handed out before
                self._result = self._unknown
            finally:
                self._lock.release()
        return self._result


class ShmTransfer:
    """A `TransferBackend`."""

    def __init__(self, memory: EngineMemory, hello: HelloReply, kv: WorkerKV) -> None:
        """LayoutRefused when the server's chunks do not fit this engine's blocks."""
        self.server_epoch = hello.server_epoch
        self.layouts = kv.layouts(hello.chunk_tokens)
        self._kv_rank = kv.identity.kv_rank
        self._names = FrameNames(kv.identity, kv.layout_names(self.layouts), self.layouts)
        self._new_lock = kv.environment.lock
        self._lock = self._new_lock()
        self._open = True
        self._jobs: list[CopyJob] = []
        memory.map_ahead()  # otherwise the first store and the first hit pay for it
        self._copier, self._groups = kv.copier(self.layouts, memory.address, memory.size_bytes)
        self._pinning = kv.gpu.pin(memory) if kv.gpu is not None else None

    def submit_load(self, order: LoadOrder, fence: _native.CudaFence | None) -> list[CopyJob]:
        names = self._names.of(order.cache_salt)
        slots, hit_hashes = SlotGrid(order.slots, order.hit_chunks), ChunkHashes(order.hashes)[: order.hit_chunks]
        first_row = (self._kv_rank - order.first_rank) * len(self._groups)
        with self._submitting() as jobs:
            for index, (group, load) in enumerate(zip(self._groups, order.groups, strict=True)):
                row = slots.row(first_row + index, load.first_chunk)
                hashes = hit_hashes[load.first_chunk :].packed
                number = self._copier.submit_load(group, row, load.blocks, hashes, names[index].digest, fence)
                unknown = bytes([NOT_FETCHED]) * (order.hit_chunks - load.first_chunk)
                jobs.append(CopyJob(self._copier, number, self._new_lock(), unknown))
        return jobs

    def submit_store(self, order: StoreOrder, reply: ReserveReply) -> list[CopyJob]:
        names = self._names.of(order.cache_salt)
        chunks = len(ChunkHashes(order.hashes))
        slots = SlotGrid(reply.slots, chunks)
        with self._submitting() as jobs:
            for index, (group, blocks) in enumerate(zip(self._groups, order.blocks, strict=True)):
                number = self._copier.submit_store(group, slots.row(index), blocks, order.hashes, names[index].template)
                jobs.append(CopyJob(self._copier, number, self._new_lock(), bytes(chunks)))
        return jobs

    @contextlib.contextmanager
    def _submitting(self) -> Iterator[list[CopyJob]]:
        """Collects the jobs of one order. When one cannot be submitted, those before it have ended on the way out."""
        jobs: list[CopyJob] = []
        with self._lock:
            if not self._open:
                raise StaleServer("the server that this copy was meant for is gone")
            try:
                yield jobs
            except BaseException:
                _wait_for(jobs)
                raise
            self._jobs = [job for job in self._jobs if job.wait(0.0) is None] + jobs

    def close(self) -> None:
        """Waits for the copies under way: one between mapped memories always ends, and one by a GPU too, if only by
        failing."""
        with self._lock:
            self._open = False
            jobs, self._jobs = self._jobs, []
        _wait_for(jobs)
        self._copier.close()
        if self._pinning is not None:
            self._pinning.close()


def _wait_for(jobs: Sequence[CopyJob]) -> None:
    for job in jobs:
        while job.wait(1.0) is None:
            pass
