"""What each cache salt may keep on a server, the same on all of them: told to each, and again to one that joins."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from urllib.parse import quote

from lmcache.core.key import DEFAULT_SALT
from lmcache.core.limits import GIB
from lmcache.environment import SYSTEM
from lmcache.errors import LMCacheError
from lmcache.fleet.directory import Directory
from lmcache.fleet.instances import Instances
from lmcache.fleet.metadata import Metadata
from lmcache.fleet.servers import Servers
from lmcache.telemetry.log_limiter import LogLimiter

logger = logging.getLogger("lmcache.fleet")

_LOG_SECONDS = 60.0


@dataclass(frozen=True)
class FleetQuota:
    cache_salt: str
    limit_bytes: int
    usage_bytes: int  # over all servers and tiers
    exists: bool
    behind: list[str]  # servers that have not taken it yet


class FleetQuotas:
    """Thread-safe. `push` is called again and again."""

    def __init__(self, metadata: Metadata, instances: Instances, servers: Servers, directory: Directory) -> None:
        self._metadata = metadata
        self._instances = instances
        self._servers = servers
        self._directory = directory
        self._lock = threading.Lock()
        self._untold: dict[str, set[str]] = {}  # salts by server
        self._limiter = LogLimiter(_LOG_SECONDS, SYSTEM.clock)

    def set(self, salt: str, limit_bytes: int | None) -> None:
        """None: no limit any more. LMCacheError: nothing has changed."""
        self._metadata.set_quota(salt, limit_bytes)
        names = [instance.instance_id for instance in self._instances.all()]
        with self._lock:
            for name in names:
                self._untold.setdefault(name, set()).add(salt)

    def get(self, salt: str) -> FleetQuota:
        return self._quota(salt, self._metadata.quotas(), self._directory.bytes_of_salts())

    def all(self) -> list[FleetQuota]:
        """Of every salt that has one or of which a server has something."""
        quotas, used = self._metadata.quotas(), self._directory.bytes_of_salts()
        return [self._quota(salt, quotas, used) for salt in sorted({*quotas, *used})]

    def _quota(self, salt: str, quotas: dict[str, int], used: dict[str, int]) -> FleetQuota:
        with self._lock:
            behind = sorted(name for name, salts in self._untold.items() if salt in salts)
        return FleetQuota(salt, quotas.get(salt, 0), used.get(salt, 0), salt in quotas, behind)

    def joined(self, instance_id: str) -> None:
        with self._lock:
            self._untold[instance_id] = set(self._metadata.quotas())

    def left(self, instance_id: str) -> None:
        with self._lock:
            self._untold.pop(instance_id, None)

    def push(self) -> None:
        """Tells what has not been told. A server that refuses or is away is told again the next time."""
        with self._lock:
            behind = [name for name, salts in self._untold.items() if salts]
        if behind:
            failed = self._servers.run_each(behind, self._tell).failed
            for name, reason in failed.items():
                if self._limiter.due():
                    logger.warning("%s was not told its quotas: %s", name, reason)

    def _tell(self, instance_id: str) -> None:
        while True:
            with self._lock:
                salts = self._untold.get(instance_id)
                if not salts:
                    return
                salt = salts.pop()
            try:
                limit_bytes = self._metadata.quotas().get(salt)
                path = f"/quota/{quote(salt or DEFAULT_SALT, safe='')}"
                if limit_bytes is None:
                    self._servers.ask(instance_id, "DELETE", path)
                else:
                    self._servers.ask(instance_id, "PUT", path, {"limit_gb": limit_bytes / GIB})
            except LMCacheError:
                with self._lock:
                    if instance_id in self._untold:
                        self._untold[instance_id].add(salt)
                raise
