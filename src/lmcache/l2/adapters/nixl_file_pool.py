"""A pool whose slots are files, all of them open. What is in its folder survives kill -9 as it is."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import stat
from collections.abc import Sequence
from pathlib import Path

from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.environment import Environment
from lmcache.errors import ResourceError
from lmcache.l2.adapters import nixl_pool_format as layout
from lmcache.l2.adapters.dax_format import ENTRY_BYTES
from lmcache.l2.adapters.folder import FOLDER_MODE
from lmcache.l2.adapters.nixl_agent import Agent
from lmcache.l2.adapters.nixl_config import NixlStoreConfig
from lmcache.l2.adapters.nixl_files import FILE_MODE, ranges_of, read_frames, write_plainly
from lmcache.memory.ownership import try_lock_server

FOLDER = "nixl_pool_v1"
DIRECTORY = "directory"
LOCK_ATTEMPTS = 8
SPARE_DESCRIPTORS = 256  # that the rest of a server needs at least

_SLOT = re.compile(r"slot-([0-9]{8})")


class FilePool:
    objects: Sequence[str] = ()

    def __init__(self, config: NixlStoreConfig, environment: Environment) -> None:
        self._config = config
        self._environment = environment
        self._folder = Path(config.folder, FOLDER)
        self._geometry = layout.PoolGeometry(config.pool_size, config.pool_size)
        self._directory = -1
        self.id = b""
        self.slots = config.pool_size
        self.files: list[int] = []
        self.buffered_fallbacks = 0

    def open(self) -> None:
        try:
            self._open()
        except OSError as error:
            self.close(remove=False)
            raise unusable_folder(self._config, error) from None
        except BaseException:
            self.close(remove=False)
            raise

    def _open(self) -> None:
        refuse_too_few_descriptors(self._config, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._lock()
        for path in self._folder.iterdir():  # of a larger pool
            match = _SLOT.fullmatch(path.name)
            if match is not None and int(match[1]) >= self.slots:
                path.unlink()
        for slot in range(self.slots):
            self.files.append(self._open_slot(self._folder / f"slot-{slot:08}"))

    def _lock(self) -> None:
        """Opens the directory. Another server may remove it at its end while this one begins."""
        for _ in range(LOCK_ATTEMPTS):
            os.makedirs(self._folder, mode=FOLDER_MODE, exist_ok=True)
            try:
                self._directory = self._open_file(self._folder / DIRECTORY, os.O_RDWR)
            except FileNotFoundError:
                continue
            if not try_lock_server(self._directory):
                break
            if os.fstat(self._directory).st_nlink:
                return
            os.close(self._directory)
            self._directory = -1
        raise ResourceError(
            f"{self._config.where}: another server uses the pool in {self._folder}; give each a file_path of its own."
        )

    def _open_slot(self, path: Path) -> int:
        if self._config.use_odirect:
            try:
                return self._open_file(path, os.O_RDWR | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a file system without O_DIRECT
                    raise
                self.buffered_fallbacks += 1
        return self._open_file(path, os.O_RDWR)

    def _open_file(self, path: Path, flags: int) -> int:
        """Makes it where it is missing. What somebody else put there is left alone, and nothing waits for it."""
        try:
            fd = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, FILE_MODE)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise self._foreign(path) from None
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise self._foreign(path)
        os.set_blocking(fd, True)
        return fd

    def _foreign(self, path: Path) -> ResourceError:
        return ResourceError(
            f"{self._config.where}: {path} is no file of a pool; remove it or choose another file_path."
        )

    def read_directory(self, agent: Agent) -> memoryview:
        """Entries beyond the pool are cut off. A file that is no directory of a pool, or a damaged one, starts anew."""
        found = layout.read_superblock(os.pread(self._directory, layout.SUPERBLOCK_BYTES, 0))
        self.id = found[0] if found is not None else self._environment.random_bytes(layout.ID_BYTES)
        size_bytes = self._geometry.page_bytes(0)
        try:
            if found is None:
                os.ftruncate(self._directory, 0)
            os.posix_fallocate(self._directory, 0, size_bytes)
            os.ftruncate(self._directory, size_bytes)
            write_all(self._directory, layout.superblock(self.id, self.slots), 0)
        except OSError as error:
            raise ResourceError(
                f"{self._config.where}: cannot write {self._folder / DIRECTORY}: {error.strerror}; make room there."
            ) from None
        entries = memoryview(bytearray(self.slots * ENTRY_BYTES))
        os.preadv(self._directory, [entries], layout.SUPERBLOCK_BYTES)
        return entries

    def read_header(self, agent: Agent, slot: int) -> bytes:
        with open(self._folder / f"slot-{slot:08}", "rb", buffering=0) as file:
            return file.read(FRAME_HEADER_BYTES)

    def write(self, agent: Agent, slots: Sequence[int], buffers: Sequence[memoryview]) -> list[int]:
        fds = [self.files[slot] for slot in slots]
        errors = []
        for moved, fd, buffer in zip(agent.transfer_files("WRITE", ranges_of(buffers), fds), fds, buffers, strict=True):
            error = 0
            try:
                if not moved:
                    write_plainly(fd, buffer)
                if os.lseek(fd, 0, os.SEEK_END) > buffer.nbytes:  # of a larger object before it
                    os.ftruncate(fd, buffer.nbytes)
            except OSError as fault:
                error = fault.errno or errno.EIO
            errors.append(error)
        return errors

    def read(self, agent: Agent, slots: Sequence[int], targets: Sequence[memoryview]) -> list[int]:
        return read_frames(agent, targets, [self.files[slot] for slot in slots])

    def record(self, agent: Agent, slots: Sequence[int], entries: bytes) -> None:
        begin = 0
        for end in range(1, len(slots) + 1):
            if end == len(slots) or slots[end] != slots[end - 1] + 1:  # the end of slots side by side
                part = entries[begin * ENTRY_BYTES : end * ENTRY_BYTES]
                write_all(self._directory, part, self._geometry.entry_place(slots[begin]))
                begin = end

    def mark_used(self, agent: Agent, slots: Sequence[int], used_ns: int) -> None:
        with contextlib.suppress(OSError):  # the disk may be full or read-only by now: what it has is still read
            for at, slot in enumerate(slots):
                used = (used_ns - 1000 * at).to_bytes(8, "little")
                write_all(self._directory, used, self._geometry.used_place(slot))

    def give_back(self, agent: Agent, slots: Sequence[int]) -> None:
        for slot in slots:
            with contextlib.suppress(OSError):
                os.ftruncate(self.files[slot], 0)

    def flush(self, agent: Agent) -> None:
        return

    def close(self, *, remove: bool) -> None:
        directory, self._directory = self._directory, -1
        fds, self.files = self.files, []
        for fd in fds:
            os.close(fd)
        if directory >= 0:
            if remove:
                self._remove()
            os.close(directory)

    def _remove(self) -> None:
        """The directory after the slots: from then on another server may make its own."""
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                if _SLOT.fullmatch(path.name):
                    path.unlink(missing_ok=True)
            (self._folder / DIRECTORY).unlink(missing_ok=True)
            self._folder.rmdir()


def unusable_folder(config: NixlStoreConfig, error: OSError) -> ResourceError:
    return ResourceError(
        f"{config.where}: cannot use the folder {config.folder}: {error.strerror or error}; "
        "make it writable for this user or choose another file_path."
    )


def refuse_too_few_descriptors(config: NixlStoreConfig, limit: int) -> None:
    if limit != resource.RLIM_INFINITY and config.pool_size + SPARE_DESCRIPTORS > limit:
        raise ResourceError(
            f'{config.where}: a "pool_size" of {config.pool_size} needs as many open files, and this process may have '
            f'{limit}; raise `ulimit -n`, lower it, or use "nixl_store_dynamic".'
        )


def write_all(fd: int, content: bytes, place: int) -> None:
    """OSError where it did not fit."""
    if os.pwrite(fd, content, place) != len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
