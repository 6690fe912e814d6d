"""Which servers write to a folder, so that temporary files of dead ones can be told from those of live ones.

Every writer has a file `.lmcache/writers/<id>` that it keeps locked (flock) for as long as it lives, and touches now
and then. The lock decides on one host. Another host's lock may be invisible on a network file system, so there a recent
touch counts as life too.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
from pathlib import Path

from lmcache.l2.adapters.folder import OWN_FOLDER, make

SILENT_SECONDS = 600.0

_ID = re.compile(r"\.?[0-9a-f]{16}")


class Writer:
    """Raises OSError where the folder cannot be written to or locked."""

    def __init__(self, base: str) -> None:
        self.id = os.urandom(8).hex()
        self._folder = make(base, f"{OWN_FOLDER}/writers")
        self._path = self._folder / self.id
        # Locked before it has its name: nobody can see it unlocked while this process lives.
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
        """What the file system takes for the smallest file."""
        return max(4096, min(os.fstat(self._fd).st_blocks * 512, 1 << 20))

    def touch(self) -> None:
        os.utime(self._fd)

    def others(self) -> set[str]:
        """Ids of the other live writers. Files of dead ones are removed."""
        self.touch()
        now = os.fstat(self._fd).st_mtime  # the file system's own clock
        live = set()
        for path in self._folder.iterdir():
            if path.name == self.id or not _ID.fullmatch(path.name):
                continue
            try:
                if _lives(path, now):
                    live.add(path.name)
                else:
                    path.unlink(missing_ok=True)
            except FileNotFoundError:
                continue
            except OSError:
                live.add(path.name)  # in doubt its files stay
        return live

    def close(self) -> None:
        if self._fd >= 0:
            try:
                self._path.unlink(missing_ok=True)
            except OSError:
                pass  # the folder fails or is gone; without the lock the file means nothing
            os.close(self._fd)
            self._fd = -1


def _lives(path: Path, now: float) -> bool:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        elsewhere = os.read(fd, 256) != socket.gethostname().encode()
        starting = path.name.startswith(".")
        return (elsewhere or starting) and now - os.fstat(fd).st_mtime < SILENT_SECONDS
    finally:
        os.close(fd)
