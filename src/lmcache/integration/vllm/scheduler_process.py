"""Which process has the scheduler: its name is the instance id that all processes of an engine derive themselves."""

from __future__ import annotations

import multiprocessing
import os


def scheduler_process_id(*, in_scheduler: bool, executor: str, workers: int) -> int:
    """In a worker: of the process that runs the scheduler, by vLLM's executor ("" when that is not known)."""
    if in_scheduler or executor == "uni" or (not executor and workers == 1):
        return os.getpid()
    parent = multiprocessing.parent_process()  # who asked for this process; with a fork server, not who forked it
    return int(parent.pid) if parent is not None and parent.pid is not None else os.getppid()
