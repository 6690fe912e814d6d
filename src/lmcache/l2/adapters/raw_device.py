"""Opens a raw device for one server alone, and never over foreign content."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import struct
from dataclasses import dataclass, replace

from lmcache.clock import Clock
from lmcache.errors import ConfigError, ResourceError
from lmcache.l2.adapters.raw_format import (
    MIN_PAGE_BYTES,
    SUPERBLOCK_MAGIC,
    SUPERBLOCKS,
    Superblock,
    UnknownVersion,
    decode_superblock,
)
from lmcache.memory.ownership import try_lock_server

RELEASE_SECONDS = 5.0
_RELEASE_POLL_SECONDS = 0.02

FORMAT_STEP_BYTES = 1 << 20
SEARCHED_BYTES = 1 << 20  # at both ends of a device, for foreign content
_BLKSSZGET = 0x1268

# Name, offset and magic of foreign content, for the message only: anything but zeros is refused.
SIGNATURES = (
    ("a damaged cache", 0, SUPERBLOCK_MAGIC),
    ("a GPT partition table", 512, b"EFI PART"),
    ("a LUKS volume", 0, b"LUKS\xba\xbe"),
    ("an XFS file system", 0, b"XFSB"),
    ("an ext file system", 0x438, b"\x53\xef"),
    ("a Btrfs file system", 0x10040, b"_BHRfS_M"),
    ("an LVM volume", 512, b"LABELONE"),
    ("a RAID member", 4096, b"\xfc\x4e\x2b\xa9"),
    ("a swap area", 4086, b"SWAPSPACE2"),
    ("an ISO 9660 file system", 0x8001, b"CD001"),
    ("an NTFS file system", 3, b"NTFS    "),
    ("an F2FS file system", 1024, b"\x10\x20\xf5\xf2"),
    ("an MBR partition table or a FAT file system", 510, b"\x55\xaa"),
)


@dataclass
class RawDevice:
    """An open, locked device. `size_bytes` is that of the device or file."""

    path: str
    fd: int
    size_bytes: int
    direct: bool

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Offset and size are multiples of the block size. The result is shorter at the end of the device."""
        with mmap.mmap(-1, max(size_bytes, 1)) as memory:
            done = 0
            view = memoryview(memory)
            try:
                while done < size_bytes:
                    moved = os.preadv(self.fd, [view[done:]], offset + done)
                    done += moved
                    if moved == 0 or moved % MIN_PAGE_BYTES:
                        break
                return bytes(view[: min(done, size_bytes)])
            finally:
                view.release()

    def write(self, offset: int, content: bytes) -> None:
        with mmap.mmap(-1, len(content)) as memory:
            memory[:] = content
            view = memoryview(memory)
            try:
                done = 0
                while done < len(content):
                    moved = os.pwritev(self.fd, [view[done:]], offset + done)
                    if moved == 0:
                        raise OSError(errno.EIO, "nothing was written")
                    done += moved
            finally:
                view.release()

    def sync(self) -> None:
        os.fdatasync(self.fd)

    def close(self) -> None:
        """Releases the lock, too. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def superblock(self, page_bytes: int) -> Superblock | None:
        """The valid copy with the highest sequence, if any. UnknownVersion: it is of a later version."""
        copies = [self.read(0, MIN_PAGE_BYTES), self.read(page_bytes, MIN_PAGE_BYTES)]
        found = [copy for copy in map(decode_superblock, copies) if copy is not None]
        return max(found, key=lambda copy: copy.sequence, default=None)

    def content(self) -> str:
        """The kind of foreign content, "" for an empty device."""
        size = self.size_bytes // MIN_PAGE_BYTES * MIN_PAGE_BYTES
        head = self.read(0, min(size, SEARCHED_BYTES))
        for name, offset, magic in SIGNATURES:
            if head[offset : offset + len(magic)] == magic:
                return name
        tail_offset = max(0, size - SEARCHED_BYTES)
        for part in (head, self.read(tail_offset, size - tail_offset)):
            if part.strip(b"\0"):
                return "data of an unknown kind"
        return ""


class _Busy(ResourceError):
    pass


def look_at(path: str, where: str, *, direct: bool, block_align: int) -> RawDevice:
    """Opens for reading, without a lock, as another server may hold it. Otherwise refuses what `open_device` does."""
    return _open_now(path, where, direct=direct, block_align=block_align, only_look=True)


def open_device(path: str, where: str, *, direct: bool, block_align: int, clock: Clock) -> RawDevice:
    """ConfigError or ResourceError: a sentence with the remedy. Waits up to RELEASE_SECONDS for a device in use: the
    I/O of a killed server, and with io_uring its lock, outlive its process for a moment."""
    deadline = clock.monotonic() + RELEASE_SECONDS
    while True:
        try:
            return _open_now(path, where, direct=direct, block_align=block_align)
        except _Busy:
            if clock.monotonic() >= deadline:
                raise
            clock.sleep(_RELEASE_POLL_SECONDS)


def _open_now(path: str, where: str, *, direct: bool, block_align: int, only_look: bool = False) -> RawDevice:
    try:
        kind = os.stat(path).st_mode
    except OSError as error:
        raise ResourceError(
            f"{where}: cannot open {path}: {error.strerror}; give the path of a block device or of a file that has "
            "its final size (fallocate -l SIZE FILE)."
        ) from None
    block = stat.S_ISBLK(kind)
    if not block and not stat.S_ISREG(kind):
        raise ConfigError(f'{where}: "device_path" must be a block device or a file; {path} is neither.')
    # On a block device O_EXCL is the kernel's own lock: mounted, part of a RAID, or held by another server.
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_EXCL if block else 0)
    try:
        if only_look:
            flags = os.O_RDONLY | os.O_CLOEXEC
            if not os.access(path, os.R_OK | os.W_OK, effective_ids=True):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        fd, direct = _open(path, flags, direct)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise _Busy(
                f"{where}: {path} is in use (mounted, part of another volume, or held by another server); "
                "stop the other user or choose another device."
            ) from None
        raise ResourceError(
            f"{where}: cannot open {path} for reading and writing: {error.strerror}; "
            "make it accessible to this user or choose another device."
        ) from None
    try:
        if not only_look:
            _lock(fd, path, where)
        if block and direct:
            (sector_bytes,) = struct.unpack("i", fcntl.ioctl(fd, _BLKSSZGET, bytes(4)))
            if block_align % sector_bytes:
                raise ConfigError(
                    f'{where}: "block_align" must be a multiple of {sector_bytes}, the sector of {path}; '
                    f"got {block_align}."
                )
        return RawDevice(path, fd, os.lseek(fd, 0, os.SEEK_END), direct)
    except BaseException:
        os.close(fd)
        raise


def _lock(fd: int, path: str, where: str) -> None:
    if not try_lock_server(fd):
        raise _Busy(f"{where}: {path} is in use by another server; give every server a device or file of its own.")


def _open(path: str, flags: int, direct: bool) -> tuple[int, bool]:
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT), True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    return os.open(path, flags), False


@dataclass(frozen=True)
class Claim:
    """How a device is to be used."""

    superblock: Superblock
    is_new: bool = False  # must be formatted with it
    forgets: bool = False  # its previous objects are dropped
    note: str = ""  # a warning for the operator where content is given up


def claim(device: RawDevice, wanted: Superblock, where: str, *, reformat: bool) -> Claim:
    """A device is new if it is empty or, with `reformat`, if it holds anything but a cache of this configuration;
    without `reformat` that is a ResourceError. Changes nothing."""
    try:
        found = device.superblock(wanted.geometry.page_bytes)
    except UnknownVersion as error:
        found, obstacle = None, f"a cache of format version {error}, which this release does not know"
    else:
        obstacle = device.content() if found is None else _difference(found, wanted)
    if found is not None and not obstacle:
        if found.meta_version == wanted.meta_version:
            return Claim(found)
        note = f"{where}: starts empty, as meta_version was {found.meta_version}."
        return Claim(replace(found, meta_version=wanted.meta_version), forgets=True, note=note)
    if obstacle and not reformat:
        raise ResourceError(
            f'{where}: {device.path} holds {obstacle}; nothing was changed. Choose another device, or set "reformat" '
            "to true to destroy what is there."
        )
    note = f"{where}: {device.path} holds {obstacle}, and is formatted, as reformat is set." if obstacle else ""
    return Claim(wanted, is_new=True, note=note)


def format_device(device: RawDevice, superblock: Superblock, used_bytes: int) -> None:
    """`used_bytes`: the metadata that this capacity needs, from the start of the device. The superblock is written
    last: after an interruption the device is empty or unchanged. OSError."""
    blank = bytes(FORMAT_STEP_BYTES)
    for start in range(0, used_bytes, FORMAT_STEP_BYTES):
        device.write(start, blank[: min(FORMAT_STEP_BYTES, used_bytes - start)])
    tail = max(used_bytes, device.size_bytes // MIN_PAGE_BYTES * MIN_PAGE_BYTES - SEARCHED_BYTES)
    if device.size_bytes - tail >= MIN_PAGE_BYTES and device.content():
        device.write(tail, blank[: (device.size_bytes - tail) // MIN_PAGE_BYTES * MIN_PAGE_BYTES])
    device.sync()
    write_superblock(device, superblock)


def write_superblock(device: RawDevice, superblock: Superblock) -> None:
    """Writes and flushes one copy after the other, so that one is always valid."""
    encoded = superblock.encode()
    for copy in reversed(range(SUPERBLOCKS)):
        device.write(copy * len(encoded), encoded)
        device.sync()


def _difference(found: Superblock, wanted: Superblock) -> str:
    differences = [
        f"{name} {theirs!r}"
        for name, theirs, ours in (
            ("slot_bytes", found.geometry.slot_bytes, wanted.geometry.slot_bytes),
            ("meta_total_bytes", found.geometry.meta_total_bytes, wanted.geometry.meta_total_bytes),
            ("block_align", found.geometry.page_bytes, wanted.geometry.page_bytes),
            ("meta_magic", found.meta_magic.decode("ascii", "replace"), wanted.meta_magic.decode("ascii")),
        )
        if theirs != ours
    ]
    return f"a cache with {' and '.join(differences)}" if differences else ""
