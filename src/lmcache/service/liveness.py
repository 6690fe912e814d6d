"""Registrations, from their beginning to their end.

Heartbeats renew what a registration holds; silence or the death of its process ends it. One whose owner byte was locked
and no longer is, is dead: all that it held is freed at once. So is one that never locked its byte (it maps no memory)
and is silent for longer than two of its heartbeat intervals. One that is silent while its byte is locked is alive
(stopped, or starved): it keeps what it holds until the TTLs run out; then its leases end and its reservations are
quarantined until the lock is gone.
"""

from __future__ import annotations

import logging

from lmcache.core import limits
from lmcache.core.key import accepted_lossy_serde
from lmcache.core.limits import L1_LATE_IO_SECONDS
from lmcache.errors import RemoteError
from lmcache.memory.ownership import STORAGE_OWNER
from lmcache.protocol.messages import (
    Empty,
    ErrorCode,
    Ping,
    RegisterInstance,
    RegisterReply,
    RegisterWorker,
    Unregister,
)
from lmcache.service.context import ServiceContext
from lmcache.service.instances import (
    SCHEDULER_SIDE,
    Instance,
    InstanceRegistry,
    Registration,
    Scheduler,
    Worker,
    namespaces_of_rank,
)
from lmcache.service.message_checks import check_instance, check_worker
from lmcache.service.owners import Owners
from lmcache.service.session_table import SessionTable

log = logging.getLogger("lmcache.service")

SWEEP_SECONDS = 1.0


class LivenessService:
    """Handlers of register and unregister, the heartbeat of ping, and the sweep that ends what nobody renews.

    While nothing is registered or quarantined nothing is swept, so an idle server sleeps."""

    def __init__(
        self, context: ServiceContext, registry: InstanceRegistry, sessions: SessionTable, owners: Owners
    ) -> None:
        self._context = context
        self._settings = context.settings
        self._metrics = context.metrics
        self._core = context.l1.core
        self._locks = context.locks
        self._clock = context.clock
        self._loop = context.loop
        self._registry = registry
        self._sessions = sessions
        self._owners = owners
        self._sweeping = False
        self._closed = False
        # Reservations of slots that the previous server itself was loading into: its I/O may end after it, and a
        # process that loaded for it, too.
        self._late_io: list[int] = []
        self._late_io_until = self._clock.monotonic() + L1_LATE_IO_SECONDS
        for quarantined in context.l1.recovered.quarantined:
            if quarantined.owner == STORAGE_OWNER:
                self._late_io.append(quarantined.reservation)
            else:
                owners.quarantine(quarantined.owner)

    def start(self) -> None:
        """On the message loop, as everything here."""
        self._begin_sweeping()

    def close(self) -> None:
        self._closed = True

    # ---- register ----------------------------------------------------------------------------------------------------
    def register_instance(self, message: RegisterInstance) -> RegisterReply:
        """Idempotent while the process that registered runs. A new process ends what the previous one held."""
        check_instance(message)
        instance = self._registry.instances.get(message.instance_id)
        previous = instance.scheduler if instance is not None else None
        if instance is not None and previous is not None:
            self._refuse_another(message, previous)
            same_process_may_live = self._owners.is_locked(previous.owner)
            if previous.profile == message and same_process_may_live:
                previous.last_seen_seconds = self._clock.monotonic()
                return RegisterReply(previous.owner)
            if same_process_may_live and not previous.silent(self._clock.monotonic()):
                raise RemoteError(
                    ErrorCode.LAYOUT_CONFLICT,
                    f"Instance {message.instance_id!r} is registered with other properties by a process that lives.",
                )
        for worker in instance.workers.values() if instance is not None else ():
            check_worker(worker.profile, message, ())
        if instance is None:
            instance = self._new_instance(message.instance_id)
        elif previous is not None:
            self._end_scheduler(instance, previous)
        owner = self._owners.take()
        now_seconds = self._clock.monotonic()
        instance.scheduler = Scheduler(owner, now_seconds, message.heartbeat_interval_seconds, message.process, message)
        instance.registrations_changed()
        log.info(
            "Instance %s registered: model %s, %d ranks, %d object groups, %s",
            message.instance_id,
            message.model_name,
            message.kv_world_size,
            message.object_groups,
            message.engine or "engine not named",
        )
        self._note_ranks(instance, instance.scheduler.profile)
        self._begin_sweeping()
        return RegisterReply(owner)

    def register_worker(self, message: RegisterWorker) -> RegisterReply:
        """Ends what an earlier registration of this worker held."""
        instance = self._registry.instances.get(message.instance_id)
        scheduler = instance.scheduler if instance is not None else None
        others = instance.workers.values() if instance is not None else ()
        check_worker(
            message,
            scheduler.profile if scheduler is not None else None,
            [other.profile for other in others if other.profile.worker_id != message.worker_id],
        )
        if instance is None:
            instance = self._new_instance(message.instance_id)
        previous = instance.workers.get(message.worker_id)
        if previous is not None:
            self._refuse_another(message, previous)
            self._end_worker(instance, message.worker_id)
        owner = self._owners.take()
        now_seconds = self._clock.monotonic()
        instance.workers[message.worker_id] = Worker(
            owner, now_seconds, message.heartbeat_interval_seconds, message.process, message
        )
        instance.registrations_changed()
        log.info(
            "Worker %d of instance %s registered as rank %d, transfer mode %s",
            message.worker_id,
            message.instance_id,
            message.kv_rank,
            f"{message.transfer_mode}: {message.transfer_reason}" if message.transfer_reason else message.transfer_mode,
        )
        served_serdes = self._settings.lossy_serdes
        for serde in sorted({accepted_lossy_serde(layout) for layout in message.layouts} - {""} - served_serdes):
            log.warning(
                'It accepts the lossy serde "%s", which no --l2-adapter has: this KV is in L1 alone',
                serde,
            )
        if scheduler is not None:
            self._note_ranks(instance, scheduler.profile)
        self._begin_sweeping()
        return RegisterReply(owner)

    def _note_ranks(self, instance: Instance, profile: RegisterInstance) -> None:
        """If all are there, and their layouts differ."""
        workers = sorted(instance.by_rank().items())
        if len(workers) == profile.kv_world_size and len({tuple(worker.layouts) for _, worker in workers}) > 1:
            context = self._context
            context.note_ranks([namespaces_of_rank(context, profile, worker, "").namespaces for _, worker in workers])

    def _refuse_another(self, message: RegisterInstance | RegisterWorker, previous: Registration) -> None:
        """Two engines under one name would take each other's sessions for their own."""
        if previous.is_from(message.process):
            return
        gone = previous.lock_seen or previous.silent(self._clock.monotonic())
        if self._owners.is_locked(previous.owner) or not gone:
            raise RemoteError(
                ErrorCode.LAYOUT_CONFLICT,
                f"Instance {message.instance_id!r} is registered by another engine that lives: give each engine an "
                "engine_id of its own, or none.",
            )

    def _new_instance(self, instance_id: str) -> Instance:
        instances = self._registry.instances
        if len(instances) >= limits.MAX_INSTANCES:
            raise RemoteError(ErrorCode.TOO_MANY, f"{limits.MAX_INSTANCES} instances are registered already.")
        instance = instances[instance_id] = Instance(instance_id)
        return instance

    # ---- heartbeat ---------------------------------------------------------------------------------------------------
    def beat(self, message: Ping) -> bool:
        """Renews what the sender holds. False if it has to register."""
        registration = self._registry.sender(message)
        if registration is None:
            return False
        now_seconds = self._clock.monotonic()
        registration.last_seen_seconds = now_seconds
        is_scheduler, settings = message.worker_id == SCHEDULER_SIDE, self._settings
        ttl_seconds = settings.lease_ttl_seconds if is_scheduler else settings.reservation_ttl_seconds
        self._core.renew(registration.owner, now_seconds + ttl_seconds)
        return True

    # ---- end ---------------------------------------------------------------------------------------------------------
    def unregister(self, message: Unregister) -> Empty:
        """The sender declares that it reads and writes no more."""
        if self._registry.sender(message) is not None:
            self._remove(self._registry.instances[message.instance_id], message.worker_id, graceful=True)
        return Empty()

    def _remove(self, instance: Instance, worker_id: int, *, graceful: bool) -> None:
        if worker_id != SCHEDULER_SIDE:
            self._end_worker(instance, worker_id, graceful=graceful)
            instance.registrations_changed()
        elif instance.scheduler is not None:
            self._end_scheduler(instance, instance.scheduler, graceful=graceful)
        if instance.scheduler is None and not instance.workers:
            del self._registry.instances[instance.instance_id]
            log.info("Instance %s has gone", instance.instance_id)

    def _end_worker(self, instance: Instance, worker_id: int, *, graceful: bool = False) -> None:
        worker = instance.workers.pop(worker_id)
        self._metrics.num_finished_stores.inc(len(worker.reservations))
        self._owners.end(worker.owner, graceful=graceful)

    def _end_scheduler(self, instance: Instance, scheduler: Scheduler, *, graceful: bool = False) -> None:
        self._sessions.end_all(instance)
        instance.scheduler = None
        instance.registrations_changed()
        self._owners.end(scheduler.owner, graceful=graceful)

    # ---- sweep -------------------------------------------------------------------------------------------------------
    @property
    def needed(self) -> bool:
        """Whether a sweep can find anything."""
        return bool(self._registry.instances or self._owners.quarantined or self._late_io)

    def _begin_sweeping(self) -> None:
        if not self._sweeping and self.needed:
            self._sweeping = True
            self._loop.call_later(SWEEP_SECONDS, self._sweep_and_go_on)

    def _sweep_and_go_on(self) -> None:
        if self._closed:
            return
        try:
            self.sweep()
        finally:
            self._sweeping = False
            self._begin_sweeping()

    def sweep(self) -> None:
        """Ends what nobody renews."""
        now_seconds = self._clock.monotonic()
        for instance in list(self._registry.instances.values()):
            if instance.scheduler is not None and self._is_dead(instance.scheduler, now_seconds):
                log.warning("The scheduler side of instance %s has died", instance.instance_id)
                self._remove(instance, SCHEDULER_SIDE, graceful=False)
            for worker_id, worker in list(instance.workers.items()):
                if self._is_dead(worker, now_seconds):
                    log.warning("Worker %d of instance %s has died", worker_id, instance.instance_id)
                    self._remove(instance, worker_id, graceful=False)
        self._owners.release_quarantine()
        if now_seconds >= self._late_io_until and self._late_io and not self._locks.other_writer_lives():
            while self._late_io:
                self._core.abort(self._late_io.pop())
        ended = self._core.expire(now_seconds)
        if ended.leases:
            log.warning("%d leases ended because their engine lives and did not renew them", ended.leases)
        if ended.reservations:
            log.warning(
                "%d reservations are quarantined: their worker lives and did not renew them", ended.reservations
            )

    def _is_dead(self, registration: Registration, now_seconds: float) -> bool:
        if self._owners.is_locked(registration.owner):
            registration.lock_seen = True
            return False
        is_dead = registration.lock_seen or registration.silent(now_seconds)
        if is_dead:
            self._metrics.registrations_lost.inc()
        return is_dead
