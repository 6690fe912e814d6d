"""Files with CURVE keys: one key each, 32 bytes as 40 characters of Z85 (ZeroMQ RFC 32), in one line."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from lmcache.errors import ConfigError

KEY_BYTES = 32
SECRET_SUFFIX, PUBLIC_SUFFIX, SALTS_SUFFIX = ".key", ".pub", ".salts"

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_Z85_VALUES = {character: value for value, character in enumerate(_Z85)}
_Z85_CHARACTERS = 40
_MAX_FILE_BYTES = 4096
_KEYGEN = "`lmcache keygen NAME` makes both files of a pair"


@dataclass(frozen=True)
class CurveFiles:
    """What an engine proves itself with, and the server to it. Read anew for every connection."""

    server_public: str  # path of the server's public key
    client_secret: str  # path of the engine's own secret key

    def read(self) -> tuple[bytes, bytes]:
        """(server's public key, own secret key). ConfigError names the file and the rule."""
        return read_public_key(self.server_public), read_secret_key(self.client_secret)


def z85_encode(key: bytes) -> str:
    words = (int.from_bytes(key[at : at + 4], "big") for at in range(0, len(key), 4))
    return "".join(_Z85[word // 85**power % 85] for word in words for power in (4, 3, 2, 1, 0))


def z85_decode(text: str) -> bytes:
    """ValueError where it is not Z85."""
    key = bytearray()
    for at in range(0, len(text), 5):
        word = 0
        for character in text[at : at + 5].ljust(5):
            if character not in _Z85_VALUES:
                raise ValueError(f"{character!r} is no character of Z85")
            word = word * 85 + _Z85_VALUES[character]
        if word >> 32:
            raise ValueError("a group is beyond 32 bits")
        key += word.to_bytes(4, "big")
    return bytes(key)


def read_secret_key(path: str) -> bytes:
    """ConfigError where others could read the file, too, or where it holds no key."""
    text, status = _read(path)
    refuse_open_to_others(path, status, secret=True)
    return _key(path, text, "secret")


def read_public_key(path: str) -> bytes:
    """ConfigError where others could have replaced the file's content, or where it holds no key."""
    text, status = _read(path)
    refuse_open_to_others(path, status, secret=False)
    return _key(path, text, "public")


def refuse_open_to_others(path: str, status: os.stat_result, *, secret: bool) -> None:
    """ConfigError unless this user or root owns it and nobody else may write there, nor read it where it is a secret.
    A group may read a secret that root owns: so Kubernetes mounts it."""
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{path} belongs to user {status.st_uid}; it must belong to the user who uses it, or to root."
        )
    mode = stat.S_IMODE(status.st_mode)
    forbidden = 0o022
    if secret:
        forbidden = 0o027 if status.st_uid == 0 and os.geteuid() != 0 else 0o077
    if mode & forbidden:
        rule = "must be readable by its owner alone" if secret else "must not be writable by others"
        raise ConfigError(f"{path} has mode {mode:04o} and {rule}: chmod {'600' if secret else 'go-w'} {path}.")


def _read(path: str) -> tuple[str, os.stat_result]:
    """The text and the status of what was read: not of a file that takes its name meanwhile."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"The CURVE key {path} is not a file; {_KEYGEN}.")
            return os.read(fd, _MAX_FILE_BYTES).decode("ascii").strip(), status
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"The CURVE key {path} cannot be read: {error.strerror}; {_KEYGEN}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} holds no CURVE key, which is one line of 40 characters; {_KEYGEN}.") from None


def _key(path: str, text: str, kind: str) -> bytes:
    try:
        key = z85_decode(text) if len(text) == _Z85_CHARACTERS else b""
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{path} holds no {kind} CURVE key, which is one line of 40 characters; {_KEYGEN}.")
    return key
