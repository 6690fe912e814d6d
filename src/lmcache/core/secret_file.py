"""Files that hold secrets, such as one line of text that whoever has it may use."""

from __future__ import annotations

import os
import stat

from lmcache.errors import ConfigError

_MAX_BYTES = 4096
_MIN_CHARACTERS = 16


def read_secret(path: str, flag: str, least_characters: int = _MIN_CHARACTERS) -> str:
    """The secret in a file, "" without a file. ConfigError, which names the `flag`, when the file has none."""
    if not path:
        return ""
    content = _read(path, flag, _MAX_BYTES)
    try:
        secret = content.decode("ascii").strip()
    except UnicodeDecodeError:
        raise ConfigError(f"{flag} {path} must hold one line of ASCII text.") from None
    if len(secret) < least_characters or len(content) > _MAX_BYTES or not secret.isprintable():
        raise ConfigError(
            f"{flag} {path} must hold one line of at least {least_characters} characters, "
            f"{_MAX_BYTES} at most, such as the output of `openssl rand -hex 32`."
        )
    return secret


def read_private_text(path: str, flag: str, most_bytes: int) -> str:
    """Text that may have secrets in it. ConfigError, which names the `flag`, when the file has none, or more bytes."""
    content = _read(path, flag, most_bytes)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{flag} {path} must hold text in UTF-8.") from None
    if len(content) > most_bytes:
        raise ConfigError(f"{flag} {path} must hold at most {most_bytes} bytes.")
    return text


def _read(path: str, flag: str, most_bytes: int) -> bytes:
    """One byte more than that, of a longer file."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{flag} {path} is no file that can be read again; name one.")
            return file.read(most_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}.") from None


def _without_waiting(path: str, flags: int) -> int:
    """A pipe of that name would hold up whoever reads it."""
    return os.open(path, flags | os.O_NONBLOCK)
