"""Registered instances: their scheduler sides, workers, sessions, and the namespaces of each cache salt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache.core import limits
from lmcache.core.key import Namespace
from lmcache.core.key_batch import NamespaceSet
from lmcache.core.rounding import div_ceil
from lmcache.errors import RemoteError
from lmcache.protocol.messages import ErrorCode, Ping, RegisterInstance, RegisterWorker, Unregister
from lmcache.service.context import ServiceContext
from lmcache.service.reservation import Reservations
from lmcache.service.session import Session
from lmcache.telemetry.metrics import ServiceMetrics

SCHEDULER_SIDE = -1  # as a worker id


@dataclass
class Registration:
    """The scheduler side of an instance, or one worker."""

    owner: int
    last_seen_seconds: float
    heartbeat_interval_seconds: float
    process: bytes  # random bytes of the client; empty: not given
    lock_seen: bool = field(default=False, kw_only=True)  # its process was seen to hold the owner's lock

    def is_from(self, process: bytes) -> bool:
        """Whether a message of that process may come from the client that registered."""
        return not process or not self.process or process == self.process

    def silent(self, now_seconds: float) -> bool:
        allowed = limits.HEARTBEAT_MISSES_BEFORE_LOST * self.heartbeat_interval_seconds
        return now_seconds - self.last_seen_seconds > allowed


@dataclass
class Worker(Registration):
    profile: RegisterWorker
    reservations: Reservations = field(default_factory=Reservations)


@dataclass
class Scheduler(Registration):
    profile: RegisterInstance


class Instance:
    def __init__(self, instance_id: str) -> None:
        self.instance_id = instance_id
        self.client = ""  # the name of the CURVE key that it registered with
        self.scheduler: Scheduler | None = None
        self.workers: dict[int, Worker] = {}
        self.sessions: dict[str, Session] = {}  # by request, least recently used first
        self.session_bytes = 0  # that `SessionTable` has counted for them
        self.leases: dict[int, Session] = {}
        self.tenants: dict[str, Tenant] = {}  # by cache salt, least recently used first
        self.registrations = 0  # that began or ended

    def registrations_changed(self) -> None:
        """What was made of them is void."""
        self.registrations += 1
        self.tenants.clear()

    def silent(self, now_seconds: float) -> bool:
        """Whether a part of it that is registered misses its heartbeats."""
        parts: list[Registration] = [*self.workers.values(), *([self.scheduler] if self.scheduler is not None else [])]
        return any(part.silent(now_seconds) for part in parts)

    def by_rank(self) -> dict[int, RegisterWorker]:
        """One registration a rank; workers of the same rank agree in what matters."""
        return {worker.profile.kv_rank: worker.profile for worker in self.workers.values()}

    def figures(self, now_seconds: float) -> dict[str, Any]:
        """For operators, as JSON values."""
        registrations = [*([self.scheduler] if self.scheduler else []), *self.workers.values()]
        quietest = min(registrations, key=lambda registration: registration.last_seen_seconds, default=None)
        profile = self.scheduler.profile if self.scheduler is not None else None
        transfer = [
            {"worker": number, "mode": worker.profile.transfer_mode, "reason": worker.profile.transfer_reason}
            for number, worker in sorted(self.workers.items())
        ]
        return {
            "instance_id": self.instance_id,
            "model_name": profile.model_name if profile is not None else None,
            "engine": profile.engine if profile is not None else None,
            "ranks": profile.kv_world_size if profile is not None else None,
            "workers": sorted(self.workers),
            "transfer": transfer,
            # Of the process that was silent longest.
            "heartbeat_age_seconds": round(now_seconds - quietest.last_seen_seconds, 3) if quietest else None,
            "heartbeat_interval_seconds": quietest.heartbeat_interval_seconds if quietest else None,
            "silent": any(registration.silent(now_seconds) for registration in registrations),
            "sessions": len(self.sessions),
            "leases": len(self.leases),
        }


class TenantCounters:
    """The series of one model and salt, looked up once."""

    def __init__(self, metrics: ServiceMetrics, model_name: str, cache_salt: str) -> None:
        labels = (model_name, cache_salt)
        self.lookups = metrics.lookups.labels(*labels)
        self.requested = metrics.lookup_requested.labels(*labels)
        self.hit = metrics.lookup_hit.labels(*labels)
        self.hit_l1 = metrics.lookup_hit_l1.labels(*labels)
        self.hit_l2 = metrics.lookup_hit_l2.labels(*labels)


def namespaces_of_rank(
    context: ServiceContext, profile: RegisterInstance, worker: RegisterWorker, cache_salt: str
) -> NamespaceSet:
    """One for each object group."""
    tail_chunks = tuple(div_ceil(tokens, context.hasher.chunk_tokens) for tokens in profile.tail_tokens)
    namespaces = tuple(
        Namespace(profile.model_name, profile.kv_world_size, worker.kv_rank, group, layout, cache_salt)
        for group, layout in enumerate(worker.layouts)
    )
    frame_bytes = tuple(context.l1.frame_bytes(payload_bytes) for payload_bytes in worker.payload_bytes)
    return NamespaceSet(namespaces, frame_bytes, tail_chunks if any(tail_chunks) else ())


def joined(ranks: Sequence[NamespaceSet]) -> NamespaceSet:
    """The namespaces of all ranks, [rank][group]."""
    return NamespaceSet(
        tuple(namespace for rank in ranks for namespace in rank.namespaces),
        tuple(size_bytes for rank in ranks for size_bytes in rank.frame_bytes),
        tuple(chunks for rank in ranks for chunks in rank.tail_chunks),
    )


class Tenant:
    """One cache salt of an instance: its namespaces and counters. Dropped when the registrations change."""

    def __init__(self, context: ServiceContext, instance: Instance, profile: RegisterInstance, cache_salt: str) -> None:
        self.counters = TenantCounters(context.metrics, profile.model_name, cache_salt)
        self._context = context
        self._instance = instance
        self._profile = profile
        self._cache_salt = cache_salt
        self._ranks: dict[int, NamespaceSet] = {}
        self._all_ranks: NamespaceSet | None = None

    def of_rank(self, worker: RegisterWorker) -> NamespaceSet:
        """The namespaces of the worker's rank, one for each object group."""
        if worker.kv_rank not in self._ranks:
            self._ranks[worker.kv_rank] = namespaces_of_rank(self._context, self._profile, worker, self._cache_salt)
        return self._ranks[worker.kv_rank]

    def of_all_ranks(self) -> NamespaceSet | None:
        """The namespaces of all ranks, [rank][group]. None while not every rank has a worker."""
        if self._all_ranks is None:
            workers = self._instance.by_rank()
            if len(workers) < self._profile.kv_world_size:
                return None
            self._all_ranks = joined([self.of_rank(workers[rank]) for rank in sorted(workers)])
        return self._all_ranks


class InstanceRegistry:
    """All instances. What is not registered is refused with UNKNOWN_INSTANCE."""

    def __init__(self, context: ServiceContext) -> None:
        self.instances: dict[str, Instance] = {}
        self._context = context

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

    def stores_in(self, instance_id: str, namespaces: NamespaceSet) -> bool:
        """Whether these namespaces, of one cache salt, are those of the instance's workers, one a rank."""
        instance = self.instances.get(instance_id)
        if instance is None or instance.scheduler is None:
            return False
        profile, salt = instance.scheduler.profile, namespaces.namespaces[0].cache_salt
        ranks = [
            namespaces_of_rank(self._context, profile, worker, salt) for _, worker in sorted(instance.by_rank().items())
        ]
        return b"".join(rank.digests for rank in ranks) == namespaces.digests

    def sender(self, message: Ping | Unregister) -> Registration | None:
        """Who sent this, if it is still registered: not another engine that took its name while it was away."""
        instance = self.instances.get(message.instance_id)
        if instance is None:
            return None
        registration: Registration | None = (
            instance.scheduler if message.worker_id == SCHEDULER_SIDE else instance.workers.get(message.worker_id)
        )
        return registration if registration is not None and registration.is_from(message.process) else None

    def tenant(self, instance: Instance, scheduler: Scheduler, cache_salt: str) -> Tenant:
        tenant = instance.tenants.pop(cache_salt, None)
        if tenant is None:
            if len(cache_salt.encode()) > limits.MAX_NAME_BYTES:
                raise RemoteError(ErrorCode.TOO_LARGE, f"A cache salt has at most {limits.MAX_NAME_BYTES} bytes.")
            while len(instance.tenants) >= _tenants_kept(scheduler.profile):
                del instance.tenants[next(iter(instance.tenants))]
            tenant = Tenant(self._context, instance, scheduler.profile, cache_salt)
        instance.tenants[cache_salt] = tenant
        return tenant


def _tenants_kept(profile: RegisterInstance) -> int:
    namespaces = profile.kv_world_size * profile.object_groups
    return min(limits.MAX_TENANTS_KEPT_PER_INSTANCE, max(1, limits.MAX_NAMESPACES_KEPT_PER_INSTANCE // namespaces))
