"""Whether a file is still the one that was read: it may be replaced, or written to, while it is in use."""

from __future__ import annotations

import os


def file_version(status: os.stat_result) -> tuple[int, ...]:
    """Another one after every change of the content, and when another file takes the name."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def version_at(path: str) -> tuple[int, ...]:
    """The version of the file of that name. What cannot be looked at has a version, too: the reason why not."""
    try:
        return file_version(os.stat(path))
    except OSError as error:
        return (error.errno or 0,)
    except ValueError:  # a name that no file can have
        return ()
