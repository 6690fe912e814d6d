"""How much each cache salt may keep, as operators set it, and how much it has in L1."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from lmcache._native import L1Core
from lmcache.core.limits import MAX_QUOTAS
from lmcache.core.salt_limits import SaltLimits
from lmcache.errors import LMCacheError
from lmcache.l1.quota_file import QuotaFile
from lmcache.telemetry.metrics import MAX_LABEL_SETS, QuotaMetrics


@dataclass(frozen=True)
class Quota:
    cache_salt: str
    limit_bytes: int  # 0 where none was set
    usage_bytes: int  # in L1, what is being written included
    exists: bool


class Quotas:
    """Limits of salts; in force under IsolatedLRU, only kept otherwise. Thread-safe."""

    def __init__(self, core: L1Core, limits: SaltLimits, *, enforced: bool, file: QuotaFile | None = None) -> None:
        """`limits` is shared with what else goes by them. Without a `file` they are forgotten with the server. What the
        file says is in force before anything is dropped for being above its limit. ConfigError or ResourceError."""
        self.enforced = enforced
        self._core = core
        self._limits = limits
        self._file = file
        self._lock = threading.Lock()  # so that the core, `limits` and the file agree
        self._publishing = threading.Lock()  # not the former, which is held while the file is written
        if file is not None:
            for salt, limit_bytes in file.read().items():
                self._set(salt, limit_bytes)
            core.enforce_limits()

    def put(self, salt: str, limit_bytes: int) -> Quota:
        """In force and in the file when this returns, but for what is being read. LMCacheError beyond MAX_QUOTAS and
        where the file cannot be written: then nothing has changed."""
        with self._lock:
            known = self._limits.all()
            if salt not in known and len(known) >= MAX_QUOTAS:
                raise LMCacheError(f"There are {MAX_QUOTAS} quotas already; delete some before you add others.")
            self._write({**known, salt: limit_bytes})
            self._set(salt, limit_bytes)
        self._core.enforce_limits()
        return self.get(salt)

    def delete(self, salt: str) -> Quota:
        """The salt has no limit any more, and so under IsolatedLRU keeps nothing. Idempotent. LMCacheError where the
        file cannot be written."""
        with self._lock:
            if salt in self._limits:
                self._write({name: limit for name, limit in self._limits.all().items() if name != salt})
                self._limits.remove(salt)
                self._core.set_limit(salt, 0)
        self._core.enforce_limits()
        return self.get(salt)

    def _set(self, salt: str, limit_bytes: int) -> None:
        self._limits.set(salt, limit_bytes)
        self._core.set_limit(salt, limit_bytes)

    def _write(self, limits: dict[str, int]) -> None:
        if self._file is not None:
            self._file.write(limits)

    def get(self, salt: str) -> Quota:
        return Quota(salt, self._limits.of(salt), self._core.usage_of(salt), salt in self._limits)

    def publish(self, metrics: QuotaMetrics) -> None:
        """Brings the metrics up to date: the salts with a quota, at most MAX_LABEL_SETS of them."""
        with self._publishing:
            limits = dict(sorted(self._limits.all().items())[:MAX_LABEL_SETS])
            metrics.quota_limit_bytes.replace(limits)
            metrics.quota_usage_bytes.replace({salt: self._core.usage_of(salt) for salt in limits})

    def all(self) -> list[Quota]:
        """The quotas of every salt that has a limit or holds something, by name."""
        usage, limits = dict(self._core.salt_usage()), self._limits.all()
        return [
            Quota(salt, limits.get(salt, 0), usage.get(salt, 0), salt in limits) for salt in sorted({*usage, *limits})
        ]
