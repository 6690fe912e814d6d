"""A folder as a file system that fails on command. Run as a program: FOLDER MOUNTPOINT. One JSON object a line
on stdin says which operations fail and how (`Fault`); each is answered with how many operations met a fault since the
last one, and how many stand still. Before it takes effect nothing is left in the page cache."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from faults import fuse_protocol as fuse

THREADS = 24  # how many operations may stand still and others still go on
BLOCK_BYTES = 4096


@dataclass
class Fault:
    """What happens to one kind of operation. `error`: it fails. `stall`: it stands still until the next command, then
    does what it should. Of reads and writes: `short`: half of it is done and said. `torn`: half is done, all is said (a
    read has zeros there). `shift`: it goes that many bytes further on. `flip`: a bit is turned over on the way. `skip`:
    the first so many operations go well."""

    error: str = ""
    stall: bool = False
    short: bool = False
    torn: bool = False
    shift: int = 0
    flip: bool = False
    skip: int = 0


class Disk:
    def __init__(self, folder: str, mountpoint: str) -> None:
        self._paths = {1: folder}
        self._nodes = {folder: 1}
        self._last_node = 1
        self._handles: dict[int, int] = {}
        self._lock = threading.Condition()
        self._faults: dict[str, Fault] = {}
        self._met = self._stalled = 0
        self._fd = fuse.mount(mountpoint)

    def tell(self, faults: dict[str, Fault]) -> tuple[int, int]:
        """How many operations met a fault since the last time, and how many of them stand still."""
        with self._lock:
            met, self._met = self._met, 0
            self._faults = faults
            self._lock.notify_all()
            return met, self._stalled

    def drop_pages(self) -> None:
        """The kernel writes what it has in its cache and forgets it, what is mapped into memory too. Not while a page
        waits for an operation that stands still: it would wait with it."""
        if self._stalled:
            return
        for node, path in list(self._paths.items()):
            if os.path.isfile(path):
                message = fuse.INVALIDATION.pack(node, 0, 0)
                head = fuse.OUT_HEADER.pack(fuse.OUT_HEADER.size + len(message), fuse.INVALIDATE, 0)
                try:
                    os.write(self._fd, head + message)
                except FileNotFoundError:
                    pass  # nothing of it is in the cache

    def serve(self) -> None:
        """Until the file system is unmounted."""
        while True:
            try:
                request = os.read(self._fd, fuse.BUFFER_BYTES)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                    continue
                return
            _, number, unique, node, *_ = fuse.IN_HEADER.unpack_from(request)
            operation = fuse.OPERATIONS.get(number, "")
            if operation in fuse.UNANSWERED:
                continue
            try:
                answer, code = self._answer(operation, node, request[fuse.IN_HEADER.size :]), 0
            except OSError as error:
                answer, code = b"", -(error.errno or errno.EIO)
            try:
                os.write(self._fd, fuse.OUT_HEADER.pack(fuse.OUT_HEADER.size + len(answer), code, unique) + answer)
            except OSError:
                pass  # who asked has gone

    def _answer(self, operation: str, node: int, body: bytes) -> bytes:
        if not operation:
            raise OSError(errno.ENOSYS, "")
        fault = self._fault(operation)
        if fault.error:
            raise OSError(getattr(errno, fault.error), "")
        if operation in ("read", "write"):
            return bytes(getattr(self, operation)(body, fault))
        return bytes(getattr(self, operation)(node, body))

    def _fault(self, operation: str) -> Fault:
        with self._lock:
            fault = self._faults.get(operation)
            if fault is None:
                return Fault()
            if fault.skip:
                fault.skip -= 1
                return Fault()
            self._met += 1
            if not fault.stall:
                return fault
            self._stalled += 1
            while self._faults.get(operation) is fault:
                self._lock.wait()
            self._stalled -= 1
            return Fault()

    # ---- names -------------------------------------------------------------------------------------------------------
    def _child(self, node: int, name: bytes) -> str:
        return os.path.join(self._paths[node], os.fsdecode(name.rstrip(b"\0")))

    def _node(self, path: str) -> int:
        with self._lock:
            if path not in self._nodes:
                self._last_node += 1
                self._nodes[path] = self._last_node
                self._paths[self._last_node] = path
            return self._nodes[path]

    def _entry(self, path: str) -> bytes:
        info = os.lstat(path)
        node = self._node(path)
        return fuse.ENTRY.pack(node, 0, 0, 0, 0, 0) + fuse.attr(info, node)

    def _attributes(self, node: int) -> bytes:
        return fuse.ATTR_HEAD.pack(0, 0, 0) + fuse.attr(os.lstat(self._paths[node]), node)

    def _forget_name(self, path: str) -> None:
        with self._lock:
            self._nodes.pop(path, None)

    # ---- operations --------------------------------------------------------------------------------------------------
    def init(self, node: int, body: bytes) -> bytes:
        major, minor, read_ahead, flags = fuse.INIT_IN.unpack_from(body)
        assert major == fuse.VERSION[0] and minor >= fuse.VERSION[1], (major, minor)
        pages = fuse.MAX_WRITE_BYTES // BLOCK_BYTES
        return fuse.INIT_OUT.pack(
            *fuse.VERSION, read_ahead, flags & fuse.FLAGS, 64, 48, fuse.MAX_WRITE_BYTES, 1, pages, 0, 0
        )

    def lookup(self, node: int, body: bytes) -> bytes:
        return self._entry(self._child(node, body))

    def getattr(self, node: int, body: bytes) -> bytes:
        return self._attributes(node)

    def setattr(self, node: int, body: bytes) -> bytes:
        valid, _, _, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, *_ = fuse.SETATTR_IN.unpack_from(body)
        path = self._paths[node]
        if valid & fuse.SET_MODE:
            os.chmod(path, mode & 0o7777)
        if valid & fuse.SET_SIZE:
            os.truncate(path, size)
        if valid & (fuse.SET_ATIME | fuse.SET_MTIME):
            info, now = os.lstat(path), time.time_ns()
            times = []
            for given, at_once, wanted, known in (
                (fuse.SET_ATIME, fuse.SET_ATIME_NOW, atime * 10**9 + atime_ns, info.st_atime_ns),
                (fuse.SET_MTIME, fuse.SET_MTIME_NOW, mtime * 10**9 + mtime_ns, info.st_mtime_ns),
            ):
                times.append(now if valid & at_once else wanted if valid & given else known)
            os.utime(path, ns=(times[0], times[1]), follow_symlinks=False)
        return self._attributes(node)

    def mkdir(self, node: int, body: bytes) -> bytes:
        path = self._child(node, body[8:])
        os.mkdir(path, int.from_bytes(body[:4], "little") & 0o7777)
        return self._entry(path)

    def unlink(self, node: int, body: bytes) -> bytes:
        path = self._child(node, body)
        os.unlink(path)
        self._forget_name(path)
        return b""

    def rmdir(self, node: int, body: bytes) -> bytes:
        path = self._child(node, body)
        os.rmdir(path)
        self._forget_name(path)
        return b""

    def rename(self, node: int, body: bytes, head_bytes: int = 8) -> bytes:
        old, new, _ = body[head_bytes:].split(b"\0", 2)
        source, target = self._child(node, old), self._child(int.from_bytes(body[:8], "little"), new)
        os.rename(source, target)
        with self._lock:
            for path in [p for p in self._nodes if p == source or p.startswith(source + "/")]:
                moved = self._nodes.pop(path)
                self._paths[moved] = target + path[len(source) :]
                self._nodes[self._paths[moved]] = moved
        return b""

    def rename2(self, node: int, body: bytes) -> bytes:
        if body[8:12] != bytes(4):
            raise OSError(errno.EINVAL, "")
        return self.rename(node, body, 16)

    def open(self, node: int, body: bytes) -> bytes:
        flags = int.from_bytes(body[:4], "little") & ~(os.O_DIRECT | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        return self._opened(os.open(self._paths[node], flags | os.O_CLOEXEC))

    def create(self, node: int, body: bytes) -> bytes:
        flags, mode, *_ = (int.from_bytes(body[at : at + 4], "little") for at in (0, 4))
        path = self._child(node, body[16:])
        handle = self._opened(os.open(path, (flags & ~os.O_DIRECT) | os.O_CREAT | os.O_CLOEXEC, mode & 0o7777))
        return self._entry(path) + handle

    @staticmethod
    def _opened(fd: int) -> bytes:
        return fuse.OPEN_OUT.pack(fd, 0, 0)

    def read(self, body: bytes, fault: Fault) -> bytes:
        fd, offset, size, *_ = fuse.IO_IN.unpack_from(body)
        content = bytearray(os.pread(fd, size, offset + fault.shift))
        half = _half(len(content))
        if fault.short:
            del content[half:]
        elif fault.torn:
            content[half:] = bytes(len(content) - half)
        elif fault.flip and content:
            content[len(content) // 2] ^= 1
        return bytes(content)

    def write(self, body: bytes, fault: Fault) -> bytes:
        fd, offset, size, *_ = fuse.IO_IN.unpack_from(body)
        content = bytearray(body[fuse.IO_IN.size : fuse.IO_IN.size + size])
        half = _half(size)
        if fault.short or fault.torn:
            del content[half:]
        if fault.flip:
            content[len(content) // 2] ^= 1
        os.pwrite(fd, content, offset + fault.shift)
        return (half if fault.short else size).to_bytes(8, "little")

    def fallocate(self, node: int, body: bytes) -> bytes:
        fd, offset, length = (int.from_bytes(body[at : at + 8], "little") for at in (0, 8, 16))
        if body[24:28] != bytes(4):
            raise OSError(errno.EOPNOTSUPP, "")
        os.posix_fallocate(fd, offset, length)
        return b""

    def fsync(self, node: int, body: bytes) -> bytes:
        return b""

    def flush(self, node: int, body: bytes) -> bytes:
        return b""

    def release(self, node: int, body: bytes) -> bytes:
        os.close(int.from_bytes(body[:8], "little"))
        return b""

    def opendir(self, node: int, body: bytes) -> bytes:
        return fuse.OPEN_OUT.pack(0, 0, 0)

    def releasedir(self, node: int, body: bytes) -> bytes:
        return b""

    def readdir(self, node: int, body: bytes) -> bytes:
        _, offset, size, *_ = fuse.IO_IN.unpack_from(body)
        listed = b""
        with os.scandir(self._paths[node]) as entries:
            for index, entry in enumerate(sorted(entries, key=lambda each: each.name)):
                dirent = fuse.dirent(
                    entry.inode(), index + 1, os.fsencode(entry.name), entry.stat(follow_symlinks=False).st_mode
                )
                if index < offset:
                    continue
                if len(listed) + len(dirent) > size:
                    break
                listed += dirent
        return listed

    def statfs(self, node: int, body: bytes) -> bytes:
        s = os.statvfs(self._paths[node])
        return fuse.STATFS.pack(
            s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree, s.f_bsize, s.f_namemax, s.f_frsize, 0
        )

    def destroy(self, node: int, body: bytes) -> bytes:
        return b""


def _half(size: int) -> int:
    """In whole blocks, as O_DIRECT has it; a single block is moved whole or not at all."""
    return size if size <= BLOCK_BYTES else size // 2 // BLOCK_BYTES * BLOCK_BYTES


def main() -> None:
    os.umask(0)  # the kernel has taken it off already
    disk = Disk(sys.argv[1], sys.argv[2])
    for _ in range(THREADS):
        threading.Thread(target=disk.serve, daemon=True).start()
    print("ready", flush=True)
    for line in sys.stdin:
        faults: dict[str, dict[str, Any]] = json.loads(line)
        disk.drop_pages()
        print(*disk.tell({name: Fault(**fault) for name, fault in faults.items()}), flush=True)
    os._exit(0)  # threads may stand still in operations of their own


if __name__ == "__main__":
    main()
