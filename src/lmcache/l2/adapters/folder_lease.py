"""Which servers write to a folder, so that temporary files of dead servers can be removed.

Every writer holds a lock (flock) on a file `.lmcache/writers/<id>` and touches it periodically. On one host the lock
decides. On a network file system the locks of other hosts may be invisible, so there a recent touch counts as well.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

from lmcache.l2.adapters.folder import OWN_FOLDER, make
from lmcache.memory.ownership import try_lock_server

SILENT_SECONDS = 600.0

_ID_BYTES = 8
_ID = re.compile(r"\.?[0-9a-f]{16}")


class FolderLease:
    """Raises OSError where the folder cannot be written to or locked."""

    def __init__(self, base: str, random_bytes: Callable[[int], bytes]) -> None:
        self.id = random_bytes(_ID_BYTES).hex()
        self._folder = make(base, f"{OWN_FOLDER}/writers")
        self._path = self._folder / self.id
        # Locked before it gets its name, so that it is never seen unlocked while this process runs.
        unnamed = self._folder / f".{self.id}"
        self._fd = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o660)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._fd, socket.gethostname().encode())
            os.fsync(self._fd)
            os.rename(unnamed, self._path)
        except OSError:
            os.close(self._fd)
            unnamed.unlink(missing_ok=True)
            raise

    def unit_bytes(self) -> int:
        """Disk space of the smallest file here."""
        return max(4096, min(os.fstat(self._fd).st_blocks * 512, 1 << 20))

    def touch(self) -> None:
        os.utime(self._fd)

    def others(self) -> set[str]:
        """Ids of the other live writers. Files of dead ones are removed."""
        self.touch()
        now_seconds = os.fstat(self._fd).st_mtime  # the file system's own clock
        live = set()
        for path in self._folder.iterdir():
            if path.name == self.id or not _ID.fullmatch(path.name):
                continue
            try:
                if _lives(path, now_seconds):
                    live.add(path.name)
                else:
                    path.unlink(missing_ok=True)
            except FileNotFoundError:
                continue
            except OSError:
                live.add(path.name)  # in doubt its temporary files stay
        return live

    def close(self) -> None:
        if self._fd >= 0:
            try:
                self._path.unlink(missing_ok=True)
            except OSError:
                pass  # the folder fails or is gone; an unlocked file has no effect
            os.close(self._fd)
            self._fd = -1


def _lives(path: Path, now_seconds: float) -> bool:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if not try_lock_server(fd):
            return True
        elsewhere = os.read(fd, 256) != socket.gethostname().encode()
        starting = path.name.startswith(".")
        return (elsewhere or starting) and now_seconds - os.fstat(fd).st_mtime < SILENT_SECONDS
    finally:
        os.close(fd)
