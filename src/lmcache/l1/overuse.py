"""Logs which cache salts go beyond their quotas."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lmcache._native import Overuse
from lmcache.core.key import DEFAULT_SALT
from lmcache.core.limits import GIB, MAX_SALTS_NAMED

logger = logging.getLogger("lmcache.l1")


class OveruseLog:
    """One line for each salt while a server runs, for at most MAX_SALTS_NAMED of them."""

    def __init__(self) -> None:
        self._named: set[str] = set()
        self._is_full = False

    def log(self, overuses: Sequence[Overuse]) -> None:
        for overuse in overuses:
            salt, limit_bytes = overuse.salt, overuse.limit_bytes
            if salt in self._named or self._is_full:
                continue
            if len(self._named) >= MAX_SALTS_NAMED:
                self._is_full = True
                logger.warning("More than %d cache salts go beyond their quotas; no others are named", MAX_SALTS_NAMED)
                continue
            self._named.add(salt)
            name = salt or DEFAULT_SALT
            if limit_bytes:
                logger.info(
                    "Cache salt %r goes beyond its quota of %.3f GB: the excess is evicted from L1 within seconds",
                    name,
                    limit_bytes / GIB,
                )
            else:
                logger.warning(
                    "Cache salt %r has no quota: what it stores is evicted from L1 within seconds; "
                    "`lmcache quota set SALT GB` gives it one",
                    name,
                )
