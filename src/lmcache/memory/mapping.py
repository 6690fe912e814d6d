"""Files mapped into memory at addresses that large pages can have."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref

from lmcache import _native

_PREFAULT_THREADS = 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_FAILED = ctypes.c_void_p(-1).value
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_ADDRESS_TRIES = 100


def map_shared(
    fd: int, size_bytes: int, align_bytes: int, flags: int = mmap.MAP_SHARED, *, is_unmapped: bool = True
) -> memoryview:
    """The first `size_bytes` of a file, writable, from an address that `align_bytes` (a power of two) divides.

    The kernel makes large pages only where address and offset in the file agree. Unmapped with the last view of it,
    unless the caller says that it never is. OSError when it cannot be mapped.
    """
    address = _map_aligned(fd, size_bytes, align_bytes, flags)
    whole = (ctypes.c_char * size_bytes).from_address(address)
    if is_unmapped:
        unmapping = weakref.finalize(whole, _libc.munmap, address, size_bytes)
        unmapping.atexit = False  # type: ignore[misc]  # threads may still use it; the kernel unmaps it anyway
    return memoryview(whole).cast("B")


def _map_aligned(fd: int, size_bytes: int, align_bytes: int, flags: int) -> int:
    """The address. It is proposed to the kernel, never enforced: MAP_FIXED that fails leaves a hole where it was to be,
    which another thread's memory may fill before it is unmapped here."""
    searched_bytes = size_bytes + align_bytes
    for _ in range(_ADDRESS_TRIES):
        start = _mmap(None, searched_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        _libc.munmap(start, searched_bytes)
        wanted = start + -start % align_bytes
        address = _mmap(wanted, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd)
        if address == wanted:
            return address
        _libc.munmap(address, size_bytes)  # another thread has mapped memory there
    raise OSError(errno.EAGAIN, "other threads map memory all the time")


def replace_by_private_pages(address: int, size_bytes: int) -> None:
    """Gives back the memory behind a mapping and keeps its addresses, in one step: whoever still reads there finds
    zeros, whoever writes harms nobody. OSError: there is no such memory; it is as it was, or with some kernels gone."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
    _mmap(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1)
    advise(address, size_bytes, mmap.MADV_DONTDUMP)


def map_like_l1(size_bytes: int) -> memoryview:
    """Touched memory of this process alone, of the same kind as L1: shared, in large pages where there are any."""
    fd = os.memfd_create("lmcache", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size_bytes)
        mapped = map_shared(fd, size_bytes, _native.LARGE_PAGE_BYTES)
    finally:
        os.close(fd)
    _native.prefault(_native.buffer_address(mapped), size_bytes, _PREFAULT_THREADS, large_pages=True)
    return mapped


def advise(address: int, size_bytes: int, advice: int) -> None:
    """madvise(2) with one of mmap.MADV_*. What the kernel does not know or grant is ignored."""
    _libc.madvise(address, size_bytes, advice)


def _mmap(address: int | None, size_bytes: int, protection: int, flags: int, fd: int) -> int:
    mapped = _libc.mmap(address, size_bytes, protection, flags, fd, 0)
    if mapped == _FAILED or mapped is None:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(mapped)
