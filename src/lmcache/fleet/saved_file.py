"""Files that are replaced as a whole, and moved aside where they are damaged."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import BinaryIO

from lmcache.errors import ConfigError, LMCacheError, ResourceError

logger = logging.getLogger("lmcache.fleet")

FILE_MODE = 0o600  # salts may name tenants
DAMAGED = ".damaged"
NEW = ".new"


def refuse_unusable(path: str, flag: str) -> None:
    """ResourceError where no file could be written at that path."""
    folder = os.path.dirname(os.path.abspath(path))
    is_other = os.path.exists(path) and not os.path.isfile(path)  # a device would be moved aside, a pipe never ends
    if is_other or not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        raise ResourceError(
            f"{flag} {path} cannot be written: name a regular file in a folder that this user may write to."
        )


def refuse_shared(path: str, flag: str, other: str, other_flag: str) -> None:
    """ConfigError where a file of one, or what replaces it or is kept of it, is one of the other."""
    files, others = ({os.path.realpath(name + suffix) for suffix in ("", NEW, DAMAGED)} for name in (path, other))
    if files & others:
        raise ConfigError(
            f"{flag} and {other_flag} must be two files, and neither may be the other with {NEW} or {DAMAGED} at its "
            f"end, got {path} and {other}: give one of them another name."
        )


def replace(path: str, write: Callable[[BinaryIO], None]) -> None:
    """On the medium when this returns. LMCacheError: the file is what it was."""
    new = path + NEW
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)  # of a replacement that a crash interrupted
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        with open(fd, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise LMCacheError(f"{path} cannot be written: {error.strerror}.") from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(new)  # of a replacement that failed: the disk may be full


def read_or_move_aside(path: str, kind: str, read: Callable[[BinaryIO], None]) -> bool:
    """Whether there was a file, and `read` took it. One that it refuses with a ConfigError is kept under another name,
    with a sentence in the log."""
    try:
        with open(path, "rb") as file:
            read(file)
        return True
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ResourceError(f"The {kind} {path} cannot be read: {error.strerror}.") from None
    except ConfigError as error:
        aside = path + DAMAGED
        with contextlib.suppress(OSError):
            os.replace(path, aside)
        logger.error("The %s %s is not used, and kept as %s: %s", kind, path, aside, error)
        return False
