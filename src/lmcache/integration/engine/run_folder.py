"""The folder of this user's servers that engines own: their locks, sockets and logs."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from lmcache.errors import ResourceError

_ATTEMPTS = 64  # one fails only when the last user of the folder leaves within microseconds


def run_folder_path() -> Path:
    """Beside L1, which engine and server share in any case; /tmp may be private to a service."""
    return Path(f"/dev/shm/lmcache-run-{os.geteuid()}")


def run_folder() -> Path:
    """Made if need be. ResourceError if it is not this user's alone."""
    folder = run_folder_path()
    try:
        status = _made(folder)
    except OSError as error:
        raise ResourceError(f"The folder {folder} cannot be made: {error.strerror}.") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ResourceError(f"{folder} is not a folder of this user alone (mode 0700): remove it.")
    return folder


def _made(folder: Path) -> os.stat_result:
    """Of the folder, which whoever leaves last removes."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            return folder.lstat()
    return folder.lstat()
