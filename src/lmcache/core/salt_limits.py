"""What each cache salt may take under IsolatedLRU."""

from __future__ import annotations


class SaltLimits:
    """Bytes by salt. A salt that was never given a limit has 0. Thread-safe: each method is one step."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}
        self._version = 0

    @property
    def version(self) -> int:
        """Another one after each change. Read it before what it is the version of."""
        return self._version

    def set(self, salt: str, limit_bytes: int) -> None:
        self._bytes[salt] = limit_bytes
        self._version += 1

    def remove(self, salt: str) -> bool:
        """False if it had none."""
        was_limited = self._bytes.pop(salt, None) is not None
        self._version += 1
        return was_limited

    def of(self, salt: str) -> int:
        return self._bytes.get(salt, 0)

    def all(self) -> dict[str, int]:
        return self._bytes.copy()

    def __contains__(self, salt: str) -> bool:
        return salt in self._bytes
