"""Huge pages for L1: where they are mounted and how many are free."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lmcache.core.limits import GIB, MIB
from lmcache.core.rounding import div_ceil
from lmcache.errors import ResourceError


@dataclass(frozen=True)
class HugePages:
    """A mounted hugetlbfs and the pool of pages behind it."""

    directory: Path
    page_bytes: int
    free_pages: int

    def refuse_if_short(self, size_bytes: int) -> None:
        """ResourceError unless `size_bytes` can be taken from the pool."""
        needed_pages = div_ceil(size_bytes, self.page_bytes)
        if needed_pages > self.free_pages:
            raise ResourceError(
                f"L1 needs {needed_pages} huge pages of {self.page_bytes // MIB} MiB ({size_bytes / GIB:.2f} GiB), but "
                f"{self.free_pages} are free; reserve more (sysctl vm.nr_hugepages) or drop --l1-use-hugepages"
            )


def find_hugepages(mounts: Path = Path("/proc/mounts"), pools: Path = Path("/sys/kernel/mm/hugepages")) -> HugePages:
    """The writable hugetlbfs with the most free memory, else a ResourceError that says how to get one."""
    found = []
    for line in mounts.read_text().splitlines():
        _, directory, kind, options, *_ = line.split()
        if kind != "hugetlbfs" or not os.access(directory, os.W_OK):
            continue
        page_bytes = os.statvfs(directory).f_bsize if "pagesize=" not in options else _page_bytes(options)
        pool = pools / f"hugepages-{page_bytes // 1024}kB"
        try:
            free_pages = int((pool / "free_hugepages").read_text()) - int((pool / "resv_hugepages").read_text())
        except OSError:
            continue
        found.append(HugePages(Path(directory), page_bytes, free_pages))
    if not found:
        raise ResourceError(
            "--l1-use-hugepages needs a writable hugetlbfs, and none is mounted; "
            "mount one (mount -t hugetlbfs none /dev/hugepages) or drop the flag"
        )
    return max(found, key=lambda huge: huge.free_pages * huge.page_bytes)


def _page_bytes(options: str) -> int:
    (size,) = [option.removeprefix("pagesize=") for option in options.split(",") if option.startswith("pagesize=")]
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(size.rstrip("KMG")) * units.get(size[-1].upper(), 1)
