"""All handlers of the server, by method."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from lmcache import __version__
from lmcache.clock import Clock
from lmcache.core.chunking import ChunkHasher
from lmcache.errors import LMCacheError, RemoteError
from lmcache.l1.store import L1Store
from lmcache.protocol.messages import (
    METHODS,
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
from lmcache.protocol.version import OLDEST_SUPPORTED_PROTOCOL_VERSION, PROTOCOL_VERSION
from lmcache.service.liveness import SWEEP_SECONDS, LivenessService
from lmcache.service.lookup import LookupService
from lmcache.service.payload import PayloadService
from lmcache.service.registry import Registry
from lmcache.service.transfer import TransferService
from lmcache.telemetry.bus import EventBus
from lmcache.telemetry.metrics import Metrics
from lmcache.tiering.storage import Storage
from lmcache.transport.deferred import Deferred
from lmcache.transport.server import Method, RpcServer

log = logging.getLogger("lmcache.service")

TRANSFER_MODES = [mode.value for mode in TransferMode]
TIERS = ("l1", "l2", "all")
_MAY_DEFER = ("lookup", "commit", "write", "read", "clear")
_MAX_CLEARS_WAITING = 4
_STORAGE_SILENT_SECONDS = 5.0
_TURN_SECONDS = 1.0  # what the message loop gets to end what it is doing


@dataclass(frozen=True)
class ServiceSettings:
    boot_token: bytes
    lease_ttl_seconds: float
    reservation_ttl_seconds: float
    has_l2: bool


class CacheService:
    """Everything that a call can ask for. `start` begins to serve calls on the given loop."""

    def __init__(
        self,
        settings: ServiceSettings,
        rpc: RpcServer,
        l1: L1Store,
        storage: Storage,
        hasher: ChunkHasher,
        events: EventBus | None,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._rpc = rpc
        self._l1 = l1
        self._storage = storage
        self._hasher = hasher
        self.registry = Registry(l1, l1.memory, metrics, clock, hasher.chunk_tokens)
        self._liveness = LivenessService(
            self.registry, l1, l1.memory, clock, settings.lease_ttl_seconds, settings.reservation_ttl_seconds
        )
        self._lookup = LookupService(
            self.registry,
            l1,
            hasher,
            storage if settings.has_l2 else None,
            rpc,
            events,
            metrics,
            clock,
            settings.lease_ttl_seconds,
        )
        self._transfer = TransferService(
            self.registry,
            l1,
            storage if settings.has_l2 else None,
            metrics,
            clock,
            settings.reservation_ttl_seconds,
        )
        # One thread: a copy is faster than the network, and the order of a frame's parts is kept.
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="lmcache-payload")
        self._payload = PayloadService(self.registry, l1, settings.boot_token, rpc, self._copying, metrics)
        self._clock = clock
        self._storage_asked_at: float | None = None
        self._sweeping = False
        self._closing = False
        self._clears_waiting = 0
        self._clearer = ThreadPoolExecutor(1, thread_name_prefix="lmcache-clear")

    def start(self) -> None:
        self._rpc.start(self._methods())
        self._rpc.post(self._begin_sweeping)

    def close(self) -> None:
        """L1 is unmapped next: copies and sweeps that are under way end first."""
        self._closing = True
        self._rpc.responsive(_TURN_SECONDS)
        self._copying.shutdown()  # a copy takes a millisecond
        self._clearer.shutdown(wait=False, cancel_futures=True)

    def _methods(self) -> dict[str, Method]:
        handlers: dict[str, Callable[[Any], Message | Deferred]] = {
            "hello": self._hello,
            "ping": self._ping,
            "noop": lambda message: Empty(),
            "register_instance": self._then_sweep(self._liveness.register_instance),
            "register_worker": self._then_sweep(self._liveness.register_worker),
            "unregister": self._liveness.unregister,
            "lookup": self._lookup.lookup,
            "append": self._lookup.append,
            "release": self._lookup.release,
            "end_session": self._lookup.end_session,
            "reserve": self._transfer.reserve,
            "commit": self._transfer.commit,
            "write": self._payload.write,
            "read": self._payload.read,
            "clear": self._clear,
        }
        assert handlers.keys() == METHODS.keys()
        return {
            name: Method(METHODS[name][0], handler, may_defer=name in _MAY_DEFER) for name, handler in handlers.items()
        }

    # ---- connection --------------------------------------------------------------------------------------------------
    def _hello(self, message: Hello) -> HelloReply:
        if not OLDEST_SUPPORTED_PROTOCOL_VERSION <= message.protocol_version <= PROTOCOL_VERSION:
            raise RemoteError(
                ErrorCode.UNSUPPORTED_VERSION,
                f"This server ({__version__}) speaks protocol versions {OLDEST_SUPPORTED_PROTOCOL_VERSION} to "
                f"{PROTOCOL_VERSION}, the client ({message.client_version[:64] or 'unnamed'}) "
                f"{message.protocol_version}: upgrade the older side.",
            )
        return HelloReply(
            protocol_version=message.protocol_version,
            server_version=__version__,
            boot_token=self._settings.boot_token,
            chunk_tokens=self._hasher.chunk_tokens,
            hash_algorithm=self._hasher.algorithm,
            transfer_modes=TRANSFER_MODES,
            shm_path=self._l1.memory.path,
            shm_bytes=self._l1.memory.size_bytes,
            lease_ttl_seconds=self._settings.lease_ttl_seconds,
            reservation_ttl_seconds=self._settings.reservation_ttl_seconds,
        )

    def _ping(self, message: Ping) -> PingReply:
        registered = bool(message.instance_id) and self._liveness.beat(message)
        return PingReply(self._settings.boot_token, registered, self._storage_answers())

    def _storage_answers(self) -> bool:
        """Asks the storage loop without waiting: False once a question has stayed unanswered for a while."""
        now = self._clock.monotonic()
        if self._storage_asked_at is None:
            self._storage_asked_at = now
            self._storage.call_soon(lambda: self._rpc.post(self._storage_answered))
        return now - self._storage_asked_at < _STORAGE_SILENT_SECONDS

    def _storage_answered(self) -> None:
        self._storage_asked_at = None

    # ---- liveness ----------------------------------------------------------------------------------------------------
    def _then_sweep(self, register: Callable[[Any], Message]) -> Callable[[Any], Message]:
        """Where nobody is registered nothing is swept, so an idle server sleeps."""

        def handler(message: Any) -> Message:
            reply = register(message)
            self._begin_sweeping()
            return reply

        return handler

    def _begin_sweeping(self) -> None:
        if not self._sweeping and self._liveness.needed:
            self._sweeping = True
            self._rpc.call_later(SWEEP_SECONDS, self._sweep)

    def _sweep(self) -> None:
        if self._closing:
            return
        try:
            self._liveness.sweep()
        finally:
            self._sweeping = self._liveness.needed
            if self._sweeping:
                self._rpc.call_later(SWEEP_SECONDS, self._sweep)

    # ---- administration ----------------------------------------------------------------------------------------------
    def _clear(self, message: Clear) -> Deferred:
        if message.tier not in TIERS:
            raise RemoteError(ErrorCode.BAD_REQUEST, f"The tier must be one of {', '.join(TIERS)}.")
        if self._clears_waiting >= _MAX_CLEARS_WAITING:
            raise RemoteError(ErrorCode.TOO_MANY, "Other clears are still running; try again later.")
        deferred = Deferred()

        def done() -> None:
            self._clears_waiting -= 1

        def clear() -> None:  # on a thread of its own: L2 may take its time
            try:
                deferred.answer(ClearReply(*self._storage.clear(message.tier)))
            except LMCacheError as error:
                deferred.answer(RemoteError(ErrorCode.INTERNAL, str(error)))
            except Exception:
                log.exception("Clearing %s failed", message.tier)
                deferred.answer(
                    RemoteError(ErrorCode.INTERNAL, f"Clearing {message.tier} failed; see the server's log.")
                )
            finally:
                self._rpc.post(done)

        self._clears_waiting += 1
        self._clearer.submit(clear)
        return deferred

    def snapshot(self) -> dict[str, Any]:
        """For operators. On the loop's thread only."""
        instances = self.registry.instances.values()
        return {
            "sessions": sum(len(instance.sessions) for instance in instances),
            "session_bytes": self._lookup.session_bytes,
            "leases": sum(len(instance.leases) for instance in instances),
            "reservations": sum(
                len(worker.reservations) for instance in instances for worker in instance.workers.values()
            ),
            "instances": [
                {
                    "instance_id": instance.instance_id,
                    "model_name": instance.scheduler.registration.model_name if instance.scheduler else None,
                    "engine": instance.scheduler.registration.engine if instance.scheduler else None,
                    "ranks": instance.scheduler.registration.kv_world_size if instance.scheduler else None,
                    "workers": sorted(instance.workers),
                    "transfer": [
                        {
                            "worker": number,
                            "mode": worker.registration.transfer_mode,
                            "reason": worker.registration.transfer_reason,
                        }
                        for number, worker in sorted(instance.workers.items())
                    ],
                    "sessions": len(instance.sessions),
                    "leases": len(instance.leases),
                }
                for instance in instances
            ],
        }
