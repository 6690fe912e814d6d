"""One worker's hold on one life of a server whose memory it cannot map: the same frames, carried over the socket.

Frames are made and taken apart in a staging arena of this process by the same copier that works in shared memory
otherwise, so that what is written, and what is verified before it counts as loaded, is the same in both modes.
"""

from __future__ import annotations

import logging
import mmap
import queue
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from lmcache import _native
from lmcache.client.frames import Frame, FrameMover
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.core.layout import KVLayout
from lmcache.core.limits import FRAME_ALIGN_BYTES, FRAME_HEADER_BYTES, PAYLOAD_STAGING_BYTES
from lmcache.device.cpu import PagedGroup
from lmcache.device.cuda import Gpu
from lmcache.errors import ServerUnavailable
from lmcache.integration.vllm.attachment import COPIED, NOT_FETCHED
from lmcache.integration.vllm.frame_names import FrameNames, WorkerIdentity
from lmcache.integration.vllm.orders import LoadOrder, StoreOrder
from lmcache.protocol.messages import ReserveReply

if TYPE_CHECKING:
    from lmcache.client.client import Client

log = logging.getLogger("lmcache.vllm")

_Fence = _native.CudaFence | None
_Positions = Sequence[tuple[int, int]]  # (group, chunk)


class _Ended:
    """Results of one group, once there are any."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._result = b""

    def set(self, result: bytes) -> None:
        self._result = result
        self._done.set()

    def wait(self, seconds: float) -> bytes | None:
        return self._result if self._done.is_set() or self._done.wait(seconds) else None


class SocketAttachment:
    """Used as `Attachment` is. Stores run in the caller's thread, loads one by one in a thread of their own."""

    def __init__(
        self,
        client: Client,
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
        self._names = FrameNames(identity, self.layouts)
        self._frame_bytes = [FRAME_HEADER_BYTES + layout.payload_bytes for layout in self.layouts]
        self._stopping = False
        self._mover = FrameMover(client, boot_token, identity.instance_id, identity.worker_id, lambda: self._stopping)
        self._half_bytes = max(PAYLOAD_STAGING_BYTES // 2, *(_slot_bytes(size) for size in self._frame_bytes))
        self._arena = memoryview(mmap.mmap(-1, 2 * self._half_bytes))
        address, ways = _native.buffer_address(self._arena), gpu.ways if gpu is not None else None
        self._copier = _native.PagedCopier(address, len(self._arena), threads, ways)
        self._pinning = gpu.pin_buffer(address, len(self._arena)) if gpu is not None else None
        self._groups = tuple(
            self._copier.add_group(group.segments, layout.blocks_per_chunk, group.num_blocks)
            for group, layout in zip(groups, self.layouts, strict=True)
        )
        self._storing = threading.Lock()
        self._loads: queue.SimpleQueue[tuple[LoadOrder, _Fence, list[_Ended]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="lmcache-fetch", daemon=True)
        self._thread.start()

    # ---- loads -------------------------------------------------------------------------------------------------------
    def submit_load(self, order: LoadOrder, fence: _Fence) -> list[_Ended]:
        """A job per group, in their order. Never waits."""
        if self._stopping:
            raise ServerUnavailable("the server that this copy was meant for is gone")
        jobs = [_Ended() for _ in order.groups]
        self._loads.put((order, fence, jobs))
        return jobs

    def _run(self) -> None:
        while (load := self._loads.get()) is not None:
            order, fence, jobs = load
            results = [bytearray([NOT_FETCHED]) * (order.hit_chunks - group.first_chunk) for group in order.groups]
            try:
                self._load(order, fence, results)
            except Exception:  # the root of one load
                log.exception("A load over the socket failed")
            for job, result in zip(jobs, results, strict=True):
                job.set(bytes(result))

    def _load(self, order: LoadOrder, fence: _Fence, results: Sequence[bytearray]) -> None:
        names = self._names.of(order.cache_salt)
        positions = [
            (index, chunk)
            for index, load in enumerate(order.groups)
            for chunk in range(load.first_chunk, order.hit_chunks)
        ]
        for batch in self._batches(positions, self._half_bytes):
            frames = [Frame(group, chunk, memory) for group, chunk, _, memory in batch]
            fetched = self._mover.fetch(order.lease, frames)
            here = [one for one, came in zip(batch, fetched, strict=True) if came]

            def submit(group: int, slots: array[int], order: LoadOrder = order) -> int:
                load = order.groups[group]
                hashes = order.hashes[load.first_chunk * CHUNK_HASH_BYTES : order.hit_chunks * CHUNK_HASH_BYTES]
                row = slots[load.first_chunk :].tobytes()
                digest = names[group].digest
                return self._copier.submit_load(self._groups[group], row, load.blocks, hashes, digest, fence)

            for group, copied in self._copy(here, order.hit_chunks, submit):
                first = order.groups[group].first_chunk
                for at, chunk, _, _ in here:
                    if at == group:
                        results[group][chunk - first] = copied[chunk - first]
            if not all(fetched):
                return

    # ---- stores ------------------------------------------------------------------------------------------------------
    def submit_store(self, order: StoreOrder, reply: ReserveReply) -> list[_Ended]:
        """A job per group, all ended: returns when the frames have gone, or cannot go."""
        chunks = len(order.hashes) // CHUNK_HASH_BYTES
        slots = memoryview(reply.slots).cast("Q")
        positions = [
            (group, chunk)
            for group in range(len(self._groups))
            for chunk in range(chunks)
            if slots[group * chunks + chunk] != _native.NO_SLOT
        ]
        results = [bytearray(chunks) for _ in self._groups]
        with self._storing:
            if self._stopping:
                raise ServerUnavailable("the server that this copy was meant for is gone")
            self._store(order, reply.reservation, positions, results)
        jobs = []
        for result in results:
            jobs.append(_Ended())
            jobs[-1].set(bytes(result))
        return jobs

    def _store(self, order: StoreOrder, reservation: int, positions: _Positions, results: Sequence[bytearray]) -> None:
        names = self._names.of(order.cache_salt)

        def submit(group: int, slots: array[int]) -> int:
            return self._copier.submit_store(
                self._groups[group], slots.tobytes(), order.blocks[group], order.hashes, names[group].template
            )

        for batch in self._batches(positions, 0):
            copied = dict(self._copy(batch, len(order.hashes) // CHUNK_HASH_BYTES, submit))
            made = [one for one in batch if copied[one[0]][one[1]] == COPIED]
            sent = self._mover.send(reservation, [Frame(group, chunk, memory) for group, chunk, _, memory in made])
            for (group, chunk, _, _), arrived in zip(made, sent, strict=True):
                results[group][chunk] = COPIED if arrived else 0
            if not all(sent):
                return

    # ---- the arena ---------------------------------------------------------------------------------------------------
    def _batches(self, positions: _Positions, start: int) -> Iterator[list[tuple[int, int, int, memoryview]]]:
        """(group, chunk, offset, memory) of as many frames at a time as half of the arena holds."""
        batch: list[tuple[int, int, int, memoryview]] = []
        used_bytes = 0
        for group, chunk in positions:
            size_bytes = self._frame_bytes[group]
            if used_bytes + _slot_bytes(size_bytes) > self._half_bytes:
                yield batch
                batch, used_bytes = [], 0
            offset = start + used_bytes
            batch.append((group, chunk, offset, self._arena[offset : offset + size_bytes]))
            used_bytes += _slot_bytes(size_bytes)
        if batch:
            yield batch

    def _copy(
        self,
        batch: Sequence[tuple[int, int, int, memoryview]],
        chunks: int,
        submit: Callable[[int, array[int]], int],
    ) -> Iterator[tuple[int, bytes]]:
        """Submits one job for each group of the batch and waits for it: (group, the copier's results)."""
        for group in sorted({one[0] for one in batch}):
            slots = array("Q", [_native.NO_SLOT]) * chunks
            for at, chunk, offset, _ in batch:
                if at == group:
                    slots[chunk] = offset
            number = submit(group, slots)
            while (copied := self._copier.wait(number, 1.0)) is None:
                pass
            yield group, copied

    def close(self) -> None:
        """Takes nothing new; what is under way ends within a moment. Idempotent."""
        self._stopping = True
        self._loads.put(None)
        self._thread.join()
        with self._storing:
            self._copier.close()
        if self._pinning is not None:
            self._pinning.close()


def _slot_bytes(frame_bytes: int) -> int:
    return -(-frame_bytes // FRAME_ALIGN_BYTES) * FRAME_ALIGN_BYTES
