"""Lets background threads run beside the compute threads of a CPU engine instead of on top of one of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def engine_cpus() -> set[int]:
    """The CPUs that this worker may use. Its own threads are pinned one to a CPU, so its parent is asked."""
    own = os.sched_getaffinity(0)
    try:
        return own | os.sched_getaffinity(os.getppid())
    except OSError:
        return own


@contextlib.contextmanager
def unpinned(cpus: set[int]) -> Iterator[None]:
    """Threads that the calling thread starts meanwhile may run on all of `cpus`: a thread inherits from its parent."""
    pinned = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:  # a cpuset that grew smaller since: stay where we are
        yield
        return
    try:
        yield
    finally:
        os.sched_setaffinity(0, pinned)
