"""L1 as the server that owns it sees it: made or recovered, grown, and removed at the end."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import weakref
from pathlib import Path

from lmcache import _native
from lmcache.core.limits import MAX_SHM_NAME_BYTES, MIB
from lmcache.core.rounding import round_up
from lmcache.errors import ConfigError, ResourceError
from lmcache.memory import ownership
from lmcache.memory.header import HEADER_BYTES, SERVER_EPOCH_BYTES, Header
from lmcache.memory.hugepages import find_hugepages
from lmcache.memory.l1_file import L1File
from lmcache.memory.mapping import replace_by_private_pages
from lmcache.memory.memory_limit import MemoryProbe, refuse_if_impossible, refuse_if_short
from lmcache.memory.numa import NumaPlacement, online_nodes, place
from lmcache.memory.previous_file import open_previous, refuse_foreign, same_file
from lmcache.memory.restart_compatibility import (
    COMMITTED_WORD_OFFSET,
    LAST_OWNER_WORD_OFFSET,
    PAGE_BYTES,
    PAGE_OFFSET,
    TABLE_OFFSET,
    RestartCompatibility,
)

logger = logging.getLogger("lmcache.memory")

DIRECTORY = Path("/dev/shm")
_STEP_BYTES = 64 * MIB
_CLAIM_ATTEMPTS = 20

_owned: weakref.WeakSet[ServerMemory] = weakref.WeakSet()
_naming = threading.Lock()  # files get and lose their names, and `_owned` its members, one after the other


def refuse_unusable(
    name: str, size_bytes: int, *, hugepages: bool, directory: Path = DIRECTORY, probe: MemoryProbe | None = None
) -> None:
    """ResourceError where no server could make such a memory, whatever runs now. Makes nothing and locks nothing."""
    if hugepages:
        directory = find_hugepages().directory
    refuse_foreign(directory / name)
    if not hugepages:
        refuse_if_impossible(size_bytes, directory, probe or MemoryProbe(), "L1")


class ServerMemory(L1File):
    """The L1 file of this server, which holds its lock until it ends. `committed_bytes` of it, from its start, have
    memory behind them."""

    def __init__(self, path: str, fd: int, size_bytes: int, server_epoch: bytes) -> None:
        """Use `create` or `recover`."""
        # The server's threads that outlive its L1, whatever they do there, must not meet a hole in the address space.
        super().__init__(path, fd, size_bytes, server_epoch, is_unmapped=False)
        self.committed_bytes = 0
        self._is_kept = False  # left in place for the next server
        self._last_owner = 0
        self._probe: MemoryProbe | None = None  # asked for memory before growth
        with _naming:
            _owned.add(self)

    @classmethod
    def create(
        cls,
        name: str,
        size_bytes: int,
        server_epoch: bytes,
        *,
        hugepages: bool = False,
        directory: Path = DIRECTORY,
        probe: MemoryProbe | None = None,
        compatibility: RestartCompatibility | None = None,
    ) -> ServerMemory:
        """Makes `directory`/`name` for this process alone, mode 0600. Only the header has memory behind it yet.

        ResourceError when a live server owns the name, when the file there is not ours to replace, or when the machine
        could not hold all of it. What a dead server left behind is replaced; engines that still map that keep it.
        With `compatibility` the file stays in place at the end, for a server that calls `recover`; the first bytes, up
        to `compatibility.first_offset`, are then not for slots.
        """
        if name in ("", ".", "..") or "/" in name or "\0" in name or len(name.encode()) > MAX_SHM_NAME_BYTES:
            raise ConfigError(f'--shm-name "{name}" is not a plain file name of at most {MAX_SHM_NAME_BYTES} bytes')
        if len(server_epoch) != SERVER_EPOCH_BYTES:
            raise ValueError(f"server_epoch must be {SERVER_EPOCH_BYTES} bytes")
        probe = probe or MemoryProbe()
        if hugepages:
            huge = find_hugepages()
            directory = huge.directory
            size_bytes = round_up(size_bytes, huge.page_bytes)
            huge.refuse_if_short(size_bytes)
        path = directory / name
        try:
            for _ in range(_CLAIM_ATTEMPTS):
                previous = open_previous(path)
                if previous is not None:
                    with contextlib.closing(previous):
                        previous.remove()
                if not hugepages:
                    refuse_if_short(size_bytes, directory, probe, "L1")
                memory = cls._create_file(path, size_bytes, server_epoch, compatibility)
                if memory is not None:
                    memory._probe = None if hugepages else probe
                    return memory
        except OSError as error:
            raise ResourceError(f"cannot make shared memory {path}: {error.strerror}") from error
        raise ResourceError(
            f"cannot make shared memory {path}: other servers keep taking the name; choose another --shm-name"
        )

    @classmethod
    def _create_file(
        cls, path: Path, size_bytes: int, server_epoch: bytes, compatibility: RestartCompatibility | None
    ) -> ServerMemory | None:
        """None if somebody else made the file first. The file gets its name when it is complete and locked, so that no
        other process ever meets it half made, and a crash leaves nothing."""
        fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, 0o600)
            if not ownership.try_lock_server(fd):
                raise ResourceError(f"cannot lock shared memory {path}: this file system has no working locks")
            os.ftruncate(fd, size_bytes)
            os.posix_fallocate(fd, 0, HEADER_BYTES + PAGE_BYTES if compatibility else HEADER_BYTES)
            memory = cls(str(path), fd, size_bytes, server_epoch)
        except BaseException:
            os.close(fd)
            raise
        memory._map[:HEADER_BYTES] = Header(size_bytes, server_epoch, os.getpid()).pack()
        memory.committed_bytes = HEADER_BYTES
        if compatibility is not None:
            memory._is_kept = True
            page = compatibility.pack()
            memory._map[PAGE_OFFSET : PAGE_OFFSET + len(page)] = page
        directory_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with _naming:
                # With a directory given, this is linkat(AT_SYMLINK_FOLLOW), which gives an unnamed file its name.
                os.link(f"/proc/self/fd/{fd}", path.name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
        except FileExistsError:
            memory.close()
            return None
        except BaseException:
            memory.close()
            raise
        finally:
            os.close(directory_fd)
        return memory

    @classmethod
    def recover(
        cls,
        name: str,
        size_bytes: int,
        server_epoch: bytes,
        compatibility: RestartCompatibility,
        *,
        hugepages: bool = False,
        directory: Path = DIRECTORY,
        probe: MemoryProbe | None = None,
    ) -> ServerMemory | None:
        """Goes on with the file that the previous server left under the name, if that had the same `compatibility`.
        Else None, after a line in the log that says why, and `create` makes a new one. ResourceError as of `create`.

        Engines of the previous server may still map the file, and those that live may still write where it let them.
        """
        if hugepages:
            huge = find_hugepages()
            directory = huge.directory
            size_bytes = round_up(size_bytes, huge.page_bytes)
        previous = open_previous(directory / name)
        if previous is None:
            return None
        try:
            status = os.fstat(previous.fd)
            page = os.pread(previous.fd, PAGE_BYTES, PAGE_OFFSET)
            committed_bytes = _word(page, COMMITTED_WORD_OFFSET)
            difference = compatibility.difference(page)
            if not difference and (previous.header is None or previous.header.size_bytes != status.st_size):
                difference = "its header is damaged"
            if not difference and (status.st_size != size_bytes or not _is_present(status, committed_bytes)):
                difference = "its size is not what its description says"
            last_owner = _word(page, LAST_OWNER_WORD_OFFSET)
            if not difference and last_owner > ownership.MAX_OWNERS_EVER:
                difference = "its last owner number is damaged"
            if difference:
                logger.warning("L1 starts empty: what a previous server left in %s is not used: %s", name, difference)
                previous.close()
                return None
            memory = cls(str(previous.path), previous.fd, size_bytes, server_epoch)
        except BaseException:
            previous.close()
            raise
        memory._is_kept = True
        memory.committed_bytes = committed_bytes
        # Whatever the word says, nobody gets the number of a running process.
        memory._last_owner = max(last_owner, ownership.highest_locked_owner(memory._fd))
        memory._probe = None if hugepages else probe or MemoryProbe()
        memory._map[:HEADER_BYTES] = Header(size_bytes, server_epoch, os.getpid()).pack()
        return memory

    @property
    def slot_table_address(self) -> int:
        """The address of the table that the next server finds the slots by; 0 where the file goes with this server."""
        return self.address + TABLE_OFFSET if self._is_kept else 0

    def new_owner(self) -> int:
        """A number that no owner of this file has had, under this server or a previous one."""
        with self._lock:
            self._last_owner += 1
            self._keep_word(LAST_OWNER_WORD_OFFSET, self._last_owner)
            return self._last_owner

    def _keep_word(self, offset: int, value: int) -> None:
        if self._is_kept and self._fd >= 0:
            ctypes.c_uint64.from_address(self.address + offset).value = value  # one store: whole whenever we die

    def grow(self, committed_bytes: int, threads: int = 1) -> None:
        """Puts memory behind the first `committed_bytes` of the file, so that using them can never end in SIGBUS: large
        pages as far as there are any.

        ResourceError when the machine has no more; `committed_bytes` then tells how far it went.
        """
        with self._lock:
            while self.committed_bytes < committed_bytes:
                step_bytes = min(committed_bytes - self.committed_bytes, _STEP_BYTES)
                if self._probe is not None:
                    refuse_if_short(step_bytes, Path(self.path).parent, self._probe, f"growing L1 {self.path}")
                if not self._has_hugepages:
                    # First, as small pages would have to be copied into them: ten times the work.
                    begin = self.committed_bytes // _native.LARGE_PAGE_BYTES * _native.LARGE_PAGE_BYTES
                    end = self.committed_bytes + step_bytes
                    _native.take_large_pages(self.address + begin, end - begin, threads)
                try:
                    os.posix_fallocate(self._fd, self.committed_bytes, step_bytes)
                except OSError as error:
                    raise ResourceError(
                        f"L1 {self.path} cannot grow beyond {self.committed_bytes >> 20} MiB: {error.strerror}"
                    ) from error
                self.committed_bytes += step_bytes
                self._keep_word(COMMITTED_WORD_OFFSET, self.committed_bytes)

    def place(self, placement: NumaPlacement) -> None:
        """On which NUMA nodes pages are that are taken from now on. ResourceError where the kernel refuses."""
        place(self.address, self.size_bytes, placement)
        count = len(online_nodes())
        nodes = f"{count} nodes" if count > 1 else "one node alone, so this changes nothing"
        logger.info("L1 %s is %s; the machine has %s", self.path, placement, nodes)

    def owner_alive(self, owner: int) -> bool:
        """Whether the process that locked this owner's byte is still there."""
        return ownership.is_owner_locked(self._fd, owner)

    def other_writer_lives(self) -> bool:
        """Whether a process that filled slots for a previous server is still there."""
        return ownership.other_writer_lives(self._fd, self.server_epoch)

    def prefault(self, offset: int, size_bytes: int, threads: int, *, large_pages: bool) -> None:
        """Maps and clears pages ahead of use, on several threads. Only for what is committed, and for the server, which
        pays for the memory. `large_pages`: has small ones replaced; `grow` leaves few of them."""
        # From the large page on that the last call left unfinished.
        before_bytes = offset % _native.LARGE_PAGE_BYTES
        begin = self.address + offset - before_bytes
        _native.prefault(begin, size_bytes + before_bytes, threads, large_pages)

    def close(self, *, in_use: bool = False) -> None:
        """Gives up the lock and the mapping and removes the file, unless it is kept for the next server and if the name
        still leads to it. Idempotent.

        The mapping is replaced by private pages, so that a late use of it is harmless; with `in_use` it stays as it is
        until the process ends, for operations that go on and whose bytes matter.
        """
        with self._lock:
            if self._fd < 0:
                return
            with _naming:
                self._remove_file()
                _owned.discard(self)
                fd = self._let_go()
            if not in_use:
                try:
                    replace_by_private_pages(self.address, self.size_bytes)
                except OSError as error:
                    logger.warning("%s stays mapped until the process ends: %s", self.path, error.strerror)
            os.close(fd)

    def _remove_file(self) -> None:
        if not self._is_kept and same_file(self._fd, self.path):
            os.unlink(self.path)


def remove_files(timeout_seconds: float) -> None:
    """For a process that ends at once, whatever its threads are doing: removes the files that `close` would remove and
    lets no other get a name. Waits that long at most for one that is getting its name."""
    if _naming.acquire(timeout=timeout_seconds):  # and never released
        for memory in list(_owned):
            with contextlib.suppress(OSError):
                memory._remove_file()


def _word(page: bytes, file_offset: int) -> int:
    return int.from_bytes(page[file_offset - PAGE_OFFSET : file_offset - PAGE_OFFSET + 8], "little")


def _is_present(status: os.stat_result, committed_bytes: int) -> bool:
    """Whether the file still has the memory that it is said to have."""
    return HEADER_BYTES + PAGE_BYTES <= committed_bytes <= min(status.st_size, status.st_blocks * 512)


def _forget_in_child() -> None:
    """A forked child owns no file, whatever the parent was doing."""
    global _naming
    _naming = threading.Lock()
    _owned.clear()


os.register_at_fork(after_in_child=_forget_in_child)
