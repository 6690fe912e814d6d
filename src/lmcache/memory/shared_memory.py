"""The file in shared memory that is L1: made and owned by one server, mapped by its engines."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import stat
import threading
import weakref
from pathlib import Path

from lmcache import _native
from lmcache.core.limits import MAX_SHM_NAME_BYTES, MIB
from lmcache.errors import ConfigError, ResourceError, ServerUnavailable
from lmcache.memory import ownership
from lmcache.memory.header import BOOT_TOKEN_BYTES, HEADER_BYTES, Header, is_ours
from lmcache.memory.hugepages import find_hugepages
from lmcache.memory.room import Machine, refuse_if_short

logger = logging.getLogger("lmcache.memory")

DIRECTORY = Path("/dev/shm")
_STEP_BYTES = 64 * MIB
_CLAIM_ATTEMPTS = 20
_MAP_AHEAD_SECONDS = 0.5  # between looks at what the server has added

_opened: weakref.WeakSet[SharedMemory] = weakref.WeakSet()


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
            self._map = mmap.mmap(mapping_fd, size_bytes)
        finally:
            os.close(mapping_fd)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for advice in (mmap.MADV_DONTDUMP, mmap.MADV_HUGEPAGE):
            try:
                self._map.madvise(advice)
            except OSError:  # both only save resources, and kernels may lack them
                pass
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
    ) -> SharedMemory:
        """Makes `directory`/`name` for this process alone, mode 0600. Only the header has memory behind it yet.

        ResourceError when a live server owns the name, when the file there is not ours to replace, or when the machine
        could not hold all of it. What a dead server left behind is replaced; engines that still map that keep it.
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
                _remove_dead(path)
                if not hugepages:
                    refuse_if_short(size_bytes, directory, machine, "L1")
                memory = cls._create_file(path, size_bytes, boot_token)
                if memory is not None:
                    memory._machine = None if hugepages else machine
                    return memory
        except OSError as error:
            raise ResourceError(f"cannot make shared memory {path}: {error.strerror}") from error
        raise ResourceError(
            f"cannot make shared memory {path}: other servers keep taking the name; choose another --shm-name"
        )

    @classmethod
    def _create_file(cls, path: Path, size_bytes: int, boot_token: bytes) -> SharedMemory | None:
        """None if somebody else made the file first. The file gets its name when it is complete and locked, so that no
        other process ever meets it half made, and a crash leaves nothing."""
        fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, 0o600)
            if not ownership.try_lock_server(fd):
                raise ResourceError(f"cannot lock shared memory {path}: this file system has no working locks")
            os.ftruncate(fd, size_bytes)
            os.posix_fallocate(fd, 0, HEADER_BYTES)
            memory = cls(str(path), fd, size_bytes, boot_token, is_creator=True)
        except BaseException:
            os.close(fd)
            raise
        memory._map[:HEADER_BYTES] = Header(size_bytes, boot_token, os.getpid()).pack()
        memory.committed_bytes = HEADER_BYTES
        directory_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
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

    def grow(self, committed_bytes: int) -> None:
        """Puts memory behind the first `committed_bytes` of the file, so that using them can never end in SIGBUS.

        ResourceError when the machine has no more; `committed_bytes` then tells how far it went.
        """
        with self._lock:
            while self.committed_bytes < committed_bytes:
                step_bytes = min(committed_bytes - self.committed_bytes, _STEP_BYTES)
                if self._machine is not None:
                    refuse_if_short(step_bytes, Path(self.path).parent, self._machine, f"growing L1 {self.path}")
                try:
                    os.posix_fallocate(self._fd, self.committed_bytes, step_bytes)
                except OSError as error:
                    raise ResourceError(
                        f"L1 {self.path} cannot grow beyond {self.committed_bytes >> 20} MiB: {error.strerror}"
                    ) from error
                self.committed_bytes += step_bytes

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
        return memoryview(self._map)[offset : offset + size_bytes]

    def prefault(self, offset: int, size_bytes: int, threads: int) -> None:
        """Maps and clears pages ahead of use, on several threads. Only for what is committed."""
        _native.prefault(self.address + offset, size_bytes, threads)

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
                self.prefault(self._mapped_bytes, step_bytes, threads)
                self._mapped_bytes += step_bytes
                mapped_bytes += step_bytes

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

    def close(self) -> None:
        """Gives up locks and mapping; the creator also removes the file, if the name still leads to it. Idempotent.

        Nothing native may use `address` any more. Memory under a `view` is unmapped with the last one.
        """
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd < 0:
                return
            self._closed.set()
            _opened.discard(self)
            if self._is_creator and _same_file(fd, self.path):
                os.unlink(self.path)
            try:
                self._map.close()
            except BufferError:
                logger.debug("%s is still in use here; it is unmapped with its last view", self.path)
            os.close(fd)

    def _forget_locks(self) -> None:
        """In a forked child: the locks belong to the parent, and must end with it."""
        self._lock = threading.Lock()  # a thread that was not forked may have held it
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _remove_dead(path: Path) -> None:
    """Removes what a dead server left at `path`. ResourceError if a live one owns it or if it is not ours."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    except OSError as error:
        why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise ResourceError(
            f"{path} exists and cannot be used ({why}); remove it or choose another --shm-name"
        ) from error
    try:
        status = os.fstat(fd)
        page = os.pread(fd, HEADER_BYTES, 0) if stat.S_ISREG(status.st_mode) else b""
        if not is_ours(page) or status.st_uid != os.geteuid():
            raise ResourceError(
                f"{path} exists and is not L1 memory of this user; remove it or choose another --shm-name"
            )
        if not ownership.try_lock_server(fd):
            header = Header.unpack(page)
            by = f"process {header.pid}" if header is not None else "another process"
            raise ResourceError(
                f'shared memory "{path.name}" is in use by a running server ({by}); '
                "stop that server or choose another --shm-name"
            )
        # Only the holder of the lock may remove the file, and only while the name still leads to it.
        if _same_file(fd, str(path)):
            os.unlink(path)
            logger.warning("removed shared memory %s that a dead server left behind", path)
    finally:
        os.close(fd)


def _same_file(fd: int, path: str) -> bool:
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    opened = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def _forget_locks_in_child() -> None:
    for memory in list(_opened):
        memory._forget_locks()


os.register_at_fork(after_in_child=_forget_locks_in_child)
