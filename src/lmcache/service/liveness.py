"""Who is still there. Heartbeats renew what an engine holds; silence ends it.

A party whose owner byte was locked and is no more is dead: all it held is freed at once. So is one that never locked
its byte (it maps no memory) and is silent for longer than two of its heartbeat intervals. One that is silent with its
byte locked still lives (stopped, or starved): it keeps what it holds until the TTLs run out; then its leases end and
its reservations are set aside until the lock is gone.
"""

from __future__ import annotations

import logging

from lmcache.clock import Clock
from lmcache.core.limits import L1_LATE_IO_SECONDS
from lmcache.l1.adoption import STORAGE_OWNER
from lmcache.l1.store import L1Store
from lmcache.protocol.messages import Empty, Ping, RegisterInstance, RegisterReply, RegisterWorker, Unregister
from lmcache.service.registry import Instance, OwnerLocks, Party, Registry

log = logging.getLogger("lmcache.service")

SCHEDULER_SIDE = -1
SWEEP_SECONDS = 1.0


class LivenessService:
    """Handlers of ping's heartbeat, register and unregister, and the sweep."""

    def __init__(
        self,
        registry: Registry,
        l1: L1Store,
        locks: OwnerLocks,
        clock: Clock,
        lease_ttl_seconds: float,
        reservation_ttl_seconds: float,
    ) -> None:
        self._registry = registry
        self._l1 = l1
        self._locks = locks
        self._clock = clock
        self._lease_ttl_seconds = lease_ttl_seconds
        self._reservation_ttl_seconds = reservation_ttl_seconds
        # Slots that the former server itself was loading into: its I/O may end after it.
        self._late_io: list[int] = []
        self._late_io_until = clock.monotonic() + L1_LATE_IO_SECONDS
        for owner, reservation in l1.adoption.set_aside:
            if owner == STORAGE_OWNER:
                self._late_io.append(reservation)
            else:
                registry.inherit(owner)

    def register_instance(self, message: RegisterInstance) -> RegisterReply:
        return RegisterReply(self._registry.register_instance(message))

    def register_worker(self, message: RegisterWorker) -> RegisterReply:
        return RegisterReply(self._registry.register_worker(message))

    def unregister(self, message: Unregister) -> Empty:
        instance = self._registry.instances.get(message.instance_id)
        if instance is None or self._party(instance, message) is None:
            return Empty()
        if message.worker_id == SCHEDULER_SIDE:
            self._registry.remove_scheduler(instance, said_so=True)
        else:
            self._registry.remove_worker(instance, message.worker_id, said_so=True)
        return Empty()

    def beat(self, message: Ping) -> bool:
        """Renews; False if the sender has to register."""
        instance = self._registry.instances.get(message.instance_id)
        if instance is None:
            return False
        party = self._party(instance, message)
        if party is None:
            return False
        now = self._clock.monotonic()
        party.last_seen_seconds = now
        ttl_seconds = self._lease_ttl_seconds if message.worker_id == SCHEDULER_SIDE else self._reservation_ttl_seconds
        self._l1.core.renew(party.owner, now + ttl_seconds)
        return True

    def _party(self, instance: Instance, message: Ping | Unregister) -> Party | None:
        """The sender, if it is registered: not another engine that came while the sender was away."""
        scheduler_side = message.worker_id == SCHEDULER_SIDE
        party: Party | None = instance.scheduler if scheduler_side else instance.workers.get(message.worker_id)
        return party if party is not None and party.is_of(message.process) else None

    def sweep(self) -> None:
        """Ends what nobody renews. To be called about every SWEEP_SECONDS while there is anybody."""
        now = self._clock.monotonic()
        for instance in list(self._registry.instances.values()):
            if instance.scheduler is not None and self._dead(instance.scheduler, now):
                log.warning("The scheduler side of instance %s has died", instance.instance_id)
                self._registry.remove_scheduler(instance, said_so=False)
            for worker_id, worker in list(instance.workers.items()):
                if self._dead(worker, now):
                    log.warning("Worker %d of instance %s has died", worker_id, instance.instance_id)
                    self._registry.remove_worker(instance, worker_id, said_so=False)
        self._registry.drop_retired()
        if now >= self._late_io_until:
            while self._late_io:
                self._l1.core.abort(self._late_io.pop())
        leases, reservations = self._l1.core.expire(now)
        if leases:
            log.warning("%d leases ended because their engine lives and did not renew them", leases)
        if reservations:
            log.warning("%d reservations are set aside: their worker lives and did not renew them", reservations)

    @property
    def needed(self) -> bool:
        """Whether a sweep can find anything."""
        return bool(self._registry.instances) or bool(self._registry.retired) or bool(self._late_io)

    def _dead(self, party: Party, now: float) -> bool:
        if self._locks.owner_alive(party.owner):
            party.lock_seen = True
            return False
        return party.lock_seen or party.silent(now)
