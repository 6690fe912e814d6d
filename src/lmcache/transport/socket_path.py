"""The path of a Unix socket is that of the server that listens there; what a killed one left is replaced.

ZMQ itself removes whatever is at a path before it listens there, a live server's socket too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from lmcache.errors import ResourceError

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


@contextlib.contextmanager
def claimed(path: str) -> Iterator[None]:
    """While it lasts no other server takes a path of the same folder. ResourceError when the path is not to be had."""
    lock = _open_folder(Path(path).parent, path)
    try:
        _lock(lock, path)
        _check(path)
        yield
    finally:
        os.close(lock)


def inode(path: str) -> tuple[int, int]:
    """What tells this server's socket from one that takes its place."""
    found = os.stat(path)
    return found.st_dev, found.st_ino


def remove(path: str, own: tuple[int, int]) -> None:
    """While this server still listens there, so that nobody else has taken the path."""
    with contextlib.suppress(OSError):
        if inode(path) == own:
            os.unlink(path)


def _lock(folder: int, path: str) -> None:
    """Held for a moment only, by whoever starts a server there."""
    give_up = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > give_up:
                raise ResourceError(
                    f"Cannot listen on ipc://{path} because another process holds a lock on its folder; choose another "
                    "--host."
                ) from None
        time.sleep(_LOOK_SECONDS)


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
        mode = os.stat(path).st_mode
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
