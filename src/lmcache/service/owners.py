"""Owners: the numbers under which the native core keeps what a registration holds.

An owner number is taken at registration and never used again. While its process runs, it holds a lock on the
byte of that number in the shared-memory file. When a registration ends while a copy into its slots may still be
running, by that process or by this server, the owner is quarantined: what it reserved stays taken until that is over.
"""

from __future__ import annotations

import logging

from lmcache.service.context import ServiceContext
from lmcache.service.socket_copies import SocketCopies

log = logging.getLogger("lmcache.service")


class Owners:
    def __init__(self, context: ServiceContext, copies: SocketCopies) -> None:
        self._memory = context.l1.memory
        self._core = context.l1.core
        self._locks = context.locks
        self._copies = copies
        self._quarantined: set[int] = set()

    def take(self) -> int:
        return self._memory.new_owner()

    def is_locked(self, owner: int) -> bool:
        """Whether a running process holds the owner's lock."""
        return self._locks.owner_alive(owner)

    def end(self, owner: int, *, graceful: bool = False) -> None:
        """Frees what the owner holds, or quarantines it. `graceful`: its process declared that it reads no more."""
        if self._copies.is_copying(owner) or (self.is_locked(owner) and not graceful):
            self._quarantined.add(owner)
            return
        ended = self._core.drop_owner(owner)
        if ended.leases or ended.reservations:
            log.info(
                "Released %d leases and %d reservations of an engine that has gone", ended.leases, ended.reservations
            )

    def quarantine(self, owner: int) -> None:
        """For an owner that registered with a previous server and may still write into its slots."""
        self._quarantined.add(owner)

    def release_quarantine(self) -> None:
        """Frees what quarantined owners hold, as soon as nobody can write there any more."""
        for owner in list(self._quarantined):
            if not self._copies.is_copying(owner) and not self.is_locked(owner):
                self._quarantined.discard(owner)
                self._core.drop_owner(owner)

    @property
    def quarantined(self) -> int:
        return len(self._quarantined)
