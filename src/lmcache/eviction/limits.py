"""What each cache salt may take under IsolatedLRU."""

from __future__ import annotations


class SaltLimits:
    """Bytes by salt. A salt that was never given a limit has 0. Thread-safe: each method is one step."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}

    def set(self, salt: str, limit_bytes: int) -> None:
        self._bytes[salt] = limit_bytes

    def remove(self, salt: str) -> bool:
        """False if it had none."""
        return self._bytes.pop(salt, None) is not None

    def of(self, salt: str) -> int:
        return self._bytes.get(salt, 0)

    def all(self) -> dict[str, int]:
        return self._bytes.copy()

    def __contains__(self, salt: str) -> bool:
        return salt in self._bytes
