"""The file that has the name of an L1 file before a server takes the name."""

from __future__ import annotations

import errno
import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from lmcache.errors import ResourceError
from lmcache.memory import ownership
from lmcache.memory.header import HEADER_BYTES, Header, is_ours

logger = logging.getLogger("lmcache.memory")


@dataclass(frozen=True)
class PreviousFile:
    """A dead server's file, locked by this process. `header` is None where it is not of this version or damaged."""

    path: Path
    fd: int
    header: Header | None

    def remove(self) -> None:
        """Only the holder of the lock may remove the file, and only while the name still leads to it."""
        if same_file(self.fd, str(self.path)):
            os.unlink(self.path)
            logger.warning("removed shared memory %s that a dead server left behind", self.path)

    def close(self) -> None:
        os.close(self.fd)


def open_previous(path: Path) -> PreviousFile | None:
    """None where nothing has the name. ResourceError if a live server owns it or if it is not ours."""
    fd = _open(path)
    if fd is None:
        return None
    try:
        page = _first_page(fd, path)
        header = Header.unpack(page)
        if not ownership.try_lock_server(fd):
            by = f"process {header.pid}" if header is not None else "another process"
            raise ResourceError(
                f'shared memory "{path.name}" is in use by a running server ({by}); '
                "stop that server or choose another --shm-name"
            )
        return PreviousFile(path, fd, header)
    except BaseException:
        os.close(fd)
        raise


def refuse_foreign(path: Path) -> None:
    """ResourceError if something that is not ours has the name. A live server may own what is ours."""
    fd = _open(path)
    if fd is not None:
        try:
            _first_page(fd, path)
        finally:
            os.close(fd)


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise ResourceError(
            f"{path} exists and cannot be used ({why}); remove it or choose another --shm-name"
        ) from error


def _first_page(fd: int, path: Path) -> bytes:
    status = os.fstat(fd)
    page = os.pread(fd, HEADER_BYTES, 0) if stat.S_ISREG(status.st_mode) else b""
    if not is_ours(page) or status.st_uid != os.geteuid():
        raise ResourceError(f"{path} exists and is not L1 memory of this user; remove it or choose another --shm-name")
    return page


def same_file(fd: int, path: str) -> bool:
    try:
        at_path = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    opened = os.fstat(fd)
    return (at_path.st_dev, at_path.st_ino) == (opened.st_dev, opened.st_ino)
