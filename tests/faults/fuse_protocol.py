"""The part of the kernel's FUSE protocol that a disk for tests needs, spoken directly: it takes root and /dev/fuse and
nothing that would have to be installed. Numbers and layouts are those of <linux/fuse.h>, protocol 7.31."""

from __future__ import annotations

import ctypes
import os
import stat
import struct

IN_HEADER = struct.Struct("<IIQQIIII")  # length, operation, number of the request, node, uid, gid, pid, -
OUT_HEADER = struct.Struct("<IiQ")  # length, -errno, number of the request
INIT_IN = struct.Struct("<IIII")  # major, minor, read-ahead, flags
INIT_OUT = struct.Struct("<IIIIHHIIHHI28x")
ENTRY = struct.Struct("<QQQQII")  # node, generation, four lifetimes of what is cached: none
ATTR_HEAD = struct.Struct("<QII")
ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
SETATTR_IN = struct.Struct("<IIQQQQQQIIIIIIII")
IO_IN = struct.Struct("<QQIIQII")  # of reads and writes: handle, offset, size, ...
STATFS = struct.Struct("<QQQQQIIII24x")
OPEN_OUT = struct.Struct("<QII")
INVALIDATION = struct.Struct("<Qqq")  # node, offset, length; 0 is all
DIRENT = struct.Struct("<QQII")

VERSION = (7, 31)
MAX_WRITE_BYTES = 1 << 20
BUFFER_BYTES = MAX_WRITE_BYTES + 65536
# Asynchronous reads, writes of more than a page, asynchronous O_DIRECT, requests of more than 32 pages.
FLAGS = 1 << 0 | 1 << 5 | 1 << 15 | 1 << 22

SET_MODE, SET_UID, SET_GID, SET_SIZE, SET_ATIME, SET_MTIME, SET_ATIME_NOW, SET_MTIME_NOW = 1, 2, 4, 8, 16, 32, 128, 256

OPERATIONS = {
    1: "lookup",
    2: "forget",
    3: "getattr",
    4: "setattr",
    9: "mkdir",
    10: "unlink",
    11: "rmdir",
    12: "rename",
    14: "open",
    15: "read",
    16: "write",
    17: "statfs",
    18: "release",
    20: "fsync",
    25: "flush",
    26: "init",
    27: "opendir",
    28: "readdir",
    29: "releasedir",
    35: "create",
    36: "interrupt",
    38: "destroy",
    42: "batch_forget",
    43: "fallocate",
    45: "rename2",
}
INVALIDATE = 2  # in place of an error code: the kernel is to drop what it has of a node
UNANSWERED = ("forget", "batch_forget", "interrupt")


def mount(folder: str) -> int:
    """The connection to the kernel. OSError."""
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"faulty", folder.encode(), b"fuse.faulty", 0, options.encode()) != 0:
        error = ctypes.get_errno()
        os.close(fd)
        raise OSError(error, os.strerror(error))
    return fd


def attr(info: os.stat_result, node: int) -> bytes:
    nanoseconds = [divmod(time, 10**9) for time in (info.st_atime_ns, info.st_mtime_ns, info.st_ctime_ns)]
    return ATTR.pack(
        *(node, info.st_size, info.st_blocks),
        *(seconds for seconds, _ in nanoseconds),
        *(rest for _, rest in nanoseconds),
        *(info.st_mode, info.st_nlink, info.st_uid, info.st_gid, info.st_rdev, info.st_blksize, 0),
    )


def dirent(node: int, offset: int, name: bytes, mode: int) -> bytes:
    head = DIRENT.pack(node, offset, len(name), stat.S_IFMT(mode) >> 12)
    return (head + name).ljust(-(-(DIRENT.size + len(name)) // 8) * 8, b"\0")
