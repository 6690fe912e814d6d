"""Checks whether a folder can be used, without creating anything."""

from __future__ import annotations

import errno
import os
import stat


def refuse_unwritable(path: str) -> None:
    """Raises the OSError that making `path` with its parents, listing it or making a file in it would raise."""
    path = existing = os.path.abspath(path)
    while True:
        try:
            kind = os.stat(existing).st_mode
            break
        except FileNotFoundError:
            if os.path.islink(existing):  # it leads nowhere, and its name is taken
                raise _error(errno.EEXIST, existing) from None
            existing = os.path.dirname(existing)
    if not stat.S_ISDIR(kind):
        raise _error(errno.EEXIST if existing == path else errno.ENOTDIR, existing)
    needed = os.W_OK | os.X_OK | (os.R_OK if existing == path else 0)
    if not os.access(existing, needed, effective_ids=True):
        read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
        raise _error(errno.EROFS if read_only else errno.EACCES, existing)


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
