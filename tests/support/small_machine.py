"""A machine whose memory the test decides, as the kernel would tell of it."""

from __future__ import annotations

from pathlib import Path

from lmcache.core.limits import L1_MEMORY_MARGIN_BYTES, MIB
from lmcache.memory.memory_limit import MemoryProbe


def machine_with(folder: Path, available_mib: int) -> MemoryProbe:
    """It has so much memory left beside the margin, as long as `folder` is not written again. There is no cgroup."""
    (folder / "self").mkdir(parents=True, exist_ok=True)
    (folder / "self/cgroup").write_text("")
    available_bytes = L1_MEMORY_MARGIN_BYTES + available_mib * MIB
    (folder / "meminfo").write_text(f"MemAvailable: {available_bytes // 1024} kB\n")
    return MemoryProbe(folder, folder)
