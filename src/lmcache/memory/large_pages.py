"""How much of L1 the kernel holds in large pages, as it says in /proc/self/smaps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from lmcache.clock import Clock

log = logging.getLogger("lmcache.memory")

_LARGE = ("ShmemPmdMapped:", "FilePmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:")
_HUGETLB = ("Shared_Hugetlb:", "Private_Hugetlb:")  # which Rss does not count
_REFRESH_SECONDS = 60.0


def large_page_share(path: str, smaps: Path = Path("/proc/self/smaps")) -> float:
    """The share of large pages in what this process has mapped of that file and what is in memory, from 0 to 1; 0 where
    nothing is."""
    resident = large = 0
    is_wanted = False
    with smaps.open() as lines:
        for line in lines:
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                is_wanted = line.rstrip("\n").endswith(f" {path}")
            elif is_wanted and (name == "Rss:" or name in _LARGE):
                kibibytes = int(rest.split()[0])
                large += kibibytes if name in _LARGE else 0
                resident += kibibytes if name == "Rss:" or name in _HUGETLB else 0
    return min(1.0, large / resident) if resident else 0.0


class LargePageGauge:
    """Asks on a thread of its own, once a minute at most: the kernel walks the whole mapping for it."""

    def __init__(self, path: str, publish: Callable[[float], object], clock: Clock) -> None:
        self._path = path
        self._publish = publish
        self._clock = clock
        self._asked_at = -_REFRESH_SECONDS
        self._asking: threading.Thread | None = None

    def refresh(self) -> None:
        now_seconds = self._clock.monotonic()
        is_asking = self._asking is not None and self._asking.is_alive()
        if is_asking or now_seconds - self._asked_at < _REFRESH_SECONDS:
            return
        self._asked_at = now_seconds
        self._asking = threading.Thread(target=self._ask, name="lmcache-smaps", daemon=True)
        self._asking.start()

    def _ask(self) -> None:
        try:
            self._publish(large_page_share(self._path))
        except OSError as error:
            log.debug("The large pages of L1 cannot be counted: %s", error)
