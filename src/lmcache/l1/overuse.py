"""Tells operators which cache salts go beyond their quotas."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lmcache.core.limits import GIB, MAX_SALTS_NAMED
from lmcache.l1.quota_file import DEFAULT_SALT

log = logging.getLogger("lmcache.l1")


class OveruseLog:
    """One line for a salt in the life of a server, and for MAX_SALTS_NAMED of them."""

    def __init__(self) -> None:
        self._named: set[str] = set()
        self._is_full = False

    def say(self, overuses: Sequence[tuple[str, int]]) -> None:
        """(salt, limit in bytes) of those that stored, or wanted to store, beyond their limits."""
        for salt, limit_bytes in overuses:
            if salt in self._named or self._is_full:
                continue
            if len(self._named) >= MAX_SALTS_NAMED:
                self._is_full = True
                log.warning("More than %d cache salts go beyond their quotas; no others are named", MAX_SALTS_NAMED)
                continue
            self._named.add(salt)
            name = salt or DEFAULT_SALT
            if limit_bytes:
                log.info(
                    "Cache salt %r goes beyond its quota of %.3f GB: the excess is evicted from L1 within seconds",
                    name,
                    limit_bytes / GIB,
                )
            else:
                log.warning(
                    "Cache salt %r has no quota: what it stores is evicted from L1 within seconds; "
                    "`lmcache quota set SALT GB` gives it one",
                    name,
                )
