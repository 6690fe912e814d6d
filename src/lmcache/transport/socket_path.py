"""The path of a Unix socket is that of the server that listens there; what a killed one left is replaced."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

from lmcache.clock import Clock
from lmcache.errors import ResourceError
from lmcache.transport.forks import not_for_children

_LOCK_SECONDS = 5.0
_LOOK_SECONDS = 0.02


def refuse_unusable_path(path: str) -> None:
    """ResourceError where nobody could listen. Takes nothing, and leaves a live server's socket alone."""
    folder = Path(path).parent
    os.close(_open_folder(folder, path))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ResourceError(
            f"Cannot listen on ipc://{path} because nothing may be created in {folder}; change its permissions, or "
            "choose another --host."
        )
    _is_there(path)


class PathListener:
    """Listens at a path. ResourceError when it is not to be had."""

    def __init__(self, path: str, backlog: int, clock: Clock) -> None:
        self.socket = not_for_children(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self._path = path
        try:
            lock = _open_folder(Path(path).parent, path)
            try:
                _lock(lock, path, clock)
                _check(path)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                self.socket.bind(path)
                self.socket.listen(backlog)
                self._inode = _inode(path)
            finally:
                os.close(lock)
        except OSError as error:
            self.socket.close()
            raise ResourceError(
                f"Cannot listen on ipc://{path} because {error.strerror or error}; choose another --host."
            ) from error
        except ResourceError:
            self.socket.close()
            raise

    def close(self) -> None:
        """Removes the path unless somebody else has taken it. While this one still listens nobody can have."""
        with contextlib.suppress(OSError):
            if _inode(self._path) == self._inode:
                os.unlink(self._path)
        self.socket.close()


def _inode(path: str) -> tuple[int, int]:
    """What tells this server's socket from one that takes its place."""
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _lock(folder: int, path: str, clock: Clock) -> None:
    """Held for a moment only, by whoever starts a server there."""
    give_up = clock.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if clock.monotonic() > give_up:
                raise ResourceError(
                    f"Cannot listen on ipc://{path} because another process holds a lock on its folder; choose another "
                    "--host."
                ) from None
        clock.sleep(_LOOK_SECONDS)


def _open_folder(folder: Path, path: str) -> int:
    try:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ResourceError(
            f"Cannot listen on ipc://{path} because the folder {folder} cannot be opened ({error.strerror}); create "
            "it, or choose another --host."
        ) from error


def _is_there(path: str) -> bool:
    """Whether a socket is. ResourceError when it is something else."""
    try:
        mode = os.lstat(path).st_mode  # a link is another file: a socket cannot be bound through it
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(mode):
        raise ResourceError(f"Cannot listen on ipc://{path} because another file is there; choose another --host.")
    return True


def _check(path: str) -> None:
    if not _is_there(path):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        refused = probe.connect_ex(path)
    if refused not in (errno.ECONNREFUSED, errno.ENOENT):  # EAGAIN: somebody listens, and many wait
        raise ResourceError(
            f"Cannot listen on ipc://{path} because a server listens there already; stop it, or choose another --host."
        )
