"""Checks whether a folder can be used. What is created for that is gone afterwards."""

from __future__ import annotations

import errno
import os
import stat
import tempfile

_TRIAL = ".lmcache-check-"  # begins the name of what is created


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
    # What everybody may write to may be of a file system that takes nothing, or not from here: /proc, a mount by NFS.
    if existing == path:
        refuse_files(existing)
        return
    trial = tempfile.mkdtemp(prefix=_TRIAL, dir=existing)
    try:
        refuse_files(trial)
    finally:
        os.rmdir(trial)


def refuse_files(folder: str) -> None:
    """Raises the OSError that making a file in this folder would raise."""
    with tempfile.TemporaryFile(prefix=_TRIAL, dir=folder):  # without a name, where the file system can do that
        pass


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
