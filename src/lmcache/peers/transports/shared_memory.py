"""Frames of a peer on the same host: its L1 is mapped read-only, and copied from under its lease.

A copy is proved by the frame's own checksum and by its header, which is compared again afterwards: what the peer evicts
or overwrites meanwhile is a frame that does not verify, never a hit.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from itertools import compress
from operator import le

from lmcache import _native
from lmcache.core import limits
from lmcache.core.key_batch import pack_keys
from lmcache.core.outcome import LoadOutcome
from lmcache.errors import AdapterError
from lmcache.l2.background import until_done
from lmcache.l2.completions import Completions, ranges, words
from lmcache.memory.header import HEADER_BYTES, Header
from lmcache.peers.identity import Identity
from lmcache.peers.transports.contract import Fetched, Transfer

# A peer names the file: nothing else is opened, whatever it says.
_L1_FILE = re.compile(r"/dev/shm/[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def copy_threads() -> int:
    """How many threads copy out of the memory of all peers."""
    return min(limits.MAX_PEER_COPY_THREADS, len(os.sched_getaffinity(0)))


class MappedFrames:
    """Copies out of what is mapped, on native threads, as futures of the loop that constructs it."""

    def __init__(self) -> None:
        """OSError where the system has no threads or descriptors to give."""
        self._copier = _native.FrameCopier(copy_threads())
        self._completions = Completions(self._copier, bytes)
        self._is_closed = False

    async def copy(self, transfer: Transfer, mapping: mmap.mmap) -> bytes:
        """Fills the buffers from `slots` of the mapping. One byte a frame, 1: it is there, verified. Nothing is touched
        any more when it returns, also when it is cancelled. AdapterError after `close`."""
        if self._is_closed:
            raise AdapterError("the adapter is closed")
        addresses, _ = ranges(transfer.buffers)
        job = self._copier.submit(
            *(addresses, words(transfer.sizes), *pack_keys(transfer.keys), words(transfer.slots)),
            *(_native.buffer_address(mapping), len(mapping)),
        )
        return await until_done(self._completions.wait(job, (transfer.buffers, mapping)))

    async def close(self) -> None:
        """Waits for everything submitted. Idempotent."""
        self._is_closed = True
        await self._completions.close()


class SharedMemoryTransport:
    name = "shared_memory"

    def __init__(self, mapping: mmap.mmap, frames: MappedFrames) -> None:
        """Use `of`."""
        self._mapping = mapping
        self._frames = frames
        self._is_closed = False

    @classmethod
    def of(cls, peer: Identity, frames: MappedFrames) -> SharedMemoryTransport | None:
        """None where the memory of the peer cannot be mapped here: it is on another host, or in another container."""
        if not _L1_FILE.fullmatch(peer.shm_path):
            return None
        try:
            fd = os.open(peer.shm_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size != peer.shm_bytes or peer.shm_bytes <= HEADER_BYTES:
                return None
            header = Header.unpack(os.pread(fd, HEADER_BYTES, 0))
            if header is None or (header.server_epoch, header.size_bytes) != (peer.epoch, peer.shm_bytes):
                return None
            return cls(mmap.mmap(fd, peer.shm_bytes, mmap.MAP_SHARED, mmap.PROT_READ), frames)
        except (OSError, ValueError):
            return None
        finally:
            os.close(fd)

    async def fetch(self, transfer: Transfer) -> Fetched:
        failed = [LoadOutcome.FAILED] * len(transfer.keys)
        if self._is_closed or not transfer.slots or not transfer.lease:
            return Fetched(failed)
        rooms = (buffer.nbytes for buffer in transfer.buffers)
        fitting = list(compress(range(len(transfer.keys)), map(le, transfer.sizes, rooms)))
        if not fitting:
            return Fetched(failed)
        try:
            copied = await self._frames.copy(transfer.pick(fitting, transfer.seconds), self._mapping)
        except AdapterError as error:
            return Fetched(failed, error)
        # What is not there any more is asked for over the network.
        outcomes = list(failed)
        for index in compress(fitting, copied):
            outcomes[index] = LoadOutcome.LOADED
        return Fetched(outcomes)

    def close(self) -> None:
        """The mapping goes with the last reference to it: a copy may be under way."""
        self._is_closed = True
