"""Maps a DAX device, or a file that stands in for one, into memory. Everything here blocks."""

from __future__ import annotations

import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from lmcache import _native
from lmcache.errors import ConfigError, ResourceError
from lmcache.l2.adapters.dax_format import SUPERBLOCK_BYTES, read_superblock
from lmcache.memory.mapping import map_shared
from lmcache.memory.ownership import try_lock_server

MAP_SHARED_VALIDATE = 0x03
MAP_SYNC = 0x80000
PREFAULT_SLICE_BYTES = 1 << 28


def refuse_foreign(where: str, path: str, start: bytes) -> None:
    """`start`: the first bytes of the device or file."""
    if any(start) and read_superblock(start.ljust(SUPERBLOCK_BYTES, b"\x00")) is None:
        raise ResourceError(
            f"{where}: {path} holds something that is not this cache's; to give it to the cache anyway, zero its first "
            f"{SUPERBLOCK_BYTES} bytes."
        )


def _attribute(info: os.stat_result, name: str) -> Path:
    """The sysfs file with this attribute of a device."""
    return Path(f"/sys/dev/char/{os.major(info.st_rdev)}:{os.minor(info.st_rdev)}/{name}")


@dataclass(frozen=True)
class _Medium:
    """The device or file, open for reading and writing."""

    fd: int
    is_device: bool
    unit_bytes: int  # the size of a mapping must be a multiple of it
    size_bytes: int  # of the mapping


def _look(where: str, path: str, wanted_bytes: int, fd: int, *, lock: bool) -> _Medium:
    """ConfigError, ResourceError or OSError where it cannot be used. Changes nothing."""
    info = os.fstat(fd)
    is_device = stat.S_ISCHR(info.st_mode) and _attribute(info, "subsystem").resolve().name == "dax"
    if not is_device and not stat.S_ISREG(info.st_mode):
        raise _wrong_kind(where, path)
    if lock:
        _lock(where, path, fd)
    if not is_device:
        refuse_foreign(where, path, os.pread(fd, SUPERBLOCK_BYTES, 0))
    unit_bytes = _unit_bytes(info, is_device)
    medium = _Medium(fd, is_device, unit_bytes, wanted_bytes // unit_bytes * unit_bytes)
    _refuse_too_small(where, path, wanted_bytes, medium, info)
    return medium


def _wrong_kind(where: str, path: str) -> ConfigError:
    return ConfigError(f'{where}: "device_path" {path} is neither a DAX device nor a file; name one of these.')


def _open(where: str, path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ResourceError(
            f'{where}: "device_path" {path} does not exist; for a file that stands in for a device create an empty one '
            "first."
        ) from None
    except IsADirectoryError:
        raise _wrong_kind(where, path) from None
    except OSError as error:
        raise ResourceError(
            f"{where}: cannot open {path}: {error.strerror}; see that this user may read and write it."
        ) from None


def _lock(where: str, path: str, fd: int) -> None:
    if not try_lock_server(fd):
        raise ResourceError(f"{where}: {path} is in use by another process; each server needs a device of its own.")


def _unit_bytes(info: os.stat_result, is_device: bool) -> int:
    if is_device:
        align = _attribute(info, "align")
        return int(align.read_text()) if align.exists() else 2 << 20
    return info.st_blksize if info.st_blksize > 1 << 20 else mmap.PAGESIZE  # huge pages


def _refuse_too_small(where: str, path: str, wanted_bytes: int, medium: _Medium, info: os.stat_result) -> None:
    """A page without storage behind it would be a SIGBUS later."""
    if medium.is_device:
        size = _attribute(info, "size")
        device_bytes = int(size.read_text()) if size.exists() else medium.size_bytes
        if device_bytes < medium.size_bytes:
            raise ConfigError(
                f'{where}: "max_dax_size_gb" asks for {wanted_bytes} bytes and {path} has {device_bytes}; lower it.'
            )
        return
    missing_bytes = medium.size_bytes - info.st_blocks * 512
    volume = os.fstatvfs(medium.fd)
    free_bytes = volume.f_bavail * volume.f_frsize
    # An attempt would fill the volume for everybody. A volume of 0 blocks has no limit of its own.
    if volume.f_blocks and missing_bytes > free_bytes:
        raise ResourceError(
            f'{where}: "max_dax_size_gb" asks for {wanted_bytes} bytes, of which {path} lacks {missing_bytes}, and its '
            f"file system has {free_bytes} left; lower it."
        )


def _unmappable(where: str, path: str, wanted_bytes: int, error: OSError) -> ResourceError:
    return ResourceError(
        f"{where}: cannot map {wanted_bytes} bytes of {path}: {error.strerror or error}; see that this user may write "
        "to it and that it has the room."
    )


def check(where: str, path: str, wanted_bytes: int) -> None:
    """Refuses what `MappedDevice` would, without taking the lock, as another server may hold it."""
    fd = _open(where, path)
    try:
        _look(where, path, wanted_bytes, fd, lock=False)
    except OSError as error:
        raise _unmappable(where, path, wanted_bytes, error) from None
    finally:
        os.close(fd)


class MappedDevice:
    """A mapped device, locked until it is closed. ConfigError or ResourceError: a sentence with the remedy."""

    def __init__(self, where: str, path: str, wanted_bytes: int) -> None:
        self._fd = _open(where, path)
        try:
            medium = _look(where, path, wanted_bytes, self._fd, lock=True)
            self.is_device, self.size_bytes = medium.is_device, medium.size_bytes
            if not medium.is_device:
                os.posix_fallocate(self._fd, 0, self.size_bytes)
            self._mapping, self.persistent = self._map(max(medium.unit_bytes, _native.LARGE_PAGE_BYTES))
        except OSError as error:
            os.close(self._fd)
            raise _unmappable(where, path, wanted_bytes, error) from None
        except BaseException:
            os.close(self._fd)
            raise
        self.address = _native.buffer_address(self._mapping)

    def prefault(self, begin: int) -> int:
        """Faults in the pages of the slice at `begin`, so that copies do not; where the next slice begins."""
        size_bytes = min(PREFAULT_SLICE_BYTES, self.size_bytes - begin)
        _native.prefault(self.address + begin, size_bytes, 1, large_pages=True)
        return begin + size_bytes

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            self._mapping = memoryview(b"")
            os.close(self._fd)
            self._fd = -1

    def _map(self, align_bytes: int) -> tuple[memoryview, bool]:
        """(mapping, whether data that was flushed from the processor's caches is on the medium: MAP_SYNC for files)."""
        try:
            return map_shared(self._fd, self.size_bytes, align_bytes, MAP_SHARED_VALIDATE | MAP_SYNC), True
        except OSError:
            return map_shared(self._fd, self.size_bytes, align_bytes), self.is_device
