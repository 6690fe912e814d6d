"""Brings servers up to date with what was decided, on threads: one that does not answer keeps no other waiting, nor
whoever decides.

Invariant: of what is noted for a server, `tell` is called once more after the note, until it has ended well. It never
runs twice at once for one server.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lmcache.clock import Clock
from lmcache.errors import LMCacheError
from lmcache.telemetry.log_limiter import LogLimiter

logger = logging.getLogger("lmcache.fleet")

_THREADS = 8
_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 1.0, 60.0
_LOG_SECONDS = 60.0


@dataclass(eq=False)
class _Server:
    notes: int = 0
    told: int = 0  # notes before the latest `tell` that ended well
    runs: bool = False  # or waits for a thread
    failures: int = 0  # in a row
    due_at: float = 0.0

    @property
    def is_behind(self) -> bool:
        return self.told < self.notes


class ServerSync:
    """Thread-safe. `step` is called again and again, and never waits."""

    def __init__(self, decisions: str, tell: Callable[[str], None], clock: Clock) -> None:
        """`tell(instance_id)` raises LMCacheError where that server is to be told once more. `decisions`: for logs."""
        self._decisions = decisions
        self._tell = tell
        self._clock = clock
        self._lock = threading.Lock()
        self._servers: dict[str, _Server] = {}
        self._limiter = LogLimiter(_LOG_SECONDS, clock)
        # Those that did not answer the last time have threads of their own.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"fleet-{decisions}")
        self._retry_threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"fleet-{decisions}-again")
        for threads in (self._threads, self._retry_threads):
            threads.submit(int)  # starts the first: it does what is queued where no more can be started
        self._is_closed = False

    def note(self, instance_ids: Iterable[str]) -> None:
        """There is something to tell these."""
        with self._lock:
            for instance_id in instance_ids:
                self._servers.setdefault(instance_id, _Server()).notes += 1

    def forget(self, instance_id: str) -> None:
        """It has left."""
        with self._lock:
            server = self._servers.get(instance_id)
            if server is not None and not server.runs:
                del self._servers[instance_id]
            elif server is not None:
                server.told, server.failures = server.notes, 0

    def behind(self) -> set[str]:
        with self._lock:
            return {name for name, server in self._servers.items() if server.is_behind}

    def step(self) -> None:
        """Begins what is due."""
        now_seconds = self._clock.monotonic()
        with self._lock:
            if self._is_closed:
                return
            for instance_id, server in self._servers.items():
                if server.runs or not server.is_behind or server.due_at > now_seconds:
                    continue
                threads = self._retry_threads if server.failures else self._threads
                server.runs = True
                with contextlib.suppress(RuntimeError):  # no thread more can be started: it waits for one that there is
                    threads.submit(self._run, instance_id, server)

    def close(self) -> None:
        """What is under way goes on to its end; nothing else begins. Idempotent."""
        with self._lock:
            self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._retry_threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, instance_id: str, server: _Server) -> None:
        with self._lock:
            notes, has_work = server.notes, server.is_behind
        has_failed = True
        try:
            if has_work:
                self._tell(instance_id)
            has_failed = False
        except LMCacheError as error:
            if self._limiter.due():
                logger.warning("%s was not told its %s: %s", instance_id, self._decisions, error)
        except Exception:  # the root of what runs on the thread
            logger.exception("%s could not be told its %s by a fault", instance_id, self._decisions)
        with self._lock:
            server.runs = False
            if has_failed:
                pause_seconds = min(_FIRST_RETRY_SECONDS * 2.0 ** min(server.failures, 16), _LAST_RETRY_SECONDS)
                server.failures += 1
                server.due_at = self._clock.monotonic() + pause_seconds
            else:
                server.told, server.failures, server.due_at = max(server.told, notes), 0, 0.0
            if not server.is_behind:
                del self._servers[instance_id]
