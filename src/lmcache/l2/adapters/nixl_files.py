"""Whole files moved by NIXL: what `fs_native` has native threads for. Each file is open for its transfer only."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from lmcache import _native
from lmcache.clock import Clock, wall_ns
from lmcache.core.frame import may_be_frame_of
from lmcache.core.key import ObjectKey
from lmcache.core.limits import FRAME_ALIGN_BYTES, FRAME_HEADER_BYTES
from lmcache.l2.adapters import folder
from lmcache.l2.adapters.nixl_agent import Agent, Range
from lmcache.l2.adapters.nixl_lanes import Lanes
from lmcache.l2.completions import IoResults
from lmcache.l2.native_files import NativeFiles

T = TypeVar("T")

FILE_MODE = 0o660  # less the umask, as for all files of objects

_FOLDER_ATTEMPTS = 1024
_NAME_THREADS = 1  # that look files up and remove them
NO_HEADER = bytes(FRAME_HEADER_BYTES)


class OpenFrame(NamedTuple):
    at: int  # in the batch
    fd: int
    target: memoryview  # as many bytes as the file has, or as there is room for


class NixlFiles:
    """Does what `NativeFiles` does, but that payloads are not verified. Construct on the loop that uses it."""

    def __init__(self, base: str, lanes: Lanes, *, direct: bool, clock: Clock) -> None:
        self._base = base
        self._lanes = lanes
        self._names = NativeFiles(_NAME_THREADS, use_odirect=False, block_bytes=FRAME_ALIGN_BYTES)
        self._direct = direct
        self._clock = clock
        self._buffered_fallbacks = 0

    @property
    def buffered_fallbacks(self) -> int:
        """Files that went through the page cache although O_DIRECT was asked for."""
        return self._buffered_fallbacks

    async def stat(self, paths: Sequence[str]) -> IoResults:
        return await self._names.stat(paths)

    async def unlink(self, paths: Sequence[str]) -> IoResults:
        return await self._names.unlink(paths)

    async def remove_empty(self, folders: Sequence[str]) -> IoResults:
        return await self._names.remove_empty(folders)

    async def close(self) -> None:
        await self._lanes.close()
        await self._names.close()

    # ---- writing -----------------------------------------------------------------------------------------------------
    async def write(
        self, paths: Sequence[str], temporary_paths: Sequence[str], buffers: Sequence[memoryview]
    ) -> IoResults:
        """In order, so that what is there after a crash is a prefix: nothing behind one that failed is published."""
        return await self._lanes.run(lambda agent: self._write(agent, paths, temporary_paths, buffers))

    def _write(
        self, agent: Agent, paths: Sequence[str], temporary_paths: Sequence[str], buffers: Sequence[memoryview]
    ) -> IoResults:
        values, errors = array("q", [-1]) * len(paths), array("i", [errno.ECANCELED]) * len(paths)
        now_ns = wall_ns(self._clock)
        fds: list[int] = []
        try:
            try:
                for path in temporary_paths:
                    fds.append(self._create(path))
            except OSError as error:
                errors[len(fds)] = error.errno or errno.EIO
            moved = agent.transfer_files("WRITE", ranges_of(buffers[: len(fds)]), fds) if fds else []
            for at, fd in enumerate(fds):
                try:
                    if not moved[at]:
                        write_plainly(fd, buffers[at])
                    used_ns = now_ns - 1000 * at
                    os.utime(fd, ns=(used_ns, used_ns))
                    self._in_folder(paths[at], os.rename, temporary_paths[at], paths[at])
                except OSError as error:
                    errors[at] = error.errno or errno.EIO
                    break
                values[at], errors[at] = buffers[at].nbytes, 0
        finally:
            for at, fd in enumerate(fds):
                os.close(fd)
                if errors[at]:
                    with contextlib.suppress(OSError):
                        os.unlink(temporary_paths[at])
        return IoResults(memoryview(values), memoryview(errors))

    def _create(self, path: str) -> int:
        return self._in_folder(path, self._open, path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def _in_folder(self, path: str, act: Callable[..., T], *arguments: object) -> T:
        """Makes the folders above a path where they are missing: deletes, also of other servers, remove them while they
        are empty. The base is never made: it may be a mount that is gone."""
        relative = os.path.relpath(os.path.dirname(path), self._base)
        for _ in range(_FOLDER_ATTEMPTS):
            try:
                return act(*arguments)
            except FileNotFoundError:
                # Removed again meanwhile; where a file is in the way, the act says so.
                with contextlib.suppress(FileNotFoundError, FileExistsError):
                    folder.make(self._base, relative)
        return act(*arguments)

    # ---- reading -----------------------------------------------------------------------------------------------------
    async def read_frames(self, base: str, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> IoResults:
        """Reads frames of the folder `base`. EBADMSG where a file cannot be the frame of its key; its payload is not
        looked at."""
        return await self._lanes.run(lambda agent: self._read(agent, base, keys, buffers))

    def _read(self, agent: Agent, base: str, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> IoResults:
        values, errors = array("q", [-1]) * len(keys), array("i", [0]) * len(keys)
        now_ns = wall_ns(self._clock)
        frames: list[OpenFrame] = []
        try:
            for at, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
                path = folder.object_path(base, key.namespace.digest.hex(), key.chunk_hash.hex())
                try:
                    frames.append(self._open_frame(at, path, buffer, now_ns - 1000 * at))
                except OSError as error:
                    errors[at] = error.errno or errno.EIO
            read = read_frames(agent, [frame.target for frame in frames], [frame.fd for frame in frames])
            for frame, fault in zip(frames, read, strict=True):
                if not fault and may_be_frame_of(keys[frame.at], frame.target):
                    values[frame.at] = frame.target.nbytes
                else:
                    errors[frame.at] = fault or errno.EBADMSG
        finally:
            for frame in frames:
                os.close(frame.fd)
        return IoResults(memoryview(values), memoryview(errors))

    def _open_frame(self, at: int, path: str, buffer: memoryview, used_ns: int) -> OpenFrame:
        # O_NONBLOCK: somebody's FIFO under this name must not hang the thread.
        fd = self._open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            size_bytes = min(status.st_size, buffer.nbytes)
            if not stat.S_ISREG(status.st_mode) or size_bytes <= FRAME_HEADER_BYTES or size_bytes % FRAME_ALIGN_BYTES:
                raise OSError(errno.EBADMSG, "no frame")
            os.set_blocking(fd, True)
            with contextlib.suppress(OSError):  # a file of another user, or a disk that is read-only by now
                os.utime(fd, ns=(used_ns, status.st_mtime_ns))
        except OSError:
            os.close(fd)
            raise
        return OpenFrame(at, fd, buffer.cast("B")[:size_bytes])

    def _open(self, path: str, flags: int) -> int:
        flags |= os.O_CLOEXEC
        if self._direct:
            try:
                return os.open(path, flags | os.O_DIRECT, FILE_MODE)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a file system without O_DIRECT
                    raise
                self._buffered_fallbacks += 1
                flags &= ~os.O_EXCL  # some make the file before they refuse it
        return os.open(path, flags, FILE_MODE)


def ranges_of(buffers: Sequence[memoryview]) -> list[Range]:
    return [Range(_native.buffer_address(buffer), buffer.nbytes) for buffer in buffers]


def read_frames(agent: Agent, targets: Sequence[memoryview], fds: Sequence[int]) -> list[int]:
    """Fills each target from the beginning of a file: 0 or an errno each. Headers are cleared first, so that what a
    transfer did not fill is no frame."""
    if not targets:
        return []
    for target in targets:
        target[:FRAME_HEADER_BYTES] = NO_HEADER
    moved = agent.transfer_files("READ", ranges_of(targets), fds)
    return [0 if whole else _read_plainly(fd, target) for whole, fd, target in zip(moved, fds, targets, strict=True)]


# NIXL says that a transfer failed, not why. The system does, for the same bytes again; and where it does not fail for
# those, they are as good.
def write_plainly(fd: int, buffer: memoryview) -> None:
    """All of it, at the beginning of a file, or OSError."""
    content, done = buffer.cast("B"), 0
    while done < content.nbytes:
        written = os.pwrite(fd, content[done:], done)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += written


def _read_plainly(fd: int, target: memoryview) -> int:
    done = 0
    try:
        while done < target.nbytes:
            read = os.preadv(fd, [target[done:]], done)
            if not read:
                return errno.EBADMSG  # it has become shorter
            done += read
    except OSError as error:
        return error.errno or errno.EIO
    return 0
