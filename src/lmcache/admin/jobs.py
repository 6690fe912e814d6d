"""Work that takes time, one after the other on a thread of its own, so that at most one place of the storage loop is
taken by operators."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lmcache.clock import Clock
from lmcache.core import limits
from lmcache.errors import LMCacheError
from lmcache.service.cache_operations import Progress

logger = logging.getLogger("lmcache.admin")


@dataclass
class TrackedJob:
    request_id: str
    kind: str
    progress: Progress
    work: Callable[[Progress], None] | None  # until it has ended: it holds the keys
    asked_at: float
    status: str = "waiting"

    @property
    def has_ended(self) -> bool:
        return self.status in ("done", "failed")


class JobTable:
    """Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._jobs: dict[str, TrackedJob] = {}  # oldest first
        self._waiting: deque[TrackedJob] = deque()
        self._running: TrackedJob | None = None
        self._last = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, mark: str, kind: str, objects: int, work: Callable[[Progress], None]) -> TrackedJob:
        """LMCacheError beyond MAX_JOBS_WAITING. `mark` begins the ids of this server."""
        with self._changed:
            if self._closed or len(self._waiting) >= limits.MAX_JOBS_WAITING:
                raise LMCacheError(f"{len(self._waiting)} jobs wait already; ask again when some have ended.")
            self._last += 1
            job = TrackedJob(f"{mark}-{self._last}", kind, Progress(objects), work, self._clock.monotonic())
            ended = [known.request_id for known in self._jobs.values() if known.has_ended]
            for request_id in ended[: max(0, len(ended) - limits.MAX_JOBS_KEPT + 1)]:
                del self._jobs[request_id]
            self._jobs[job.request_id] = job
            self._waiting.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lmcache-jobs", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return job

    def find(self, request_id: str) -> TrackedJob | None:
        with self._changed:
            return self._jobs.get(request_id)

    def all(self) -> list[TrackedJob]:
        """Youngest first."""
        with self._changed:
            return list(reversed(self._jobs.values()))

    def age_seconds(self, job: TrackedJob) -> float:
        return self._clock.monotonic() - job.asked_at

    def close(self) -> None:
        """The job under way ends at its next step; others do not begin."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            if self._running is not None:
                self._running.progress.stop.set()
            self._changed.notify_all()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                assert job.work is not None
                job.work(job.progress)
                job.status = "done"
            except LMCacheError as error:
                job.progress.detail, job.status = str(error), "failed"
            except Exception:  # the root of a job
                logger.exception("The job %s failed", job.request_id)
                job.progress.detail, job.status = "A fault of the server, whose log says more.", "failed"
            job.work = None

    def _next(self) -> TrackedJob | None:
        with self._changed:
            self._running = None
            while not self._waiting and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            self._running = self._waiting.popleft()
            self._running.status = "running"
            return self._running
