"""The folder of this user's servers that engines own: their locks, sockets and logs."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from lmcache.errors import ResourceError

_ATTEMPTS = 64  # an attempt fails only when the last user of the folder leaves between its two calls


def run_folder_path() -> Path:
    """Beside L1, which engine and server share in any case; /tmp may be private to a service."""
    return Path(f"/dev/shm/lmcache-run-{os.geteuid()}")


def run_folder() -> Path:
    """Made if need be. ResourceError if it is not this user's alone."""
    folder = run_folder_path()
    try:
        found = _find_or_make(folder)
    except OSError as error:
        raise ResourceError(f"The folder {folder} cannot be made: {error.strerror}.") from error
    if found is None or (stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077):
        return folder
    raise ResourceError(f"{folder} is not a folder of this user alone (mode 0700): remove it.")


def _find_or_make(folder: Path) -> os.stat_result | None:
    """What was there, or None where it was made here. Whoever leaves last removes the folder."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            return None
        with contextlib.suppress(FileNotFoundError):
            return folder.lstat()
    return folder.lstat()
