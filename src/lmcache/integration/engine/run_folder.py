"""The folder of this user's servers that engines own: their locks, sockets and logs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from lmcache.errors import ResourceError


def run_folder_path() -> Path:
    """Beside L1, which engine and server share in any case; /tmp may be private to a service."""
    return Path(f"/dev/shm/lmcache-run-{os.geteuid()}")


def run_folder() -> Path:
    """Made if need be. ResourceError if it is not this user's alone."""
    folder = run_folder_path()
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ResourceError(f"The folder {folder} cannot be made: {error.strerror}.") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ResourceError(f"{folder} is not a folder of this user alone (mode 0700): remove it.")
    return folder
