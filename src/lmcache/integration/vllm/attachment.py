"""One worker's hold on one life of the server: its mapped memory, the layouts agreed on, and the copies under way."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

from lmcache import _native
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.core.layout import KVLayout
from lmcache.device.cpu import PagedGroup
from lmcache.device.cuda import Gpu
from lmcache.errors import ServerUnavailable
from lmcache.integration.vllm.frame_names import FrameNames, WorkerIdentity
from lmcache.integration.vllm.orders import LoadOrder, StoreOrder
from lmcache.memory.shared_memory import SharedMemory
from lmcache.protocol.messages import ReserveReply

_SLOT_BYTES = 8


COPIED = 1
UNREADABLE = 0  # a load's frame is not what its key says
NOT_FETCHED = 2  # a load's frame did not come, or its GPU did not take it: nothing is known of it


class TransferJob(Protocol):
    """A part of an order under way."""

    def wait(self, seconds: float) -> bytes | None:
        """One byte a chunk, COPIED if all went well; None while it runs."""
        ...


class AnyAttachment(Protocol):
    """A worker's hold on one life of the server. `submit_*` raise ServerUnavailable once it is closed.

    A load writes no block before `fence`. The KV of a store has been computed."""

    boot_token: bytes
    layouts: tuple[KVLayout, ...]

    def submit_load(self, order: LoadOrder, fence: _native.CudaFence | None) -> Sequence[TransferJob]: ...
    def submit_store(self, order: StoreOrder, reply: ReserveReply) -> Sequence[TransferJob]: ...
    def close(self) -> None: ...


class CopyJob:
    """A copy under way. May be waited for by several threads."""

    def __init__(self, copier: _native.PagedCopier, number: int) -> None:
        self._copier = copier
        self._number = number
        self._lock = threading.Lock()
        self._result: bytes | None = None

    def wait(self, seconds: float) -> bytes | None:
        """One byte a chunk, 1 = copied and verified; None while the copy runs. Another thread's wait does not
        make this one longer."""
        if self._lock.acquire(timeout=seconds):
            try:
                if self._result is None:
                    self._result = self._copier.wait(self._number, seconds)
            finally:
                self._lock.release()
        return self._result


class Attachment:
    """`submit_*` raise ServerUnavailable once it is closed; `close` returns when no copy touches the memory."""

    def __init__(
        self,
        memory: SharedMemory,
        boot_token: bytes,
        chunk_tokens: int,
        groups: Sequence[PagedGroup],
        identity: WorkerIdentity,
        threads: int,
        gpu: Gpu | None,
    ) -> None:
        """LayoutRefused when the server's chunks do not fit this engine's blocks."""
        self.boot_token = boot_token
        self.layouts: tuple[KVLayout, ...] = tuple(group.layout(chunk_tokens) for group in groups)
        self._identity = identity
        self._names = FrameNames(identity, self.layouts)
        self._lock = threading.Lock()
        self._open = True
        self._jobs: list[CopyJob] = []
        ways = gpu.ways if gpu is not None else None
        memory.map_ahead()  # otherwise the first store and the first hit pay for it
        self._copier = _native.PagedCopier(memory.address, memory.size_bytes, threads, ways)
        self._pinning = gpu.pin(memory) if gpu is not None else None
        self._groups = tuple(
            self._copier.add_group(group.segments, layout.blocks_per_chunk, group.num_blocks)
            for group, layout in zip(groups, self.layouts, strict=True)
        )

    def submit_load(self, order: LoadOrder, fence: _native.CudaFence | None) -> list[CopyJob]:
        """A job per group, in their order."""
        names = self._names.of(order.cache_salt)
        with self._submitting() as jobs:
            for index, (group, load) in enumerate(zip(self._groups, order.groups, strict=True)):
                row = (self._identity.kv_rank * len(self._groups) + index) * order.hit_chunks
                slots = order.slots[(row + load.first_chunk) * _SLOT_BYTES : (row + order.hit_chunks) * _SLOT_BYTES]
                hashes = order.hashes[load.first_chunk * CHUNK_HASH_BYTES : order.hit_chunks * CHUNK_HASH_BYTES]
                number = self._copier.submit_load(group, slots, load.blocks, hashes, names[index].digest, fence)
                jobs.append(CopyJob(self._copier, number))
        return jobs

    def submit_store(self, order: StoreOrder, reply: ReserveReply) -> list[CopyJob]:
        """A job per group."""
        names = self._names.of(order.cache_salt)
        row_bytes = len(order.hashes) // CHUNK_HASH_BYTES * _SLOT_BYTES
        with self._submitting() as jobs:
            for index, (group, blocks) in enumerate(zip(self._groups, order.blocks, strict=True)):
                row = reply.slots[index * row_bytes : (index + 1) * row_bytes]
                number = self._copier.submit_store(group, row, blocks, order.hashes, names[index].template)
                jobs.append(CopyJob(self._copier, number))
        return jobs

    @contextlib.contextmanager
    def _submitting(self) -> Iterator[list[CopyJob]]:
        """Collects the jobs of one order. When one cannot be submitted, those before it have ended on the way out."""
        jobs: list[CopyJob] = []
        with self._lock:
            if not self._open:
                raise ServerUnavailable("the server that this copy was meant for is gone")
            try:
                yield jobs
            except BaseException:
                _wait_for(jobs)
                raise
            self._jobs = [job for job in self._jobs if job.wait(0.0) is None] + jobs

    def close(self) -> None:
        """Takes no new copies and waits for those under way: a copy between mapped memories always ends, and one by a
        GPU too, if only by failing. Idempotent."""
        with self._lock:
            self._open = False
            jobs, self._jobs = self._jobs, []
        _wait_for(jobs)
        self._copier.close()
        if self._pinning is not None:
            self._pinning.close()


def _wait_for(jobs: Sequence[CopyJob]) -> None:
    """A copy between mapped memories always ends."""
    for job in jobs:
        while job.wait(1.0) is None:
            pass
