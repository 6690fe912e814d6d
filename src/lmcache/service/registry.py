"""Who is registered: instances, their workers, and the owner numbers under which the native core keeps what they hold.

Life of an owner number: taken at registration, never used again. While its process lives, the process holds a lock on
the byte of that number in the shared-memory file. When a registration ends while the byte is still locked, a copy may
still be running, so what the owner had reserved stays taken (`_retired`) until the lock is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from lmcache.clock import Clock
from lmcache.core import limits
from lmcache.errors import RemoteError
from lmcache.l1.store import L1Store
from lmcache.protocol.messages import ErrorCode, RegisterInstance, RegisterWorker
from lmcache.service.checks import check_instance, check_worker
from lmcache.service.keyspace import Keyspace, TenantCounters, rank_keyspace, whole_keyspace
from lmcache.service.reservation import Reservations
from lmcache.service.session import Session
from lmcache.telemetry.metrics import Metrics

log = logging.getLogger("lmcache.service")


class OwnerLocks(Protocol):
    def owner_alive(self, owner: int) -> bool:
        """Whether a process holds the lock of that owner."""
        ...


@dataclass
class Party:
    """The scheduler side of an instance, or one worker."""

    owner: int
    last_seen_seconds: float
    heartbeat_interval_seconds: float
    process: bytes  # of the client; empty: not said
    lock_seen: bool = field(default=False, kw_only=True)  # its process has shown that it lives

    def is_of(self, process: bytes) -> bool:
        """Whether a message that says so may come from the client that registered."""
        return not process or not self.process or process == self.process

    def silent(self, now: float) -> bool:
        allowed = limits.HEARTBEAT_MISSES_BEFORE_LOST * self.heartbeat_interval_seconds
        return now - self.last_seen_seconds > allowed


@dataclass
class Worker(Party):
    registration: RegisterWorker
    reservations: Reservations = field(default_factory=Reservations)


@dataclass
class Scheduler(Party):
    registration: RegisterInstance


@dataclass
class Tenant:
    """What is known for one salt of an instance. Built from the registrations, dropped when they change."""

    counters: TenantCounters
    ranks: dict[int, Keyspace] = field(default_factory=dict)
    whole: Keyspace | None = None


class Instance:
    def __init__(self, instance_id: str) -> None:
        self.instance_id = instance_id
        self.scheduler: Scheduler | None = None
        self.workers: dict[int, Worker] = {}
        self.sessions: dict[str, Session] = {}  # by request, least recently used first
        self.session_bytes = 0  # that `Sessions` has counted for them
        self.leases: dict[int, Session] = {}
        self.tenants: dict[str, Tenant] = {}

    def by_rank(self) -> dict[int, RegisterWorker]:
        """One registration a rank; workers of the same rank agree in what matters."""
        return {worker.registration.kv_rank: worker.registration for worker in self.workers.values()}


class Registry:
    """All instances. `on_scheduler_gone` settles an instance's sessions before its owner number ends.

    `is_copying` tells whether this server itself still writes into slots of an owner."""

    def __init__(self, l1: L1Store, locks: OwnerLocks, metrics: Metrics, clock: Clock, chunk_tokens: int) -> None:
        self.instances: dict[str, Instance] = {}
        self.on_scheduler_gone: Callable[[Instance], None] = lambda instance: None
        self.is_copying: Callable[[int], bool] = lambda owner: False
        self._l1 = l1
        self._locks = locks
        self._metrics = metrics
        self._clock = clock
        self._chunk_tokens = chunk_tokens
        self._retired: set[int] = set()

    # ---- finding -----------------------------------------------------------------------------------------------------
    def scheduled(self, instance_id: str) -> tuple[Instance, Scheduler]:
        instance = self.instances.get(instance_id)
        if instance is None or instance.scheduler is None:
            raise RemoteError(
                ErrorCode.UNKNOWN_INSTANCE, f"Instance {instance_id!r} is not registered; register first."
            )
        return instance, instance.scheduler

    def worker(self, instance_id: str, worker_id: int) -> tuple[Instance, Worker]:
        instance = self.instances.get(instance_id)
        worker = instance.workers.get(worker_id) if instance is not None else None
        if instance is None or worker is None:
            raise RemoteError(
                ErrorCode.UNKNOWN_INSTANCE,
                f"Worker {worker_id} of instance {instance_id!r} is not registered; register first.",
            )
        return instance, worker

    def tenant(self, instance: Instance, scheduler: Scheduler, cache_salt: str) -> Tenant:
        tenant = instance.tenants.get(cache_salt)
        if tenant is None:
            if len(cache_salt.encode()) > limits.MAX_NAME_BYTES:
                raise RemoteError(ErrorCode.TOO_LARGE, f"A cache salt has at most {limits.MAX_NAME_BYTES} bytes.")
            while len(instance.tenants) >= _tenants_kept(scheduler.registration):
                del instance.tenants[next(iter(instance.tenants))]
            tenant = Tenant(TenantCounters(self._metrics, scheduler.registration.model_name, cache_salt))
            instance.tenants[cache_salt] = tenant
        return tenant

    def rank_keyspace(self, instance: Instance, worker: Worker, cache_salt: str) -> Keyspace:
        """RemoteError while the scheduler side, which names the model, has not registered."""
        _, scheduler = self.scheduled(instance.instance_id)
        tenant = self.tenant(instance, scheduler, cache_salt)
        rank = worker.registration.kv_rank
        keyspace = tenant.ranks.get(rank)
        if keyspace is None:
            keyspace = self._name(scheduler.registration, worker.registration, cache_salt)
            tenant.ranks[rank] = keyspace
        return keyspace

    def whole_keyspace(self, instance: Instance, cache_salt: str) -> Keyspace | None:
        """None while not every rank has a worker."""
        _, scheduler = self.scheduled(instance.instance_id)
        tenant = self.tenant(instance, scheduler, cache_salt)
        if tenant.whole is None:
            workers = instance.by_rank()
            if len(workers) < scheduler.registration.kv_world_size:
                return None
            ranks = [self._name(scheduler.registration, workers[rank], cache_salt) for rank in sorted(workers)]
            tenant.whole = whole_keyspace(ranks)
        return tenant.whole

    def _name(self, profile: RegisterInstance, worker: RegisterWorker, cache_salt: str) -> Keyspace:
        return rank_keyspace(self._l1, profile, worker, cache_salt, self._chunk_tokens)

    # ---- coming ------------------------------------------------------------------------------------------------------
    def register_instance(self, message: RegisterInstance) -> int:
        """Idempotent while the process that registered lives. A new process ends what the former one held."""
        check_instance(message)
        instance = self.instances.get(message.instance_id)
        former = instance.scheduler if instance is not None else None
        if instance is not None and former is not None:
            self._refuse_another(message, former)
            same_process_may_live = self._locks.owner_alive(former.owner)
            if former.registration == message and same_process_may_live:
                former.last_seen_seconds = self._clock.monotonic()
                return former.owner
            if same_process_may_live and not former.silent(self._clock.monotonic()):
                raise RemoteError(
                    ErrorCode.LAYOUT_CONFLICT,
                    f"Instance {message.instance_id!r} is registered with other properties by a process that lives.",
                )
        for worker in instance.workers.values() if instance is not None else ():
            check_worker(worker.registration, message, ())
        if instance is None:
            instance = self._new_instance(message.instance_id)
        elif former is not None:
            self._end_scheduler(instance, former)
        owner = self._l1.memory.new_owner()
        now = self._clock.monotonic()
        instance.scheduler = Scheduler(owner, now, message.heartbeat_interval_seconds, message.process, message)
        instance.tenants.clear()
        log.info(
            "Instance %s registered: model %s, %d ranks, %d object groups, %s",
            message.instance_id,
            message.model_name,
            message.kv_world_size,
            message.object_groups,
            message.engine or "engine not named",
        )
        return owner

    def register_worker(self, message: RegisterWorker) -> int:
        """Ends what a former life of this worker held."""
        instance = self.instances.get(message.instance_id)
        scheduler = instance.scheduler if instance is not None else None
        others = instance.workers.values() if instance is not None else ()
        check_worker(
            message,
            scheduler.registration if scheduler is not None else None,
            [other.registration for other in others if other.registration.worker_id != message.worker_id],
        )
        if instance is None:
            instance = self._new_instance(message.instance_id)
        former = instance.workers.get(message.worker_id)
        if former is not None:
            self._refuse_another(message, former)
            del instance.workers[message.worker_id]
            self._end_owner(former.owner)
        owner = self._l1.memory.new_owner()
        now = self._clock.monotonic()
        instance.workers[message.worker_id] = Worker(
            owner, now, message.heartbeat_interval_seconds, message.process, message
        )
        instance.tenants.clear()
        log.info(
            "Worker %d of instance %s registered as rank %d, transfer mode %s",
            message.worker_id,
            message.instance_id,
            message.kv_rank,
            f"{message.transfer_mode}: {message.transfer_reason}" if message.transfer_reason else message.transfer_mode,
        )
        return owner

    def _refuse_another(self, message: RegisterInstance | RegisterWorker, former: Party) -> None:
        """Two engines under one name would take each other's sessions for their own."""
        if former.is_of(message.process):
            return
        gone = former.lock_seen or former.silent(self._clock.monotonic())
        if self._locks.owner_alive(former.owner) or not gone:
            raise RemoteError(
                ErrorCode.LAYOUT_CONFLICT,
                f"Instance {message.instance_id!r} is registered by another engine that lives: give each engine an "
                "engine_id of its own, or none.",
            )

    def _new_instance(self, instance_id: str) -> Instance:
        if len(self.instances) >= limits.MAX_INSTANCES:
            raise RemoteError(ErrorCode.TOO_MANY, f"{limits.MAX_INSTANCES} instances are registered already.")
        instance = self.instances[instance_id] = Instance(instance_id)
        return instance

    # ---- going -------------------------------------------------------------------------------------------------------
    def remove_scheduler(self, instance: Instance, *, said_so: bool) -> None:
        """`said_so`: the process itself declared that it reads no more."""
        if instance.scheduler is not None:
            self._end_scheduler(instance, instance.scheduler, said_so=said_so)
        self._forget_if_empty(instance)

    def remove_worker(self, instance: Instance, worker_id: int, *, said_so: bool) -> None:
        worker = instance.workers.pop(worker_id, None)
        if worker is not None:
            self._end_owner(worker.owner, said_so=said_so)
            instance.tenants.clear()
        self._forget_if_empty(instance)

    def inherit(self, owner: int) -> None:
        """An owner of a former life of the server, who may still write into slots that are set aside for it."""
        self._retired.add(owner)

    def drop_retired(self) -> None:
        """Frees what ended registrations held, for those whose process has gone since."""
        for owner in [owner for owner in self._retired if not self._may_be_written(owner)]:
            self._retired.discard(owner)
            self._l1.core.drop_owner(owner)

    @property
    def retired(self) -> int:
        return len(self._retired)

    def _end_scheduler(self, instance: Instance, scheduler: Scheduler, *, said_so: bool = False) -> None:
        self.on_scheduler_gone(instance)
        instance.scheduler = None
        instance.tenants.clear()
        self._end_owner(scheduler.owner, said_so=said_so)

    def _end_owner(self, owner: int, *, said_so: bool = False) -> None:
        if not self.is_copying(owner) and (said_so or not self._locks.owner_alive(owner)):
            leases, reservations = self._l1.core.drop_owner(owner)
            if leases or reservations:
                log.info("Released %d leases and %d reservations of an engine that has gone", leases, reservations)
        else:
            self._retired.add(owner)

    def _may_be_written(self, owner: int) -> bool:
        return self.is_copying(owner) or self._locks.owner_alive(owner)

    def _forget_if_empty(self, instance: Instance) -> None:
        if instance.scheduler is None and not instance.workers:
            self.instances.pop(instance.instance_id, None)
            log.info("Instance %s has gone", instance.instance_id)


def _tenants_kept(profile: RegisterInstance) -> int:
    namespaces = profile.kv_world_size * profile.object_groups
    return min(limits.MAX_TENANTS_KEPT_PER_INSTANCE, max(1, limits.MAX_NAMESPACES_KEPT_PER_INSTANCE // namespaces))
