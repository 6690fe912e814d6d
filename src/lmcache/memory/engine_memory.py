"""L1 as an engine maps it."""

from __future__ import annotations

import logging
import os
import threading

from lmcache import _native
from lmcache.core.limits import MIB
from lmcache.errors import ResourceError, ServerUnavailable
from lmcache.memory import ownership
from lmcache.memory.header import HEADER_BYTES, Header
from lmcache.memory.l1_file import L1File

logger = logging.getLogger("lmcache.memory")

_STEP_BYTES = 64 * MIB
_MAP_AHEAD_SECONDS = 0.5  # between looks at what the server has added


class EngineMemory(L1File):
    """The L1 file of a running server. The process shows that it runs by the lock byte of its owner."""

    def __init__(self, path: str, fd: int, size_bytes: int, server_epoch: bytes) -> None:
        """Use `attach`."""
        super().__init__(path, fd, size_bytes, server_epoch, is_unmapped=True)
        self._mapped_bytes = 0
        self._closed = threading.Event()

    @classmethod
    def attach(cls, path: str, size_bytes: int, server_epoch: bytes) -> EngineMemory:
        """Maps the memory that a server announced in HELLO; ServerUnavailable if it is not there (any more)."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise ServerUnavailable(f"cannot open the server's shared memory {path}: {error.strerror}") from error
        try:
            owner, own = os.fstat(fd).st_uid, os.geteuid()
            if owner not in (own, 0) and own != 0:
                raise ServerUnavailable(f"{path} belongs to user {owner}, not to this engine's user {own}")
            header = Header.unpack(os.pread(fd, HEADER_BYTES, 0))
            if header is None:
                raise ServerUnavailable(f"{path} is not shared memory of this version of lmcache")
            actual_bytes = os.fstat(fd).st_size
            if header.server_epoch != server_epoch or (header.size_bytes, actual_bytes) != (size_bytes, size_bytes):
                raise ServerUnavailable(f"{path} belongs to another server epoch; connect again")
            return cls(path, fd, size_bytes, server_epoch)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError):
                raise ServerUnavailable(f"cannot map the server's shared memory {path}: {error.strerror}") from error
            raise

    def lock_owner(self, owner: int) -> None:
        """Shows the server that `owner` runs, until `unlock_owner`, `close` or the death of this process."""
        if not ownership.try_lock_owner(self._fd, owner):
            raise ResourceError(f"another process lives under owner {owner} of {self.path}; register again")

    def unlock_owner(self, owner: int) -> None:
        ownership.unlock_owner(self._fd, owner)

    def present_bytes(self) -> int:
        """How much memory the server has filled so far, from the start without a gap. 0 once closed."""
        with self._lock:
            if self._fd < 0:
                return 0
            hole_bytes = os.lseek(self._fd, 0, os.SEEK_HOLE)  # huge pages: always the end, so blocks are counted too
            return min(hole_bytes, self.size_bytes, os.fstat(self._fd).st_blocks * 512)

    def prefault_present(self, threads: int) -> int:
        """Maps what the server has filled since the last call, from the start without a gap; returns the bytes mapped.

        An engine that does this in the background spares its first copies the page faults. Never makes memory, and may
        run while another thread closes."""
        if self._has_hugepages:  # few faults, nothing to spare
            return 0
        mapped_bytes = 0
        while True:
            with self._lock:
                if self._fd < 0 or self._mapped_bytes == self.size_bytes:
                    return mapped_bytes
                present_bytes = os.lseek(self._fd, self._mapped_bytes, os.SEEK_HOLE)
                step_bytes = min(present_bytes - self._mapped_bytes, _STEP_BYTES)
                if step_bytes == 0:
                    return mapped_bytes
                _native.prefault(self.address + self._mapped_bytes, step_bytes, threads)
                self._mapped_bytes += step_bytes
                mapped_bytes += step_bytes

    def map_ahead(self) -> None:
        """Does `prefault_present` in a thread of its own, until everything is mapped or `close`."""
        threading.Thread(target=self._map_ahead, name="l1-mapper", daemon=True).start()

    def _map_ahead(self) -> None:
        try:
            while True:
                self.prefault_present(threads=1)
                if self._has_hugepages or self._mapped_bytes == self.size_bytes:
                    return
                if self._closed.wait(_MAP_AHEAD_SECONDS):
                    return
        except Exception:
            # Root of a thread: without it the first copies take the page faults.
            logger.exception("mapping %s ahead of use ended", self.path)

    def close(self) -> None:
        """Gives up locks and mapping, which goes with the last `view`: nothing native may use `address` any more.
        Idempotent."""
        with self._lock:
            if self._fd >= 0:
                self._closed.set()
                os.close(self._let_go())
