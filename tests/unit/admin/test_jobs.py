"""The table of jobs: what it keeps of those that have ended."""

from __future__ import annotations

import gc
import weakref

from lmcache.admin.jobs import JobTable
from lmcache.errors import LMCacheError
from lmcache.service.cache_operations import Progress
from manual_clock import ManualClock
from polling import until


class Keys:
    """Stands for the names of many objects."""


def test_a_job_that_has_ended_keeps_no_keys() -> None:
    table = JobTable(ManualClock())
    kept: list[weakref.ref[Keys]] = []
    for fails in (False, True):
        keys = Keys()
        kept.append(weakref.ref(keys))

        def work(progress: Progress, keys: Keys = keys, fails: bool = fails) -> None:
            if fails:
                raise LMCacheError("no such object")

        table.submit("x", "move", 1, work)
        del keys, work
    until(lambda: all(job.has_ended for job in table.all()))

    def gone() -> bool:
        gc.collect()
        return all(reference() is None for reference in kept)

    until(gone, 5.0)
    assert [job.status for job in table.all()] == ["failed", "done"]
    table.close()
