"""Frames of a peer on the same host: its L1 is mapped read-only, and copied from under its lease.

A copy is proved by the frame's own checksum and by its header, which is compared again afterwards: what the peer evicts
or overwrites meanwhile is a frame that does not verify, never a hit.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from functools import partial

from lmcache import _native
from lmcache.core.key_batch import pack_keys
from lmcache.core.outcome import LoadOutcome
from lmcache.errors import AdapterError
from lmcache.l2.call_threads import CallThreads
from lmcache.l2.completions import ranges
from lmcache.memory.header import HEADER_BYTES, Header
from lmcache.peers.identity import Identity
from lmcache.peers.transports.contract import Fetched, Transfer, words

# A peer names the file: nothing else is opened, whatever it says.
_L1_FILE = re.compile(r"/dev/shm/[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class SharedMemoryTransport:
    name = "shared_memory"

    def __init__(self, mapping: mmap.mmap, threads: CallThreads) -> None:
        """Use `of`."""
        self._mapping = mapping
        self._address = _native.buffer_address(mapping)
        self._threads = threads
        self._is_closed = False

    @classmethod
    def of(cls, peer: Identity, threads: CallThreads) -> SharedMemoryTransport | None:
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
            return cls(mmap.mmap(fd, peer.shm_bytes, mmap.MAP_SHARED, mmap.PROT_READ), threads)
        except (OSError, ValueError):
            return None
        finally:
            os.close(fd)

    async def fetch(self, transfer: Transfer) -> Fetched:
        failed = [LoadOutcome.FAILED] * len(transfer.keys)
        if self._is_closed or not transfer.slots or not transfer.lease:
            return Fetched(failed)
        fitting = [
            index
            for index, (size, buffer) in enumerate(zip(transfer.sizes, transfer.buffers, strict=True))
            if size <= buffer.nbytes
        ]
        if not fitting:
            return Fetched(failed)
        addresses, _ = ranges([transfer.buffers[index] for index in fitting])
        copy = partial(
            _native.copy_frames,
            addresses,
            words([transfer.sizes[index] for index in fitting]),
            *pack_keys(transfer.keys[index] for index in fitting),
            words([transfer.slots[index] for index in fitting]),
            self._address,
            len(self._mapping),
        )
        try:
            faults = await self._threads.run(copy)
        except AdapterError as error:
            return Fetched(failed, error)
        # What is not there any more is asked for over the network.
        outcomes = list(failed)
        for index, fault in zip(fitting, faults, strict=True):
            if not fault:
                outcomes[index] = LoadOutcome.LOADED
        return Fetched(outcomes)

    def close(self) -> None:
        """The mapping goes with the last reference to it: a copy may be under way."""
        self._is_closed = True
