"""The server process: builds every part, serves, drains and leaves nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lmcache import __version__
from lmcache.admin.listener import HttpListener
from lmcache.clock import SystemClock
from lmcache.config.spec import ServerConfig
from lmcache.core.chunking import ChunkHasher
from lmcache.core.limits import BOOT_TOKEN_BYTES
from lmcache.errors import ServerUnavailable
from lmcache.eviction.limits import SaltLimits
from lmcache.l1.quota import Quotas
from lmcache.l1.quota_file import QuotaFile
from lmcache.l1.store import L1Store
from lmcache.l2.registry import ConfiguredAdapter
from lmcache.memory.inheritance import Inheritance
from lmcache.memory.shared_memory import remove_files
from lmcache.service.service import CacheService, ServiceSettings
from lmcache.stop_signals import STOP_SECONDS, StopAsked, StopSignals
from lmcache.telemetry.bus import EventBus
from lmcache.telemetry.logs import count_faults
from lmcache.telemetry.lookup_log import LookupHashLog
from lmcache.telemetry.metrics import Metrics
from lmcache.tiering.policies import PrefetchPolicy, StorePolicy
from lmcache.tiering.storage import CLOSE_SECONDS, Storage
from lmcache.transport.server import RpcServer

log = logging.getLogger("lmcache.server")

T = TypeVar("T")

DRAIN_SECONDS = 10.0  # for what is on its way to L2
EXIT_LEFT_BEHIND = 1  # something hangs in a backend or in the kernel
_REMOVE_SECONDS = 1.0
_STATUS_SECONDS = 2.0
# How long a thread may keep the interpreter: the message loop must not wait 5 ms for the storage loop.
_THREAD_SWITCH_SECONDS = 0.0005
_WANTED_FILE_DESCRIPTORS = 65_536
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT_BYTES = 32 << 20  # the most that mallopt takes


class Server:
    """One server. Every method of `admin.state.ServerState` may be called from any thread."""

    def __init__(
        self,
        config: ServerConfig,
        adapters: Sequence[ConfiguredAdapter],
        store_policy: StorePolicy,
        prefetch_policy: PrefetchPolicy,
    ) -> None:
        """As of `lmcache.startup.plan`: adapters are built and not opened."""
        self.config = config
        self._adapters = adapters
        self._store_policy = store_policy
        self._prefetch_policy = prefetch_policy
        self.metrics = Metrics(enabled=config.metrics_enabled, service_instance_id=config.service_instance_id or "")
        self._clock = SystemClock()
        self._closers = contextlib.ExitStack()
        self._started_at = self._clock.monotonic()
        self._ready = False
        self._left_behind = False

    def run(self, signals: StopSignals) -> int:
        """Serves until a signal asks for the end; the exit code. ConfigError or ResourceError when it cannot start."""
        signals.before_forced_end(lambda: remove_files(_REMOVE_SECONDS))
        try:
            self.start(signals.go_on)
            with contextlib.suppress(OSError):  # nobody is there to read it
                print(self._ready_line(), flush=True)
            signals.asked.wait()
            log.info("Draining")
        except StopAsked:
            log.info("Told to stop before it was ready")
        finally:
            self.stop()
        log.info("Stopped")
        return EXIT_LEFT_BEHIND if self._left_behind else 0

    def start(self, go_on: Callable[[], object] = lambda: None) -> None:
        """Builds and starts every part; on a fault nothing of it stays. `go_on` is called between steps and while one
        takes long; what it raises ends the start."""
        try:
            self._build(go_on)
        except BaseException:
            self._closers.close()
            raise
        self._ready = True

    def _build(self, go_on: Callable[[], object]) -> None:
        go_on()
        config, closers = self.config, self._closers
        closers.callback(count_faults(lambda name: self.metrics.internal_faults.labels(name).inc()))
        sys.setswitchinterval(_THREAD_SWITCH_SECONDS)
        _raise_descriptor_limit()
        _keep_freed_memory()
        hasher = ChunkHasher(config.hash_algorithm, config.chunk_size)
        self._rpc = RpcServer(config.host, config.port, self.metrics)
        closers.callback(self._rpc.stop)
        self._http = HttpListener(self)
        closers.callback(self._http.close)
        go_on()
        boot_token = secrets.token_bytes(BOOT_TOKEN_BYTES)
        self._l1 = L1Store.open(
            config.shm_name,
            config.l1_size_bytes,
            boot_token,
            policy=config.eviction_policy,
            align_bytes=config.l1_align_bytes,
            init_bytes=config.l1_init_size_bytes if config.l1_use_lazy else None,
            hugepages=config.l1_use_hugepages,
            metrics=self.metrics,
            clock=self._clock,
            heir=self._heir(hasher),
            go_on=go_on,
        )
        closers.callback(self._close_l1)
        if config.metrics_enabled:
            self._l1.core.set_age_sample_rate(config.metrics_sample_rate)
        closers.callback(self.metrics.on_scrape(self._l1.stats))
        salt_limits = SaltLimits()
        self.quotas = Quotas(
            self._l1.core,
            salt_limits,
            enforced=config.eviction_policy == "IsolatedLRU",
            file=QuotaFile(config.quota_file) if config.quota_file else None,
        )
        closers.callback(self.metrics.on_scrape(lambda: self.quotas.publish(self.metrics)))
        self._storage = Storage(
            self._l1,
            self._adapters,
            store_policy=self._store_policy,
            prefetch_policy=self._prefetch_policy,
            prefetch_max_in_flight=config.l2_prefetch_max_in_flight,
            eviction_watermark=config.eviction_trigger_watermark,
            eviction_ratio=config.eviction_ratio,
            metrics=self.metrics,
            clock=self._clock,
            verify_threads=config.max_cpu_workers or 1,
            salt_limits=salt_limits,
        )
        self._storage.start(go_on)
        closers.callback(self._storage.stop)
        self._events = self._event_bus()
        closers.callback(self._events.stop)
        settings = ServiceSettings(
            boot_token, config.l1_read_ttl_seconds, config.l1_write_ttl_seconds, has_l2=bool(self._adapters)
        )
        self._service = CacheService(
            settings, self._rpc, self._l1, self._storage, hasher, self._events, self.metrics, self._clock
        )
        self._events.start()
        go_on()
        # From here on engines and operators may call. The end is in the order of dependence: nothing new begins, what
        # was promised to L2 is written, then the listeners end, then what they call: storage loop, L1.
        closers.callback(self._rpc.stop)
        self._service.start()
        closers.callback(self._service.close)
        closers.callback(self._http.stop)
        self._http.start()
        closers.callback(self._drain_storage)
        closers.callback(self._begin_no_more)

    def _heir(self, hasher: ChunkHasher) -> Inheritance | None:
        config = self.config
        if not config.l1_persist:
            return None
        return Inheritance(
            config.l1_size_bytes, config.l1_align_bytes, hasher.chunk_tokens, hasher.algorithm, hasher.sample()
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
        return EventBus(subscribers, config.event_bus_queue_size, self.metrics)

    def _ready_line(self) -> str:
        l1, l2 = self.config, [spec["type"] for spec in self.config.l2_adapter]
        return (
            f"LMCache {__version__} is ready: engines at {self._rpc.endpoint}, "
            f"HTTP at http://{self.config.http_host}:{self._http.http_port}, "
            f"L1 {l1.l1_size_gb:g} GB in {self._l1.memory.path}, "
            f"L2 {', '.join(l2) if l2 else 'none'}"
        )

    # ---- the end -----------------------------------------------------------------------------------------------------
    def stop(self) -> None:
        """Drains and ends every part, in the reverse order of their start. Idempotent."""
        self._closers.close()

    def _begin_no_more(self) -> None:
        self._ready = False
        self._rpc.drain()

    def _drain_storage(self) -> None:
        self._left_behind = not self._storage.drain(DRAIN_SECONDS)

    def _close_l1(self) -> None:
        """Removes the file, or leaves it to the next server. Under an operation that has not ended the memory stays
        mapped until the process ends."""
        self._l1.close(in_use=self._left_behind)
        if self.config.l1_persist:
            log.info("L1 stays in %s; remove the file if no server is to go on with it", self._l1.memory.path)

    # ---- for the HTTP listener ---------------------------------------------------------------------------------------
    def health(self, within_seconds: float) -> str:
        if not self._rpc.responsive(within_seconds):
            return f"The message loop did not answer within {within_seconds:g} s."
        if not self._storage.responsive(within_seconds):
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
            "rpc_endpoint": self._rpc.endpoint,
            "shm_path": self._l1.memory.path,
            "chunk_tokens": self.config.chunk_size,
            "hash_algorithm": self.config.hash_algorithm,
            **self._on_loop(self._service.snapshot),
            "l1": self._l1.stats(),
            "l2": self._storage.status(),
        }

    def clear(self, tier: str) -> tuple[int, int]:
        if not self._ready:
            raise ServerUnavailable("The server is starting or shutting down.")
        return self._storage.clear(tier)

    def _on_loop(self, question: Callable[[], T]) -> T:
        """Asks on the message loop's thread, where the answer is consistent."""
        answers: list[T] = []
        asked = threading.Event()

        def ask() -> None:
            try:
                answers.append(question())
            finally:
                asked.set()

        self._rpc.post(ask)
        if not asked.wait(_STATUS_SECONDS) or not answers:
            raise ServerUnavailable(f"The message loop did not answer within {_STATUS_SECONDS:g} s.")
        return answers[0]


def _keep_freed_memory() -> None:
    """The messages of a prompt take memory of up to 20 MiB for a moment. By default the C library gives it back each
    time, and to touch fresh pages costs several times what is done with them."""
    with contextlib.suppress(AttributeError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)


def _raise_descriptor_limit() -> None:
    """Every engine connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILE_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILE_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


assert DRAIN_SECONDS + CLOSE_SECONDS < STOP_SECONDS
