"""Quotas that outlive a server: a JSON object of cache salts and gigabytes, such as {"tenant": 1.5, "_default": 2}."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from lmcache.core.key import DEFAULT_SALT
from lmcache.core.limits import GIB, MAX_NAME_BYTES, MAX_QUOTA_GB, MAX_QUOTAS
from lmcache.errors import ConfigError, LMCacheError, ResourceError

FILE_MODE = 0o600  # salts may name tenants


class QuotaFile:
    """One file for one server: what others write into it meanwhile is overwritten with the next change. Where the path
    is a symbolic link, the link stays, and what it leads to is read and replaced."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)

    def read(self) -> dict[str, int]:
        """Bytes by salt; nothing where there is no file yet. ConfigError or ResourceError."""
        try:
            text = Path(self._target()).read_text(encoding="utf-8")
        except FileNotFoundError:
            if not os.access(os.path.dirname(self._target()), os.W_OK):
                raise ResourceError(
                    f"--quota-file: {self.path} cannot be made, as its folder is missing or may not be written to; "
                    "make it writable for this user."
                ) from None
            return {}
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ResourceError(
                f"--quota-file: cannot read {self.path}: {reason}; make it readable or name another file."
            ) from None
        try:
            return _limits(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"--quota-file: {self.path} must hold a JSON object of cache salts and gigabytes, such as "
                f'{{"tenant": 1.5}}: {error}; correct it, or delete it to start without quotas.'
            ) from None

    def write(self, limits: Mapping[str, int]) -> None:
        """Replaced as a whole, and on the medium when this returns. LMCacheError: it is what it was."""
        shown = {salt or DEFAULT_SALT: size_bytes / GIB for salt, size_bytes in sorted(limits.items())}
        try:
            path = self._target()
            folder, new = os.path.dirname(path), f"{path}.new"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new)  # of a change that a crash interrupted, or a link that somebody else made
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
            with open(fd, "w", encoding="utf-8") as file:
                json.dump(shown, file, indent=2)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
            _flush_folder(folder)
        except OSError as error:
            raise LMCacheError(
                f"The quota was not changed, as {self.path} cannot be written: {error.strerror}; see --quota-file."
            ) from None

    def _target(self) -> str:
        """Where the file really is. PermissionError for a link that neither root nor this user made: it could lead
        anywhere."""
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(self.path)
            if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
                raise PermissionError(errno.EACCES, "it is a symbolic link of another user")
        return os.path.realpath(self.path)


def _limits(content: object) -> dict[str, int]:
    """ValueError with what is wrong."""
    if not isinstance(content, dict):
        raise ValueError("it is not an object")
    if len(content) > MAX_QUOTAS:
        raise ValueError(f"it has more than {MAX_QUOTAS} salts")
    limits = {}
    for name, limit_gb in content.items():
        is_number = isinstance(limit_gb, (int, float)) and not isinstance(limit_gb, bool)
        if not is_number or not math.isfinite(limit_gb) or not 0 <= limit_gb <= MAX_QUOTA_GB:
            raise ValueError(f'the limit of "{name[:64]}" is not a number from 0 to {MAX_QUOTA_GB}')
        if not name or len(name.encode()) > MAX_NAME_BYTES:
            raise ValueError(f"a salt has 1 to {MAX_NAME_BYTES} bytes, and {DEFAULT_SALT} is the empty one")
        limits["" if name == DEFAULT_SALT else name] = int(limit_gb * GIB)
    return limits


def _flush_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
