"""Work that takes time and more than one server: begun by a request, asked about by others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from lmcache.clock import Clock
from lmcache.core import limits
from lmcache.errors import LMCacheError
from lmcache.fleet.messages import JobStatus

logger = logging.getLogger("lmcache.fleet")

_THREADS = 8


@dataclass
class FleetJob:
    """Written by the thread that works on it, read by any."""

    request_id: str
    kind: str
    asked_at: float
    status: str = "waiting"
    total: int = 0
    done: int = 0
    failed: int = 0
    detail: str = ""
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def has_ended(self) -> bool:
        return self.status in ("done", "failed")


class FleetJobs:
    """Thread-safe."""

    def __init__(self, clock: Clock, mark: str) -> None:
        """`mark` begins the ids of this coordinator."""
        self._clock = clock
        self._mark = mark
        self._lock = threading.RLock()
        self._jobs: dict[str, FleetJob] = {}  # oldest first
        self._last = 0
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="fleet-jobs")

    def submit(self, kind: str, work: Callable[[FleetJob], None]) -> FleetJob:
        """LMCacheError beyond MAX_FLEET_JOBS_WAITING. What `work` raises ends the job as failed."""
        with self._lock:
            self.refuse_beyond_limit()
            ended = [name for name, job in self._jobs.items() if job.has_ended]
            for name in ended[: max(0, len(ended) - limits.MAX_FLEET_JOBS_KEPT + 1)]:
                del self._jobs[name]
            self._last += 1
            job = FleetJob(f"{self._mark}-{self._last}", kind, self._clock.monotonic())
            self._jobs[job.request_id] = job
        try:
            self._threads.submit(self._run, job, work)
        except RuntimeError:
            raise LMCacheError("The coordinator is shutting down.") from None
        return job

    def refuse_beyond_limit(self) -> None:
        """LMCacheError where no other job is taken now: nothing is to be begun for it."""
        waiting = sum(job.status == "waiting" for job in self.all())
        if waiting >= limits.MAX_FLEET_JOBS_WAITING:
            raise LMCacheError(f"{waiting} jobs wait already; ask again when some have ended.")

    def find(self, request_id: str) -> FleetJob | None:
        with self._lock:
            return self._jobs.get(request_id)

    def all(self) -> list[FleetJob]:
        """Youngest first."""
        with self._lock:
            return list(reversed(self._jobs.values()))

    def shown(self, job: FleetJob) -> JobStatus:
        age_seconds = round(self._clock.monotonic() - job.asked_at, 3)
        return JobStatus(
            *(job.request_id, job.kind, job.status, job.has_ended, job.total, job.done, job.failed, job.detail),
            age_seconds,
        )

    def close(self) -> None:
        """Jobs under way end at their next step; others do not begin."""
        with self._lock:
            for job in self._jobs.values():
                job.stop.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, job: FleetJob, work: Callable[[FleetJob], None]) -> None:
        job.status = "running"
        try:
            work(job)
            job.status = "failed" if job.failed and not job.done else "done"
        except LMCacheError as error:
            job.detail, job.status = str(error), "failed"
        except Exception:  # the root of a job
            logger.exception("The job %s failed", job.request_id)
            job.detail, job.status = "A fault of the coordinator, whose log says more.", "failed"
