"""How much memory the machine can still give, so that too much is refused before use and not by a signal later."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lmcache.core.limits import GIB, L1_MEMORY_MARGIN_BYTES
from lmcache.errors import ResourceError

# cgroup v1 writes "no limit" as the largest multiple of a page that fits.
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True)
class MemoryLimit:
    """What one authority over memory still grants. `source` and `remedy` are parts of a sentence."""

    source: str
    available_bytes: int
    remedy: str


@dataclass(frozen=True)
class MemoryProbe:
    """Where the kernel tells what there is. Tests point it elsewhere."""

    proc: Path = Path("/proc")
    cgroup_root: Path = Path("/sys/fs/cgroup")

    def available_limits(self, directory: Path) -> Iterator[MemoryLimit]:
        """Everything that bounds a file in the memory file system `directory`."""
        status = os.statvfs(directory)
        if status.f_blocks > 0:  # 0: mounted without a size
            free_bytes = status.f_bavail * status.f_frsize
            yield MemoryLimit(str(directory), free_bytes, f"enlarge it (mount -o remount,size=... {directory})")
        available_bytes = self._memory_available_bytes()
        if available_bytes is not None:
            yield MemoryLimit("this machine's memory", available_bytes - L1_MEMORY_MARGIN_BYTES, "free some memory")
        limited_bytes = self._cgroup_available_bytes()
        if limited_bytes is not None:
            yield MemoryLimit(
                "the memory limit of this container or cgroup",
                limited_bytes - L1_MEMORY_MARGIN_BYTES,
                "raise that limit",
            )

    def total_limits(self, directory: Path) -> Iterator[MemoryLimit]:
        """The same, with everything counted that somebody uses now."""
        status = os.statvfs(directory)
        if status.f_blocks > 0:
            whole_bytes = status.f_blocks * status.f_frsize
            yield MemoryLimit(str(directory), whole_bytes, f"enlarge it (mount -o remount,size=... {directory})")
        whole = self._meminfo_bytes("MemTotal")
        if whole is not None:
            yield MemoryLimit("this machine's memory", whole, "add memory")

    def _memory_available_bytes(self) -> int | None:
        return self._meminfo_bytes("MemAvailable")

    def _meminfo_bytes(self, name: str) -> int | None:
        try:
            for line in (self.proc / "meminfo").read_text().splitlines():
                if line.startswith(name + ":"):
                    return int(line.split()[1]) * 1024
        except (OSError, ValueError, IndexError):
            return None
        return None

    def _cgroup_available_bytes(self) -> int | None:
        """The least that any cgroup around this process leaves, page cache counted as free; None without a limit."""
        try:
            lines = (self.proc / "self/cgroup").read_text().splitlines()
        except OSError:
            return None
        found: list[int] = []
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                names = _CgroupNames("memory.max", "memory.current", ("inactive_file", "active_file"))
                mounts = [self.cgroup_root, self.cgroup_root / "unified"]
            elif "memory" in controllers.split(","):
                names = _CgroupNames(
                    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
                )
                mounts = [self.cgroup_root / "memory"]
            else:
                continue
            for mount in mounts:
                found += _left_in_cgroups(mount, path, names)
        return min(found, default=None)


@dataclass(frozen=True)
class _CgroupNames:
    limit: str
    usage: str
    reclaimable: tuple[str, ...]


def _left_in_cgroups(mount: Path, path: str, names: _CgroupNames) -> Iterator[int]:
    """What is left in the cgroup `path` and in each one above it. In a container the path may not be visible below the
    mount; then the mount itself is the container's cgroup."""
    folder = mount / path.lstrip("/")
    if not folder.is_dir():
        folder = mount
    while True:
        try:
            limit = (folder / names.limit).read_text().strip()
            if limit != "max" and int(limit) < _UNLIMITED_BYTES:
                statistics = dict(line.split(maxsplit=1) for line in (folder / "memory.stat").read_text().splitlines())
                reclaimable_bytes = sum(int(statistics.get(name, 0)) for name in names.reclaimable)
                yield int(limit) - int((folder / names.usage).read_text()) + reclaimable_bytes
        except (OSError, ValueError):
            pass  # the root has no limit file, and a cgroup may vanish while it is read
        if folder == mount:
            return
        folder = folder.parent


def refuse_if_short(needed_bytes: int, directory: Path, probe: MemoryProbe, subject: str) -> None:
    """ResourceError, naming who refuses and what to do, unless `needed_bytes` more fit into `directory` now."""
    _refuse_beyond(probe.available_limits(directory), needed_bytes, subject, "leaves {}")


def refuse_if_impossible(needed_bytes: int, directory: Path, probe: MemoryProbe, subject: str) -> None:
    """ResourceError where `needed_bytes` would not fit into `directory` if nobody else used any memory."""
    _refuse_beyond(probe.total_limits(directory), needed_bytes, subject, "has {} in all")


def _refuse_beyond(limits: Iterable[MemoryLimit], needed_bytes: int, subject: str, gives: str) -> None:
    for limit in limits:
        if needed_bytes > limit.available_bytes:
            given = gives.format(f"{max(limit.available_bytes, 0) / GIB:.2f} GiB")
            raise ResourceError(
                f"{subject} needs {needed_bytes / GIB:.2f} GiB, but {limit.source} {given}; "
                f"choose a smaller --l1-size-gb or {limit.remedy}"
            )
