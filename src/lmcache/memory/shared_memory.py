"""The file in shared memory that is L1: made and owned by one server, mapped by its engines."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
import weakref
from pathlib import Path

from lmcache import _native
from lmcache.core.limits import MAX_SHM_NAME_BYTES, MIB
from lmcache.errors import ConfigError, ResourceError, ServerUnavailable
from lmcache.memory import ownership
from lmcache.memory.former import open_former, refuse_foreign, same_file
from lmcache.memory.header import BOOT_TOKEN_BYTES, HEADER_BYTES, Header
from lmcache.memory.hugepages import find_hugepages
from lmcache.memory.inheritance import (
    COMMITTED_WORD_OFFSET,
    LAST_OWNER_WORD_OFFSET,
    PAGE_BYTES,
    PAGE_OFFSET,
    TABLE_OFFSET,
    Inheritance,
)
from lmcache.memory.mapping import advise, map_shared, replace_by_private_pages
from lmcache.memory.room import Machine, refuse_if_impossible, refuse_if_short

logger = logging.getLogger("lmcache.memory")

DIRECTORY = Path("/dev/shm")
_STEP_BYTES = 64 * MIB
_CLAIM_ATTEMPTS = 20
_MAP_AHEAD_SECONDS = 0.5  # between looks at what the server has added

_opened: weakref.WeakSet[SharedMemory] = weakref.WeakSet()
_naming = threading.Lock()  # files get and lose their names, and `_opened` its members, one after the other


def refuse_unusable(
    name: str, size_bytes: int, *, hugepages: bool, directory: Path = DIRECTORY, machine: Machine | None = None
) -> None:
    """ResourceError where no server could make such a memory, whatever runs now. Makes nothing and locks nothing."""
    if hugepages:
        directory = find_hugepages().directory
    refuse_foreign(directory / name)
    if not hugepages:
        refuse_if_impossible(size_bytes, directory, machine or Machine(), "L1")


class SharedMemory:
    """A mapped L1 file. Page 0 is its header, so the first slot lies at offset 4096 or later.

    `address` is where byte 0 is mapped here, `size_bytes` the size of the whole file, `committed_bytes` how much of it,
    from its start, is known to have memory behind it. Methods are thread-safe, `close` excepted.
    """

    def __init__(self, path: str, fd: int, size_bytes: int, boot_token: bytes, *, is_creator: bool) -> None:
        """Maps the file that `fd` has open and takes `fd` over. Use `create` or `attach`."""
        self.path = path
        self.size_bytes = size_bytes
        self.boot_token = boot_token
        self.committed_bytes = 0
        self._is_creator = is_creator
        self._is_kept = False  # left in place for the next server
        self._last_owner = 0
        self._mapped_bytes = 0
        self._machine: Machine | None = None  # asked for room before growth
        self._lock = threading.Lock()  # of growth, mapping ahead and closing
        self._closed = threading.Event()
        self._fd = fd  # carries the locks
        self._has_hugepages = os.fstatvfs(fd).f_bsize > mmap.PAGESIZE
        # The mapping keeps a descriptor of its own, from a second open file without locks, so that a forked child that
        # inherits it holds no lock.
        mapping_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            align_bytes = max(_native.LARGE_PAGE_BYTES, os.fstatvfs(fd).f_bsize)
            # A server's threads that outlive its L1, whatever they do there, must not meet a hole in the address space.
            self._map = map_shared(mapping_fd, size_bytes, align_bytes, is_unmapped=not is_creator)
        finally:
            os.close(mapping_fd)
        self.address = _native.buffer_address(self._map)
        for advice in (mmap.MADV_DONTDUMP, mmap.MADV_HUGEPAGE):  # both only save resources
            advise(self.address, size_bytes, advice)
        with _naming:
            _opened.add(self)

    # ---- server side -------------------------------------------------------------------------------------------------
    @classmethod
    def create(
        cls,
        name: str,
        size_bytes: int,
        boot_token: bytes,
        *,
        hugepages: bool = False,
        directory: Path = DIRECTORY,
        machine: Machine | None = None,
        heir: Inheritance | None = None,
    ) -> SharedMemory:
        """Makes `directory`/`name` for this process alone, mode 0600. Only the header has memory behind it yet.

        ResourceError when a live server owns the name, when the file there is not ours to replace, or when the machine
        could not hold all of it. What a dead server left behind is replaced; engines that still map that keep it.
        With an `heir` the file stays in place at the end, for a server that calls `take_over`; the first bytes, up to
        its `first_offset`, are then not for slots.
        """
        if name in ("", ".", "..") or "/" in name or "\0" in name or len(name.encode()) > MAX_SHM_NAME_BYTES:
            raise ConfigError(f'--shm-name "{name}" is not a plain file name of at most {MAX_SHM_NAME_BYTES} bytes')
        if len(boot_token) != BOOT_TOKEN_BYTES:
            raise ValueError(f"boot_token must be {BOOT_TOKEN_BYTES} bytes")
        machine = machine or Machine()
        if hugepages:
            huge = find_hugepages()
            directory = huge.directory
            size_bytes = -(-size_bytes // huge.page_bytes) * huge.page_bytes
            huge.refuse_if_short(size_bytes)
        path = directory / name
        try:
            for _ in range(_CLAIM_ATTEMPTS):
                former = open_former(path)
                if former is not None:
                    with contextlib.closing(former):
                        former.remove()
                if not hugepages:
                    refuse_if_short(size_bytes, directory, machine, "L1")
                memory = cls._create_file(path, size_bytes, boot_token, heir)
                if memory is not None:
                    memory._machine = None if hugepages else machine
                    return memory
        except OSError as error:
            raise ResourceError(f"cannot make shared memory {path}: {error.strerror}") from error
        raise ResourceError(
            f"cannot make shared memory {path}: other servers keep taking the name; choose another --shm-name"
        )

    @classmethod
    def _create_file(
        cls, path: Path, size_bytes: int, boot_token: bytes, heir: Inheritance | None
    ) -> SharedMemory | None:
        """None if somebody else made the file first. The file gets its name when it is complete and locked, so that no
        other process ever meets it half made, and a crash leaves nothing."""
        fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, 0o600)
            if not ownership.try_lock_server(fd):
                raise ResourceError(f"cannot lock shared memory {path}: this file system has no working locks")
            os.ftruncate(fd, size_bytes)
            os.posix_fallocate(fd, 0, HEADER_BYTES + PAGE_BYTES if heir else HEADER_BYTES)
            memory = cls(str(path), fd, size_bytes, boot_token, is_creator=True)
        except BaseException:
            os.close(fd)
            raise
        memory._map[:HEADER_BYTES] = Header(size_bytes, boot_token, os.getpid()).pack()
        memory.committed_bytes = HEADER_BYTES
        if heir is not None:
            memory._is_kept = True
            page = heir.pack()
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
    def take_over(
        cls,
        name: str,
        size_bytes: int,
        boot_token: bytes,
        heir: Inheritance,
        *,
        hugepages: bool = False,
        directory: Path = DIRECTORY,
        machine: Machine | None = None,
    ) -> SharedMemory | None:
        """Goes on with the file that a former server left under the name, if that left it to such an heir. Else None,
        after a line in the log that says why, and `create` makes a new one. ResourceError as of `create`.

        Engines of the former server may still map it, and those that live may still write where it let them.
        """
        if hugepages:
            huge = find_hugepages()
            directory = huge.directory
            size_bytes = -(-size_bytes // huge.page_bytes) * huge.page_bytes
        former = open_former(directory / name)
        if former is None:
            return None
        try:
            status = os.fstat(former.fd)
            page = os.pread(former.fd, PAGE_BYTES, PAGE_OFFSET)
            committed_bytes = _word(page, COMMITTED_WORD_OFFSET)
            difference = heir.difference(page)
            if not difference and (former.header is None or former.header.size_bytes != status.st_size):
                difference = "its header is damaged"
            if not difference and (status.st_size != size_bytes or not _is_present(status, committed_bytes)):
                difference = "its size is not what its description says"
            last_owner = _word(page, LAST_OWNER_WORD_OFFSET)
            if not difference and last_owner > ownership.MAX_OWNERS_EVER:
                difference = "its last owner number is damaged"
            if difference:
                logger.warning("L1 starts empty: what a former server left in %s is not used: %s", name, difference)
                former.close()
                return None
            memory = cls(str(former.path), former.fd, size_bytes, boot_token, is_creator=True)
        except BaseException:
            former.close()
            raise
        memory._is_kept = True
        memory.committed_bytes = committed_bytes
        # Whatever the word says, nobody gets the number of a process that lives.
        memory._last_owner = max(last_owner, ownership.highest_locked_owner(memory._fd))
        memory._machine = None if hugepages else machine or Machine()
        memory._map[:HEADER_BYTES] = Header(size_bytes, boot_token, os.getpid()).pack()
        return memory

    @property
    def slot_table_address(self) -> int:
        """Of the table that the next server finds the slots by; 0 where the file goes with this server."""
        return self.address + TABLE_OFFSET if self._is_kept else 0

    def new_owner(self) -> int:
        """A number that no owner of this file has had, in this life of the server or a former one."""
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
                if self._machine is not None:
                    refuse_if_short(step_bytes, Path(self.path).parent, self._machine, f"growing L1 {self.path}")
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

    def owner_alive(self, owner: int) -> bool:
        """Whether the process that locked this owner's byte is still there."""
        return ownership.is_owner_locked(self._fd, owner)

    # ---- engine side -------------------------------------------------------------------------------------------------
    @classmethod
    def attach(cls, path: str, size_bytes: int, boot_token: bytes) -> SharedMemory:
        """Maps the memory of the server that said so in HELLO; ServerUnavailable if it is not there (any more)."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise ServerUnavailable(f"cannot open the server's shared memory {path}: {error.strerror}") from error
        try:
            header = Header.unpack(os.pread(fd, HEADER_BYTES, 0))
            if header is None:
                raise ServerUnavailable(f"{path} is not shared memory of this version of lmcache")
            actual_bytes = os.fstat(fd).st_size
            if header.boot_token != boot_token or (header.size_bytes, actual_bytes) != (size_bytes, size_bytes):
                raise ServerUnavailable(f"{path} belongs to another life of the server; connect again")
            return cls(path, fd, size_bytes, boot_token, is_creator=False)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError):
                raise ServerUnavailable(f"cannot map the server's shared memory {path}: {error.strerror}") from error
            raise

    def lock_owner(self, owner: int) -> None:
        """Shows the server that `owner` lives, until `unlock_owner`, `close` or the death of this process."""
        if not ownership.try_lock_owner(self._fd, owner):
            raise ResourceError(f"another process lives under owner {owner} of {self.path}; register again")

    def unlock_owner(self, owner: int) -> None:
        ownership.unlock_owner(self._fd, owner)

    # ---- both --------------------------------------------------------------------------------------------------------
    def view(self, offset: int, size_bytes: int) -> memoryview:
        """Writable bytes of the file in place. They stay valid after `close`."""
        if offset < 0 or size_bytes < 0 or offset + size_bytes > self.size_bytes:
            raise ValueError(
                f"[{offset}, {offset + size_bytes}) is not inside the {self.size_bytes} bytes of {self.path}"
            )
        return self._map[offset : offset + size_bytes]

    def prefault(self, offset: int, size_bytes: int, threads: int, *, large_pages: bool) -> None:
        """Maps and clears pages ahead of use, on several threads. Only for what is committed, and for the server, which
        pays for the memory. `large_pages`: has small ones replaced; `grow` leaves few of them."""
        # From the large page on that the last call left unfinished.
        before_bytes = offset % _native.LARGE_PAGE_BYTES
        begin = self.address + offset - before_bytes
        _native.prefault(begin, size_bytes + before_bytes, threads, large_pages)

    def prefault_present(self, threads: int) -> int:
        """Maps what the server has filled since the last call, from the start without a gap; returns the bytes mapped.

        An engine that does this in the background spares its first copies the page faults. Never makes memory, and may
        run while another thread closes."""
        if self._has_hugepages:  # few faults, nothing to spare
            return 0
        mapped_bytes = 0
        while True:
            with self._lock:
                if self._fd < 0:
                    return mapped_bytes
                if self._mapped_bytes == self.size_bytes:
                    return mapped_bytes
                present_bytes = os.lseek(self._fd, self._mapped_bytes, os.SEEK_HOLE)
                step_bytes = min(present_bytes - self._mapped_bytes, _STEP_BYTES)
                if step_bytes == 0:
                    return mapped_bytes
                _native.prefault(self.address + self._mapped_bytes, step_bytes, threads)
                self._mapped_bytes += step_bytes
                mapped_bytes += step_bytes

    def present_bytes(self) -> int:
        """How much memory there is, from the start without a gap: what the server has filled so far. 0 once closed."""
        with self._lock:
            if self._fd < 0:
                return 0
            hole_bytes = os.lseek(self._fd, 0, os.SEEK_HOLE)  # huge pages: always the end, so blocks are counted too
            return min(hole_bytes, self.size_bytes, os.fstat(self._fd).st_blocks * 512)

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

    def close(self, *, in_use: bool = False) -> None:
        """Gives up locks and mapping; the creator also removes the file, unless it is left to an heir and if the name
        still leads to it. Idempotent.

        An engine's mapping goes with the last `view`: nothing native may use `address` any more. That of the creator is
        replaced by private pages, so that a late use of it is harmless; with `in_use` it stays as it is until the
        process ends, for operations that go on and whose bytes matter.
        """
        with self._lock:
            if self._fd < 0:
                return
            self._closed.set()
            with _naming:
                self._remove_file()
                _opened.discard(self)
                fd, self._fd = self._fd, -1
            self._map = memoryview(b"")
            if self._is_creator and not in_use:
                try:
                    replace_by_private_pages(self.address, self.size_bytes)
                except OSError as error:
                    logger.warning("%s stays mapped until the process ends: %s", self.path, error.strerror)
            os.close(fd)

    def _remove_file(self) -> None:
        if self._is_creator and not self._is_kept and same_file(self._fd, self.path):
            os.unlink(self.path)

    def _forget_locks(self) -> None:
        """In a forked child: the locks belong to the parent, and must end with it."""
        self._lock = threading.Lock()  # a thread that was not forked may have held it
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def remove_files(timeout_seconds: float) -> None:
    """For a process that ends at once, whatever its threads are doing: removes the files that `close` would remove and
    lets no other get a name. Waits that long at most for one that is getting its name."""
    if _naming.acquire(timeout=timeout_seconds):  # and never released
        for memory in list(_opened):
            with contextlib.suppress(OSError):
                memory._remove_file()


def _word(page: bytes, file_offset: int) -> int:
    return int.from_bytes(page[file_offset - PAGE_OFFSET : file_offset - PAGE_OFFSET + 8], "little")


def _is_present(status: os.stat_result, committed_bytes: int) -> bool:
    """Whether the file still has the memory that it is said to have."""
    return HEADER_BYTES + PAGE_BYTES <= committed_bytes <= min(status.st_size, status.st_blocks * 512)


def _forget_locks_in_child() -> None:
    global _naming
    _naming = threading.Lock()  # as above
    for memory in list(_opened):
        memory._forget_locks()


os.register_at_fork(after_in_child=_forget_locks_in_child)
