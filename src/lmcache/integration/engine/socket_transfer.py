"""Transfers with a server whose memory this process cannot map: the same frames, carried over the socket.

Frames are made and taken apart in a staging arena of this process by the same copier that works in shared memory
otherwise, so that what is written, and what is verified before it counts as loaded, is the same in both modes.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import queue
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lmcache import _native
from lmcache.client.socket_frames import Frame, FrameMover
from lmcache.core.key_batch import ChunkHashes, SlotGrid
from lmcache.core.limits import FRAME_ALIGN_BYTES, FRAME_HEADER_BYTES, PAYLOAD_STAGING_BYTES
from lmcache.core.rounding import round_up
from lmcache.errors import StaleServer
from lmcache.integration.engine.connector_metadata import LoadOrder, StoreOrder
from lmcache.integration.engine.frame_names import FrameNames
from lmcache.integration.engine.transfer_backend import COPIED, NOT_FETCHED, WorkerKV
from lmcache.protocol.messages import HelloReply, ReserveReply

if TYPE_CHECKING:
    from lmcache.client.client import Client

log = logging.getLogger("lmcache.engine")

_Fence = _native.CudaFence | None
_Positions = Sequence[tuple[int, int]]  # (group, chunk)


class _SettableJob:
    """A `TransferJob` whose results are set by the thread that does it."""

    def __init__(self, done: threading.Event) -> None:
        self._done = done
        self._result = b""

    def set(self, result: bytes) -> None:
        self._result = result
        self._done.set()

    def wait(self, seconds: float) -> bytes | None:
        return self._result if self._done.is_set() or self._done.wait(seconds) else None


class _StagedFrame(NamedTuple):
    """A frame and its place in the staging arena."""

    group: int
    chunk: int
    offset: int
    memory: memoryview


class SocketTransfer:
    """A `TransferBackend`. Stores run in the caller's thread, loads one by one in a thread of their own."""

    def __init__(self, client: Client, hello: HelloReply, kv: WorkerKV) -> None:
        """LayoutRefused when the server's chunks do not fit this engine's blocks."""
        identity = kv.identity
        self.server_epoch = hello.server_epoch
        self.layouts = kv.layouts(hello.chunk_tokens)
        self._names = FrameNames(identity, kv.layout_names(self.layouts), self.layouts)
        self._frame_bytes = [FRAME_HEADER_BYTES + layout.payload_bytes for layout in self.layouts]
        self._stopping = False
        self._mover = FrameMover(
            client, self.server_epoch, identity.instance_id, identity.worker_id, lambda: self._stopping
        )
        self._half_bytes = max(PAYLOAD_STAGING_BYTES // 2, *(_slot_bytes(size) for size in self._frame_bytes))
        self._arena = memoryview(mmap.mmap(-1, 2 * self._half_bytes))
        address = _native.buffer_address(self._arena)
        self._copier, self._groups = kv.copier(self.layouts, address, len(self._arena))
        self._pinning = kv.gpu.pin_buffer(address, len(self._arena)) if kv.gpu is not None else None
        environment = kv.environment
        self._new_event = environment.event
        self._storing, self._submitting = environment.lock(), environment.lock()
        self._loads: queue.SimpleQueue[tuple[LoadOrder, _Fence, list[_SettableJob]] | None] = environment.queue()
        self._thread = environment.thread(target=self._run, name="lmcache-fetch", daemon=True)
        self._thread.start()

    # ---- loads -------------------------------------------------------------------------------------------------------
    def submit_load(self, order: LoadOrder, fence: _Fence) -> list[_SettableJob]:
        jobs = [_SettableJob(self._new_event()) for _ in order.groups]
        with self._submitting:
            if self._stopping:
                raise StaleServer("the server that this copy was meant for is gone")
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
            frames = [Frame(staged.group, staged.chunk, staged.memory) for staged in batch]
            fetched = self._mover.fetch(order.lease, frames)
            arrived = [staged for staged, came in zip(batch, fetched, strict=True) if came]

            def submit(group: int, slots: array[int], order: LoadOrder = order) -> int:
                load = order.groups[group]
                hashes = ChunkHashes(order.hashes)[load.first_chunk : order.hit_chunks].packed
                row = slots[load.first_chunk :].tobytes()
                digest = names[group].digest
                return self._copier.submit_load(self._groups[group], row, load.blocks, hashes, digest, fence)

            for group, copied in self._copy(arrived, order.hit_chunks, submit):
                first = order.groups[group].first_chunk
                for staged in arrived:
                    if staged.group == group:
                        results[group][staged.chunk - first] = copied[staged.chunk - first]
            if not all(fetched):
                return

    # ---- stores ------------------------------------------------------------------------------------------------------
    def submit_store(self, order: StoreOrder, reply: ReserveReply) -> list[_SettableJob]:
        """Returns when the frames have gone, or cannot go: all jobs have ended."""
        chunks = len(ChunkHashes(order.hashes))
        positions = list(SlotGrid(reply.slots, chunks).places())
        results = [bytearray(chunks) for _ in self._groups]
        with self._storing:
            if self._stopping:
                raise StaleServer("the server that this copy was meant for is gone")
            self._store(order, reply.reservation, positions, results)
        jobs = []
        for result in results:
            jobs.append(_SettableJob(self._new_event()))
            jobs[-1].set(bytes(result))
        return jobs

    def _store(self, order: StoreOrder, reservation: int, positions: _Positions, results: Sequence[bytearray]) -> None:
        names = self._names.of(order.cache_salt)

        def submit(group: int, slots: array[int]) -> int:
            return self._copier.submit_store(
                self._groups[group], slots.tobytes(), order.blocks[group], order.hashes, names[group].template
            )

        for batch in self._batches(positions, 0):
            copied = dict(self._copy(batch, len(ChunkHashes(order.hashes)), submit))
            sealed = [staged for staged in batch if copied[staged.group][staged.chunk] == COPIED]
            frames = [Frame(staged.group, staged.chunk, staged.memory) for staged in sealed]
            sent = self._mover.send(reservation, frames)
            for staged, has_arrived in zip(sealed, sent, strict=True):
                results[staged.group][staged.chunk] = COPIED if has_arrived else 0
            if not all(sent):
                return

    # ---- the arena ---------------------------------------------------------------------------------------------------
    def _batches(self, positions: _Positions, start: int) -> Iterator[list[_StagedFrame]]:
        """Yields as many frames at a time as half of the arena holds, from `start` on."""
        batch: list[_StagedFrame] = []
        used_bytes = 0
        for group, chunk in positions:
            size_bytes = self._frame_bytes[group]
            if used_bytes + _slot_bytes(size_bytes) > self._half_bytes:
                yield batch
                batch, used_bytes = [], 0
            offset = start + used_bytes
            batch.append(_StagedFrame(group, chunk, offset, self._arena[offset : offset + size_bytes]))
            used_bytes += _slot_bytes(size_bytes)
        if batch:
            yield batch

    def _copy(
        self,
        batch: Sequence[_StagedFrame],
        chunks: int,
        submit: Callable[[int, array[int]], int],
    ) -> Iterator[tuple[int, bytes]]:
        """Submits one job for each group of the batch and waits for it: (group, the copier's results)."""
        for group in sorted({staged.group for staged in batch}):
            slots = array("Q", [_native.NO_SLOT]) * chunks
            for staged in batch:
                if staged.group == group:
                    slots[staged.chunk] = staged.offset
            number = submit(group, slots)
            try:
                copied = self._result(number)
            except BaseException:  # an interrupt: the copy goes on, and nobody may reuse what it reads and writes
                with contextlib.suppress(ValueError):  # its end was lost to that
                    self._result(number)
                raise
            yield group, copied

    def _result(self, number: int) -> bytes:
        while (copied := self._copier.wait(number, 1.0)) is None:
            pass
        return copied

    def close(self) -> None:
        """What is under way ends within a moment."""
        with self._submitting:  # what is behind the end of the queue would never be done
            self._stopping = True
            self._loads.put(None)
        self._thread.join()
        with self._storing:
            self._copier.close()
        if self._pinning is not None:
            self._pinning.close()


def _slot_bytes(frame_bytes: int) -> int:
    return round_up(frame_bytes, FRAME_ALIGN_BYTES)
