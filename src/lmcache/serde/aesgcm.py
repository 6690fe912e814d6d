"""`aesgcm`: objects that only who has the master key can read or write (docs/formats/aesgcm.md).

Master keys come from a file, which is read again when it changes, or from an environment variable. They are never part
of a message, an exception or a repr.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta

from lmcache import _native
from lmcache.core.file_version import file_version
from lmcache.errors import ConfigError, LMCacheError, ResourceError
from lmcache.serde.base import SerdeConfig, Stage

log = logging.getLogger("lmcache.serde")

KEY_BYTES = 32
MAX_KEYS = 16
MAX_FILE_BYTES = 4096
_HEX_KEY = re.compile(rb"[0-9A-Fa-f]{64}")
_TEXT = re.compile(rb"[\x20-\x7e]*")


class AesGcmConfig(SerdeConfig, frozen=True, kw_only=True):
    """AES-GCM, with a key of its own for every object. After compression: what is encrypted does not get smaller."""

    key_provider: Annotated[
        Literal["hkdf"], Meta(description="how keys of objects come from the master key: HKDF with SHA-256")
    ] = "hkdf"
    master_key_path: Annotated[
        str,
        Meta(
            description="file with 32 bytes, or with up to 16 lines of 64 hex digits; the first encrypts, all decrypt"
        ),
    ] = ""
    master_key_env: Annotated[
        str, Meta(description="environment variable with master keys in hex, in place of master_key_path")
    ] = ""
    aes_bits: Annotated[Literal[128, 256], Meta(description="bits of the AES keys of what is written")] = 256

    def __post_init__(self) -> None:
        if bool(self.master_key_path) == bool(self.master_key_env):
            raise ValueError('give "master_key_path" or "master_key_env": one of them says where the master key is.')
        for name in ("master_key_path", "master_key_env"):
            if _HEX_KEY.fullmatch(getattr(self, name).encode(errors="replace")):
                raise ValueError(
                    f'"{name}" must say where the master key is, and holds one itself, which others may have seen now: '
                    "write a new key to a file, and give its path."
                )


def read_keys(content: bytes, source: str) -> list[bytes]:
    """ConfigError names `source`, and nothing of its content."""
    if len(content) == KEY_BYTES and not _TEXT.fullmatch(content):  # text is a password, or the half of a key in hex
        return [content]
    lines = content.split()
    if not 1 <= len(lines) <= MAX_KEYS or not all(_HEX_KEY.fullmatch(line) for line in lines):
        raise ConfigError(
            f"{source} must hold a master key of 32 random bytes, or 1 to {MAX_KEYS} lines of 64 hex digits; "
            "`openssl rand -hex 32` makes one."
        )
    return [bytes.fromhex(line.decode()) for line in lines]


class KeyFile:
    """The file of the master keys, and the cipher that has them. `refresh` is called by one thread at a time."""

    def __init__(self, path: str, where: str, aes_bits: int) -> None:
        """ConfigError or ResourceError."""
        self._path = path
        self._source = f'{where}: the file {path} of "master_key_path"'
        self._version: tuple[int, ...] = ()
        self._failure = ""
        self.cipher = _native.ObjectCipher(self._read(), aes_bits)

    def refresh(self) -> None:
        """Takes the keys of a file that changed. One that cannot be used is said once; the keys stay then."""
        try:
            if file_version(os.stat(self._path)) == self._version:
                return
            self.cipher.replace_keys(self._read())
        except (OSError, LMCacheError) as error:
            failure = str(error) if isinstance(error, LMCacheError) else f"{self._source} is gone: {error.strerror}"
            if failure != self._failure:
                log.warning("%s The keys that were read before stay in use.", failure)
            self._failure = failure
            return
        self._failure = ""
        log.info("Master keys were read again from %s.", self._path)

    def _read(self) -> list[bytes]:
        try:
            handle = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise ResourceError(
                f"{self._source} cannot be opened: {error.strerror}; give a file that this user may read."
            ) from None
        try:
            status = os.fstat(handle)
            self._check_access(status)
            content = os.read(handle, MAX_FILE_BYTES + 1)
        finally:
            os.close(handle)
        keys = read_keys(content, self._source)
        self._version = file_version(status)
        return keys

    def _check_access(self, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{self._source} must be a file, not a folder or a device.")
        if status.st_uid not in (0, os.geteuid()):
            raise ConfigError(f"{self._source} belongs to user {status.st_uid}; it must belong to this user or root.")
        # A group may read what root gave to it: secrets of containers are mounted so.
        allowed = 0o750 if status.st_uid == 0 and os.geteuid() != 0 else 0o700
        if excess := stat.S_IMODE(status.st_mode) & ~allowed:
            raise ConfigError(
                f"{self._source} gives others access (mode {stat.S_IMODE(status.st_mode):o}, {excess:o} too much); "
                f"run `chmod 600 {self._path}`."
            )


def build_aesgcm(config: AesGcmConfig, where: str, environ: Mapping[str, str] = os.environ) -> Stage:
    if refusal := _native.crypto_refusal():
        raise ResourceError(
            f'{where}: "aesgcm" needs OpenSSL of the machine ({refusal}); install libssl3 or openssl-libs.'
        )
    if config.master_key_path:
        file = KeyFile(config.master_key_path, where, config.aes_bits)
        return Stage("aesgcm", _native.aesgcm_stage(file.cipher), refresh=file.refresh)
    source = f"{where}: the environment variable {config.master_key_env}"
    given = environ.get(config.master_key_env, "").encode(errors="replace")
    if not given:
        raise ConfigError(f'{source} of "master_key_env" is not set; set it to 64 hex digits.')
    # Bytes that are no text cannot be in a variable, so 32 characters are no key.
    keys = read_keys(given + b"\n", source)
    return Stage("aesgcm", _native.aesgcm_stage(_native.ObjectCipher(keys, config.aes_bits)))
