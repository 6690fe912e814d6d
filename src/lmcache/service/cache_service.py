"""The methods that engines can call, and the parts of the service behind them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lmcache import __version__
from lmcache.errors import LMCacheError, RemoteError
from lmcache.protocol.messages import (
    METHODS,
    OLDEST_SUPPORTED_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Clear,
    ClearReply,
    Empty,
    ErrorCode,
    Hello,
    HelloReply,
    Message,
    Ping,
    PingReply,
    TransferMode,
)
from lmcache.service.cache_operations import Registered
from lmcache.service.chunk_changes import ChunkChangeService
from lmcache.service.client_access import ClientAccess
from lmcache.service.context import ServiceContext
from lmcache.service.instances import InstanceRegistry
from lmcache.service.key_probes import KeyProbeService
from lmcache.service.liveness import LivenessService
from lmcache.service.lookup import LookupService
from lmcache.service.lookup_counts import LookupCounts
from lmcache.service.owners import Owners
from lmcache.service.session_table import SessionTable
from lmcache.service.socket_copies import SocketCopies
from lmcache.service.socket_frames import SocketFrameService
from lmcache.service.stores import StoreService
from lmcache.telemetry.metrics import ServiceMetrics
from lmcache.tiering.storage_loop import TIERS
from lmcache.transport.deferred import Deferred
from lmcache.transport.rpc_server import Method

log = logging.getLogger("lmcache.service")

TRANSFER_MODES = [mode.value for mode in TransferMode]
_MAY_DEFER = ("lookup", "lookup_keys", "probe_keys", "commit", "write", "read", "clear")
_MAX_CLEARS_WAITING = 4
STORAGE_SILENT_SECONDS = 5.0
_TURN_SECONDS = 1.0  # what the message loop gets to end what it is doing


class CacheService:
    """Builds the parts of the service. `start` begins to serve calls on the message loop."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._loop = context.loop
        self._storage = context.storage
        self._clock = context.clock
        # One thread: a copy is faster than the network, and the order of a frame's parts is kept.
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="lmcache-payload")
        copies = SocketCopies(self._loop, self._copying)
        self._registry = InstanceRegistry(context)
        self._sessions = SessionTable(context.l1.core, context.hasher, context.metrics, context.clock, context.prompts)
        self._liveness = LivenessService(context, self._registry, self._sessions, Owners(context, copies))
        counts = LookupCounts(context)
        self._lookups = LookupService(context, self._registry, self._sessions, counts)
        self._probes = KeyProbeService(context, self._registry, counts)
        self._changes = ChunkChangeService(context, self._registry)
        self._stores = StoreService(context, self._registry)
        self._socket_frames = SocketFrameService(context, self._registry, copies)
        self._access = ClientAccess(self._loop, self._registry)
        self._storage_probed_at: float | None = None
        self._clears_waiting = 0
        self._clearer = ThreadPoolExecutor(1, thread_name_prefix="lmcache-clear")

    def start(self) -> None:
        self._loop.start(self._methods())
        self._loop.post(self._liveness.start)

    def close(self) -> None:
        """Ends copies and sweeps: L1 is unmapped next."""
        self._liveness.close()
        self._loop.responsive(_TURN_SECONDS)
        self._copying.shutdown()  # a copy takes a millisecond
        self._clearer.shutdown(wait=False, cancel_futures=True)

    def _methods(self) -> dict[str, Method]:
        handlers: dict[str, Callable[[Any], Message | Deferred]] = {
            "hello": self._hello,
            "ping": self._ping,
            "noop": lambda message: Empty(),
            "register_instance": self._liveness.register_instance,
            "register_worker": self._liveness.register_worker,
            "unregister": self._liveness.unregister,
            "lookup": self._lookups.lookup,
            "append": self._lookups.append,
            "lookup_keys": self._lookups.lookup_keys,
            "probe_keys": self._probes.probe_keys,
            "release": self._lookups.release,
            "end_session": self._lookups.end_session,
            "chunk_changes": self._changes.chunk_changes,
            "reserve": self._stores.reserve,
            "commit": self._stores.commit,
            "write": self._socket_frames.write,
            "read": self._socket_frames.read,
            "clear": self._clear,
        }
        assert handlers.keys() == METHODS.keys()
        return {
            name: Method(METHODS[name][0], self._access.guarded(handler), may_defer=name in _MAY_DEFER)
            for name, handler in handlers.items()
        }

    # ---- connection --------------------------------------------------------------------------------------------------
    def _hello(self, message: Hello) -> HelloReply:
        oldest = message.oldest_protocol_version or message.protocol_version
        spoken = min(message.protocol_version, PROTOCOL_VERSION)
        if spoken < max(oldest, OLDEST_SUPPORTED_PROTOCOL_VERSION):
            raise RemoteError(
                ErrorCode.UNSUPPORTED_VERSION,
                f"This server ({__version__}) speaks protocol versions {OLDEST_SUPPORTED_PROTOCOL_VERSION} to "
                f"{PROTOCOL_VERSION}, the client ({message.client_version[:64] or 'unnamed'}) {oldest} to "
                f"{message.protocol_version}: upgrade the older side.",
            )
        settings, hasher, memory = self._context.settings, self._context.hasher, self._context.l1.memory
        reply = HelloReply(
            protocol_version=spoken,
            server_version=__version__,
            server_epoch=settings.server_epoch,
            chunk_tokens=hasher.chunk_tokens,
            hash_algorithm=hasher.algorithm,
            transfer_modes=TRANSFER_MODES,
            shm_path=memory.path,
            shm_bytes=memory.size_bytes,
            lease_ttl_seconds=settings.lease_ttl_seconds,
            reservation_ttl_seconds=settings.reservation_ttl_seconds,
            peer_address=settings.peer_address,
        )
        return self._access.hello(reply)

    def _ping(self, message: Ping) -> PingReply:
        registered = bool(message.instance_id) and self._liveness.beat(message)
        if registered:
            self._count(message.counts)
        return PingReply(self._context.settings.server_epoch, registered, self._storage_answers())

    def _count(self, counts: list[int]) -> None:
        for result, count in zip(("told", "lost"), counts, strict=False):
            self._context.metrics.request_telemetry.labels(result).inc(max(0, count))

    def _storage_answers(self) -> bool:
        """Probes the storage loop without waiting for it: False once a probe has stayed unanswered for a while."""
        now_seconds = self._clock.monotonic()
        if self._storage_probed_at is None:
            self._storage_probed_at = now_seconds
            self._storage.call_soon(lambda: self._loop.post(self._storage_answered))
        return now_seconds - self._storage_probed_at < STORAGE_SILENT_SECONDS

    def _storage_answered(self) -> None:
        self._storage_probed_at = None

    # ---- administration ----------------------------------------------------------------------------------------------
    def _clear(self, message: Clear) -> Deferred:
        if message.tier not in TIERS:
            raise RemoteError(ErrorCode.BAD_REQUEST, f"The tier must be one of {', '.join(TIERS)}.")
        if self._clears_waiting >= _MAX_CLEARS_WAITING:
            raise RemoteError(ErrorCode.TOO_MANY, "Other clears are still running; try again later.")
        deferred = Deferred()
        client = self._loop.caller
        caller = f"engine with the key {client.name}" if client is not None else "engine"

        def audit(outcome: str, **figures: int) -> None:
            self._context.audit("cache.clear", caller, {"tier": message.tier, **figures}, outcome)

        def done() -> None:
            self._clears_waiting -= 1

        def clear() -> None:  # on a thread of its own: L2 may take long
            try:
                objects, size_bytes = self._storage.clear(message.tier)
                audit("ok", objects=objects, bytes=size_bytes)
                deferred.answer(ClearReply(objects, size_bytes))
            except LMCacheError as error:
                audit(str(error))
                deferred.answer(RemoteError(ErrorCode.INTERNAL, str(error)))
            except Exception:
                log.exception("Clearing %s failed", message.tier)
                audit("failed; see the server's log")
                deferred.answer(
                    RemoteError(ErrorCode.INTERNAL, f"Clearing {message.tier} failed; see the server's log.")
                )
            finally:
                self._loop.post(done)

        self._clears_waiting += 1
        self._clearer.submit(clear)
        return deferred

    def registered(self, model_name: str, instance_id: str) -> list[Registered]:
        """Instances of that model, all of them or one, of which every rank has registered. On the message loop's thread
        only."""
        found = []
        for instance in self._registry.instances.values():
            profile = instance.scheduler.profile if instance.scheduler is not None else None
            if profile is None or (model_name and profile.model_name != model_name):
                continue
            ranks = instance.by_rank()
            if len(ranks) >= profile.kv_world_size and instance_id in ("", instance.instance_id):
                found.append(Registered(profile, tuple(ranks[rank] for rank in sorted(ranks))))
        return found

    def publish(self, metrics: ServiceMetrics) -> None:
        """Brings metrics that are read up to date. On the message loop's thread only."""
        self._lookups.publish()
        instances = self._registry.instances.values()
        leases = [len(instance.leases) for instance in instances]
        reservations = [worker.reservations for instance in instances for worker in instance.workers.values()]
        now_seconds = self._clock.monotonic()
        metrics.instances.set(len(instances))
        metrics.instances_silent.set(sum(instance.silent(now_seconds) for instance in instances))
        metrics.sessions.set(sum(len(instance.sessions) for instance in instances))
        metrics.leases.set(sum(leases))
        metrics.reservations.set(sum(map(len, reservations)))
        # In the order in which they were given.
        leased_at = [next(iter(instance.leases.values())).leased_at for instance in instances if instance.leases]
        began_at = [held.oldest_began_at for held in reservations]
        metrics.lease_oldest_seconds.set(now_seconds - min(leased_at, default=now_seconds))
        metrics.reservation_oldest_seconds.set(
            now_seconds - min((at for at in began_at if at is not None), default=now_seconds)
        )

    def snapshot(self) -> dict[str, Any]:
        """Figures for operators, as JSON values. On the message loop's thread only."""
        instances = self._registry.instances.values()
        now_seconds = self._clock.monotonic()
        return {
            "sessions": sum(len(instance.sessions) for instance in instances),
            "session_bytes": self._sessions.size_bytes,
            "leases": sum(len(instance.leases) for instance in instances),
            "reservations": sum(
                len(worker.reservations) for instance in instances for worker in instance.workers.values()
            ),
            "instances": [instance.figures(now_seconds) for instance in instances],
        }
