"""The instance id that all processes of one engine derive by themselves: it names the process of its scheduler."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

_START_TIME_FIELD = 21  # of /proc/PID/stat, counted from 0


def scheduler_process_id(*, in_scheduler: bool, executor: str, workers: int) -> int:
    """In a worker: of the process that runs the scheduler, by vLLM's executor ("" when that is not known)."""
    if in_scheduler or executor == "uni" or (not executor and workers == 1):
        return os.getpid()
    parent = multiprocessing.parent_process()  # who asked for this process; with a fork server, not who forked it
    return int(parent.pid) if parent is not None and parent.pid is not None else os.getppid()


def instance_name(pid: int) -> str:
    """Unlike that of any other process on any machine, in any container, before or after."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    # The second field is the program's name in parentheses, which may hold spaces.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return f"vllm-{boot}-{namespace}-{pid}-{fields[_START_TIME_FIELD - 2]}"
