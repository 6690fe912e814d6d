"""An L1 file as every process maps it; `server_memory` and `engine_memory` add what each side may do with it."""

from __future__ import annotations

import mmap
import os
import threading
import weakref

from lmcache import _native
from lmcache.memory.mapping import advise, map_shared

_opened: weakref.WeakSet[L1File] = weakref.WeakSet()
_opening = threading.Lock()  # guards `_opened`


class L1File:
    """A mapped L1 file. Page 0 is its header, so the first slot lies at offset 4096 or later.

    `address` is where byte 0 is mapped in this process, `size_bytes` the size of the whole file. Methods are
    thread-safe.
    """

    def __init__(self, path: str, fd: int, size_bytes: int, server_epoch: bytes, *, is_unmapped: bool) -> None:
        """Maps the file that `fd` has open and takes `fd` over. `is_unmapped`: the mapping ends with its last view,
        else with the process."""
        self.path = path
        self.size_bytes = size_bytes
        self.server_epoch = server_epoch
        self._lock = threading.Lock()  # of growth, mapping ahead and closing
        self._fd = fd  # carries the locks; -1 once closed
        self._has_hugepages = os.fstatvfs(fd).f_bsize > mmap.PAGESIZE
        # The mapping keeps a descriptor of its own, from a second open file without locks, so that a forked child that
        # inherits it holds no lock.
        mapping_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            align_bytes = max(_native.LARGE_PAGE_BYTES, os.fstatvfs(fd).f_bsize)
            self._map = map_shared(mapping_fd, size_bytes, align_bytes, is_unmapped=is_unmapped)
        finally:
            os.close(mapping_fd)
        self.address = _native.buffer_address(self._map)
        for advice in (mmap.MADV_DONTDUMP, mmap.MADV_HUGEPAGE):  # both only save resources
            advise(self.address, size_bytes, advice)
        with _opening:
            _opened.add(self)

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """Writable bytes of the file in place. They stay valid after `close`."""
        if offset < 0 or size_bytes < 0 or offset + size_bytes > self.size_bytes:
            raise ValueError(
                f"[{offset}, {offset + size_bytes}) is not inside the {self.size_bytes} bytes of {self.path}"
            )
        return self._map[offset : offset + size_bytes]

    def _let_go(self) -> int:
        """Drops the mapping's own view and gives the descriptor with the locks to the caller, who closes it."""
        with _opening:
            _opened.discard(self)
        fd, self._fd = self._fd, -1
        self._map = memoryview(b"")
        return fd

    def _forget_locks(self) -> None:
        """In a forked child: the locks belong to the parent, and must end with it."""
        self._lock = threading.Lock()  # a thread that was not forked may have held it
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _forget_locks_in_child() -> None:
    global _opening
    _opening = threading.Lock()  # as above
    for file in list(_opened):
        file._forget_locks()


os.register_at_fork(after_in_child=_forget_locks_in_child)
