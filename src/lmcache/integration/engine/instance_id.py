"""An instance id that names the process of an engine's scheduler."""

from __future__ import annotations

import os
from pathlib import Path

_START_TIME_FIELD = 21  # of /proc/PID/stat, counted from 0


def instance_name(engine: str, pid: int) -> str:
    """`engine`: its kind. Unlike the name of any other process on any machine, in any container, before or after."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    # The second field is the program's name in parentheses, which may hold spaces.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return f"{engine}-{boot}-{namespace}-{pid}-{fields[_START_TIME_FIELD - 2]}"
