"""The server process: builds every part, serves, drains and leaves nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import os
import random
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from lmcache import __version__
from lmcache.admin.audit import AuditLog
from lmcache.admin.listener import HttpListener
from lmcache.config.redact import redacted
from lmcache.core.address import http_url
from lmcache.core.chunking import ChunkHasher
from lmcache.core.limits import SERVER_EPOCH_BYTES
from lmcache.core.salt_limits import SaltLimits
from lmcache.environment import SYSTEM, Environment
from lmcache.errors import ServerUnavailable
from lmcache.fleet.join import FleetMember
from lmcache.fleet.membership import Member, MemberSettings
from lmcache.http.access import AdminToken
from lmcache.http.fleet_messages import FleetOverview
from lmcache.kv_events.descriptions import Descriptions
from lmcache.kv_events.endpoint import parse_endpoint, parse_replay_endpoint
from lmcache.kv_events.holdings import Holdings, Holds, Tier
from lmcache.l1.quota import Quotas
from lmcache.l1.quota_file import QuotaFile
from lmcache.l1.store import L1Options, L1Store
from lmcache.memory import numa
from lmcache.memory.large_pages import LargePageGauge
from lmcache.memory.restart_compatibility import RestartCompatibility
from lmcache.memory.server_memory import remove_files
from lmcache.peers.peering import Peering
from lmcache.runtime_plugins.launcher import CONFIG_VARIABLE, EXTRA_VARIABLE, PluginLauncher
from lmcache.runtime_plugins.scripts import find_scripts
from lmcache.service.cache_operations import CacheOperations, Registered
from lmcache.service.cache_service import CacheService
from lmcache.service.context import ServiceContext, ServiceSettings
from lmcache.startup import Plan, event_log_settings
from lmcache.stop_signals import CLOSE_SECONDS, StopRequested, StopSignals
from lmcache.telemetry.event_bus import EventBus
from lmcache.telemetry.line_writer import LineWriter
from lmcache.telemetry.logs import count_faults
from lmcache.telemetry.lookup_log import LookupHashLog
from lmcache.telemetry.metrics import Metrics
from lmcache.telemetry.otlp import OtlpExporter, interval_seconds
from lmcache.telemetry.tracing import Tracer
from lmcache.tiering import storage_loop
from lmcache.tiering.logged_changes import l1_changes, l2_changes
from lmcache.tiering.namespace_directory import NamespaceDirectory, stored_namespace
from lmcache.tiering.storage_loop import StorageLoop, StorageSettings
from lmcache.transport.listening import raise_descriptor_limit
from lmcache.transport.rpc_server import RpcServer

if TYPE_CHECKING:
    from lmcache.kv_events.announcer import KVEventAnnouncer
    from lmcache.transport.curve_clients import CurveAccess
    from lmcache.transport.curve_gate import CurveGate

log = logging.getLogger("lmcache.server")

T = TypeVar("T")

EXIT_LEFT_BEHIND = 1  # something hangs in a backend or in the kernel
_REMOVE_SECONDS = 1.0
_ANNOUNCE_SECONDS = 1.0
_STATUS_SECONDS = 2.0
_RNG_SEED_BYTES = 16
# How long a thread may keep the interpreter: the message loop must not wait 5 ms for the storage loop. A lookup gives
# it up several times, and waits that long each time while a page of metrics or of a listing is made.
THREAD_SWITCH_SECONDS = 0.00002
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT_BYTES = 32 << 20  # the most that mallopt takes


class Server:
    """One server. Every method of `admin.state.ServerState` may be called from any thread."""

    def __init__(self, plan: Plan, environment: Environment = SYSTEM) -> None:
        config = plan.config
        self.config = config
        self._plan = plan
        self.metrics = Metrics(
            enabled=config.metrics_enabled,
            service_instance_id=config.service_instance_id or "",
            random_bytes=environment.random_bytes,
        )
        self._environment = environment
        self._clock = environment.clock
        self._closers = contextlib.ExitStack()
        self._started_at = self._clock.monotonic()
        self._ready = False
        self._left_behind = False
        self._http: HttpListener | None = None
        self._peering: Peering | None = None
        self._fleet: FleetMember | None = None
        self._announcer: KVEventAnnouncer | None = None

    def run(self, signals: StopSignals) -> int:
        """Serves until a signal asks for the end; the exit code. ConfigError or ResourceError when it cannot start."""
        signals.end_within(self.config.drain_timeout_seconds + CLOSE_SECONDS)
        signals.before_forced_end(lambda: remove_files(_REMOVE_SECONDS))
        try:
            self.start(signals.checkpoint)
            # What is here stays: a collection must not walk it again, which takes 40 ms, while a lookup waits.
            gc.collect()
            gc.freeze()
            signals.at_forced_end_tell(self._unwritten)
            self._announce()
            signals.stop_requested.wait()
            log.info("Draining for %g s at most: new work is refused", self.config.drain_timeout_seconds)
        except StopRequested:
            log.info("Told to stop before it was ready")
        finally:
            self.stop()
        log.info("Stopped")
        return EXIT_LEFT_BEHIND if self._left_behind else 0

    def start(self, checkpoint: Callable[[], object] = lambda: None) -> None:
        """Builds and starts every part; on a fault nothing of it stays. `checkpoint` is called between steps and while
        one takes long; what it raises ends the start."""
        try:
            self._build(checkpoint)
        except BaseException:
            self._closers.close()
            raise
        self._ready = True

    def _build(self, checkpoint: Callable[[], object]) -> None:
        checkpoint()
        closers, metrics = self._closers, self.metrics
        closers.callback(count_faults(lambda name: metrics.faults.internal_faults.labels(name).inc()))
        _tune_process()
        self.audit_log = AuditLog(self.config.audit_log, self._clock)
        closers.callback(self.audit_log.close)
        self.rpc = RpcServer(self.config.host, self.config.port, self._clock, metrics.rpc, curve=self._curve_gate())
        closers.callback(self.rpc.stop)
        if not self.config.disable_http:
            self._http = HttpListener(self, self._clock)
            closers.callback(self._http.close)
        checkpoint()
        hasher = ChunkHasher(self.config.hash_algorithm, self.config.chunk_size)
        server_epoch = self._environment.random_bytes(SERVER_EPOCH_BYTES)
        self._l1 = self._open_l1(hasher, server_epoch, checkpoint)
        closers.callback(self._close_l1)
        closers.callback(metrics.on_scrape(self._l1.stats))
        large_pages = LargePageGauge(self._l1.memory.path, metrics.l1.l1_large_page_ratio.set, self._clock)
        closers.callback(metrics.on_scrape(large_pages.refresh))
        salt_limits = SaltLimits()
        self.quotas = self._open_quotas(salt_limits)
        closers.callback(metrics.on_scrape(lambda: self.quotas.publish(metrics.quotas)))
        if self.config.p2p_advertise_url:
            self._peering = self._open_peering(hasher, server_epoch)
            closers.callback(self._stop_peering)
        self.storage = self._storage_loop(salt_limits)
        self.storage.start(checkpoint)
        closers.callback(self.storage.stop)
        closers.callback(metrics.on_scrape(self.storage.publish))
        if self._peering is not None:
            self._peering.start()
            closers.callback(metrics.on_scrape(self._peering.listener.publish))
        events = self._event_bus()
        closers.callback(events.stop)
        if self.config.kv_events_endpoint:
            self._announcer = self._kv_event_announcer()
            closers.callback(self._announcer.stop)
        self._service = self._cache_service(hasher, server_epoch, events, self._exporter())
        events.start()
        checkpoint()
        # From here on engines and operators may call. The end is in the order of dependence: nothing new begins, what
        # was promised to L2 is written, then the listeners end, then what they call: storage loop, L1.
        closers.callback(self.rpc.stop)
        self._service.start()
        closers.callback(self._service.close)
        closers.callback(metrics.on_scrape(self._publish_service))
        if self._http is not None:
            closers.callback(self._http.stop)
            self._http.start()
        closers.callback(self._drain_storage)
        if self.config.coordinator_url:
            self._fleet = self._fleet_member(hasher, server_epoch)
            closers.callback(self._fleet.stop)
            self._fleet.start()
        if self._announcer is not None:
            self._announcer.start()
        if scripts := find_scripts(self.config.runtime_plugin_locations):
            plugins = PluginLauncher(scripts, self._plugin_environment, self._clock)
            closers.callback(plugins.stop)
            plugins.start()
        closers.callback(self._refuse_calls)

    def _curve_gate(self) -> CurveGate | None:
        config = self.config
        if not config.zmq_curve_server_key_file:
            return None
        from lmcache.transport.curve_gate import CurveGate  # needs PyNaCl

        def changed(before: CurveAccess, after: CurveAccess) -> None:
            detail = {"clients": sorted(client.name for client in after.clients.values())}
            gone = [client.name for key, client in before.clients.items() if after.clients.get(key) != client]
            self.audit_log.audit("curve.keys", "files", {**detail, "removed_or_changed": sorted(gone)}, "ok")

        keys = config.zmq_curve_server_key_file, config.zmq_curve_client_keys_dir
        return CurveGate(*keys, self._environment.random_bytes, changed)

    def _open_l1(self, hasher: ChunkHasher, server_epoch: bytes, checkpoint: Callable[[], object]) -> L1Store:
        config, compatibility = self.config, None
        if config.l1_persist:
            compatibility = RestartCompatibility(
                config.l1_size_bytes, config.l1_align_bytes, hasher.chunk_tokens, hasher.algorithm, hasher.sample()
            )
        l1 = L1Store.open(
            config.shm_name,
            server_epoch,
            L1Options(
                config.l1_size_bytes,
                policy=config.eviction_policy,
                align_bytes=config.l1_align_bytes,
                init_bytes=config.l1_init_size_bytes if config.l1_use_lazy else None,
                hugepages=config.l1_use_hugepages,
                compatibility=compatibility,
                placement=numa.placement(config.l1_numa),
            ),
            metrics=self.metrics.l1,
            clock=self._clock,
            checkpoint=checkpoint,
        )
        if config.metrics_enabled:
            l1.core.set_age_sample_rate(config.metrics_sample_rate)
        return l1

    def _open_quotas(self, salt_limits: SaltLimits) -> Quotas:
        return Quotas(
            self._l1.core,
            salt_limits,
            enforced=self.config.eviction_policy == "IsolatedLRU",
            file=QuotaFile(self.config.quota_file) if self.config.quota_file else None,
        )

    def _open_peering(self, hasher: ChunkHasher, server_epoch: bytes) -> Peering:
        return Peering(
            self.config,
            self._l1,
            hasher,
            server_epoch,
            metrics=self.metrics.p2p,
            clock=self._clock,
            random_bytes=self._environment.random_bytes,
        )

    def _stop_peering(self) -> None:
        """After the storage loop, which loads from peers, and before L1, which they load from."""
        if self._peering is not None and not self._peering.stop():
            self._left_behind = True

    def _storage_loop(self, salt_limits: SaltLimits) -> StorageLoop:
        config, plan = self.config, self._plan
        return StorageLoop(
            self._l1,
            [*plan.adapters, self._peering.adapter] if self._peering is not None else plan.adapters,
            StorageSettings(
                plan.store_policy,
                plan.prefetch_policy,
                prefetch_max_in_flight=config.l2_prefetch_max_in_flight,
                eviction_watermark=config.eviction_trigger_watermark,
                eviction_ratio=config.eviction_ratio,
                verify_threads=config.max_cpu_workers or 1,
            ),
            metrics=self.metrics.l2,
            clock=self._clock,
            salt_limits=salt_limits,
            rng=random.Random(self._environment.random_bytes(_RNG_SEED_BYTES)),
        )

    def _event_bus(self) -> EventBus:
        config = self.config
        subscribers = []
        if config.lookup_hash_log_dir:
            subscribers.append(
                LookupHashLog(
                    config.lookup_hash_log_dir,
                    rotation_seconds=config.lookup_hash_log_rotation_interval,
                    rotation_bytes=config.lookup_hash_log_rotation_max_size,
                    max_files=config.lookup_hash_log_max_files,
                    clock=self._clock,
                )
            )
        return EventBus(subscribers, config.event_bus_queue_size, self.metrics.events)

    def _exporter(self) -> OtlpExporter | None:
        config = self.config
        if not config.otlp_endpoint or config.disable_observability:
            return None
        exporter = OtlpExporter(
            config.otlp_endpoint,
            config.service_instance_id or "",
            self.metrics,
            queue_size=config.event_bus_queue_size,
            clock=self._clock,
            metric_seconds=interval_seconds(os.environ),
        )
        self._closers.callback(exporter.stop)
        exporter.start()
        return exporter

    def _tracer(self, exporter: OtlpExporter | None) -> Tracer | None:
        if exporter is None or not self.config.enable_tracing:
            return None
        rng = random.Random(self._environment.random_bytes(_RNG_SEED_BYTES))
        return Tracer(exporter.put, sample_rate=self.config.trace_sample_rate, clock=self._clock, rng=rng)

    def _cache_service(
        self, hasher: ChunkHasher, server_epoch: bytes, events: EventBus, exporter: OtlpExporter | None
    ) -> CacheService:
        config = self.config
        adapters = self._plan.adapters
        settings = ServiceSettings(
            server_epoch,
            config.l1_read_ttl_seconds,
            config.l1_write_ttl_seconds,
            has_l2=bool(adapters) or self._peering is not None,
            counts_ceiling=config.metrics_enabled,
            lossy_serdes=frozenset(adapter.serde.lossy for adapter in adapters if adapter.serde),
            peer_address=self._peering.address if self._peering is not None else "",
        )
        announcer = self._announcer
        context = ServiceContext(
            settings=settings,
            l1=self._l1,
            locks=self._l1.memory,
            hasher=hasher,
            loop=self.rpc,
            storage=self.storage,
            events=events,
            metrics=self.metrics.service,
            clock=self._clock,
            audit=self.audit_log.audit,
            tracer=self._tracer(exporter),
            prompts=announcer.descriptions if announcer is not None else None,
            note_ranks=announcer.holdings.note_ranks if announcer is not None else lambda ranks: None,
        )
        self.operations = CacheOperations(context, self._registered, server_epoch)
        return CacheService(context)

    def _kv_event_announcer(self) -> KVEventAnnouncer:
        from lmcache.kv_events.announcer import KVEventAnnouncer
        from lmcache.kv_events.event_sockets import EventSockets  # needs pyzmq, slow

        config = self.config
        runners = [runner for runner in self.storage.own_runners if not runner.config.is_shared]
        directory = NamespaceDirectory(self._l1, runners)
        tiers = [Tier("CPU", l1_changes(self._l1, directory), _held_by(self._l1.core.resident_in_all))]
        tiers += [
            Tier("STORAGE", l2_changes(runner), _held_by(runner.ledger.native.known_in_all, runner.serde_name))
            for runner in runners
        ]
        again = config.kv_events_replay_endpoint
        replay = parse_replay_endpoint(again, "") if again else None
        return KVEventAnnouncer(
            EventSockets(parse_endpoint(config.kv_events_endpoint, ""), replay, self._clock),
            Descriptions(config.chunk_size),
            Holdings(tiers),
            config.kv_events_topic.replace("{instance}", config.instance_id),
            config.chunk_size,
            self.metrics.kv_events,
            self._clock,
        )

    def _fleet_member(self, hasher: ChunkHasher, server_epoch: bytes) -> FleetMember:
        config = self.config
        settings = MemberSettings(
            config.coordinator_url,
            config.instance_id,
            http_port=self._http.http_port if self._http is not None else 0,
            mq_port=config.port,
            advertise_ip=config.coordinator_advertise_ip,
            p2p_advertised_url=self._peering.address if self._peering is not None else "",
            heartbeat_seconds=config.coordinator_heartbeat_interval,
            flush_seconds=config.coordinator_event_flush_interval,
            event_transport=config.coordinator_event_transport,
            event_log=event_log_settings(config),
            metadata={
                "version": __version__,
                "server_epoch": server_epoch.hex(),
                "chunk_tokens": hasher.chunk_tokens,
                "hash_algorithm": hasher.algorithm,
                "chunk_sample": hasher.sample().hex(),
                "http_tls": bool(config.http_tls_cert),
                "heartbeat_seconds": config.coordinator_heartbeat_interval,
                "l2_adapters": [runner.name for runner in self.storage.own_runners],
            },
            token=AdminToken(config.admin_token_file),
        )
        directory = NamespaceDirectory(self._l1, self.storage.own_runners)
        sources = [l1_changes(self._l1, directory)]
        sources += [l2_changes(runner) for runner in self.storage.own_runners]
        return FleetMember(
            settings,
            sources if config.coordinator_event_reporting else (),
            self.metrics.fleet,
            self._clock,
            self._take_members,
        )

    def _take_members(self, members: Sequence[Member]) -> None:
        """Servers of the fleet that others can load from are peers."""
        if self._peering is not None:
            self._peering.set_members([member.p2p_advertised_url for member in members if member.p2p_advertised_url])

    def _plugin_environment(self) -> dict[str, str]:
        """The server's own, and its configuration with secrets hidden: an environment is easily printed and kept."""
        http_port = self._http.http_port if self._http is not None else None
        config = {**redacted(self.config), "rpc_endpoint": self.rpc.endpoint, "http_port": http_port}
        extra = self.config.runtime_plugin_config
        return {**os.environ, CONFIG_VARIABLE: json.dumps(config), EXTRA_VARIABLE: json.dumps(extra)}

    def _announce(self) -> None:
        """Prints the ready line, or goes on without it when nobody takes it: stdout may be a pipe that is full."""
        if sys.stdout:  # None: started with 1>&-
            out = LineWriter(sys.stdout.fileno())
            out.write(self._ready_line() + "\n")
            out.drain(_ANNOUNCE_SECONDS)

    def _ready_line(self) -> str:
        adapters = ", ".join(configured.config.type for configured in self._plan.adapters)
        http = "off"
        if self._http is not None:
            tls = bool(self.config.http_tls_cert)
            http = f"at {http_url(self.config.http_host, self._http.http_port, tls=tls)}"
        return (
            f"LMCache {__version__} is ready: engines at {self.rpc.endpoint}, "
            f"HTTP {http}, "
            f"L1 {self.config.l1_size_gb:g} GB in {self._l1.memory.path}, "
            f"L2 {adapters or 'none'}"
        )

    # ---- the end -----------------------------------------------------------------------------------------------------
    def stop(self) -> None:
        """Drains and ends every part, in the reverse order of their start. Idempotent."""
        self._closers.close()

    def _refuse_calls(self) -> None:
        self._ready = False
        self.rpc.drain()
        self.rpc.responsive(_STATUS_SECONDS)  # what it answers meanwhile has begun before, and is drained as well

    def _drain_storage(self) -> None:
        seconds = self.config.drain_timeout_seconds
        self._left_behind = not self.storage.drain(seconds)
        if unwritten := self._unwritten():
            log.warning("The %g s of --drain-timeout-seconds are over. %s", seconds, unwritten)

    def _unwritten(self) -> str:
        """A sentence about what L2 was to have and has not; "" for nothing. Any thread."""
        by_adapter = self.storage.unwritten()
        if not by_adapter:
            return ""
        counts = [f"{objects} for {name}" if name else f"{objects} for any" for name, objects in by_adapter.items()]
        stay = "they stay in L1 for the next server" if self.config.l1_persist else "they are lost, and computed again"
        return f"Objects that are not in L2: {', '.join(counts)}; {stay}."

    def _close_l1(self) -> None:
        """Removes the file, or leaves it to the next server. Under an operation that has not ended the memory stays
        mapped until the process ends."""
        self._l1.close(in_use=self._left_behind)
        if self.config.l1_persist:
            log.info("L1 stays in %s; remove the file if no server is to go on with it", self._l1.memory.path)

    def _publish_service(self) -> None:
        with contextlib.suppress(ServerUnavailable):  # the other figures are what tells why
            self._on_loop(lambda: self._service.publish(self.metrics.service))

    # ---- for the HTTP listener ---------------------------------------------------------------------------------------
    def health(self, within_seconds: float) -> str:
        if not self.rpc.responsive(within_seconds):
            return f"The message loop did not answer within {within_seconds:g} s."
        if not self.storage.responsive(within_seconds):
            return f"The storage loop did not answer within {within_seconds:g} s."
        return ""

    def ready(self) -> bool:
        return self._ready

    def status(self) -> dict[str, Any]:
        """ServerUnavailable when the message loop does not answer."""
        return {
            "version": __version__,
            "pid": os.getpid(),
            "uptime_seconds": round(self._clock.monotonic() - self._started_at, 3),
            "rpc_endpoint": self.rpc.endpoint,
            "shm_path": self._l1.memory.path,
            "chunk_tokens": self.config.chunk_size,
            "hash_algorithm": self.config.hash_algorithm,
            **self._on_loop(self._service.snapshot),
            "l1": self._l1.stats(),
            "l2": self.storage.status(),
            "p2p": self._peering.status() if self._peering is not None else None,
            "fleet": self._fleet.status() if self._fleet is not None else {},
        }

    def fleet(self) -> FleetOverview | None:
        return self._fleet.overview() if self._fleet is not None else None

    def clear(self, tier: str, *, force: bool = False) -> tuple[int, int]:
        if not self._ready:
            raise ServerUnavailable("The server is starting or shutting down.")
        return self.storage.clear(tier, force=force)

    def _registered(self, model_name: str, instance_id: str) -> list[Registered]:
        return self._on_loop(lambda: self._service.registered(model_name, instance_id))

    def _on_loop(self, question: Callable[[], T]) -> T:
        """Asks on the message loop's thread, where the answer is consistent."""
        answers: list[T] = []
        answered = threading.Event()

        def ask() -> None:
            try:
                answers.append(question())
            finally:
                answered.set()

        self.rpc.post(ask)
        if not answered.wait(_STATUS_SECONDS) or not answers:
            raise ServerUnavailable(f"The message loop did not answer within {_STATUS_SECONDS:g} s.")
        return answers[0]


def _held_by(in_all: Callable[[bytes, bytes], bytes], serde: str = "") -> Holds:
    return lambda namespaces, hashes: in_all(
        b"".join([stored_namespace(namespace, serde).digest for namespace in namespaces]), hashes
    )


def _tune_process() -> None:
    sys.setswitchinterval(THREAD_SWITCH_SECONDS)
    raise_descriptor_limit()
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    """The messages of a prompt take memory of up to 20 MiB for a moment. By default the C library gives it back each
    time, and to touch fresh pages costs several times what is done with them."""
    with contextlib.suppress(AttributeError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)


assert storage_loop.UNDER_WAY_SECONDS + storage_loop.CLOSE_SECONDS < CLOSE_SECONDS
