"""What the HTTP listener needs of a server."""

from __future__ import annotations

from typing import Any, Protocol

from lmcache.admin.audit import AuditLog
from lmcache.config.spec import ServerConfig
from lmcache.http.fleet_messages import FleetOverview
from lmcache.l1.quota import Quotas
from lmcache.service.cache_operations import CacheOperations
from lmcache.telemetry.metrics import Metrics


class ServerState(Protocol):
    """Implemented by `Server`. Every method may be called from any thread, and none waits without a bound."""

    @property
    def config(self) -> ServerConfig: ...

    @property
    def metrics(self) -> Metrics: ...

    @property
    def quotas(self) -> Quotas: ...

    @property
    def audit_log(self) -> AuditLog:
        """Where every change is recorded, and every refused one."""
        ...

    def health(self, within_seconds: float) -> str:
        """ "" when the message loop and the storage loop both answered within the bound, else one sentence that names
        the one that did not. Must ask them, not remember."""
        ...

    def ready(self) -> bool:
        """True from the moment that engines may connect until draining begins."""
        ...

    def status(self) -> dict[str, Any]:
        """Figures for operators, as JSON values: uptime, addresses, L1, L2 adapters, instances, sessions, leases."""
        ...

    def fleet(self) -> FleetOverview | None:
        """All servers of the fleet, None without a coordinator. Takes a few seconds where that does not answer."""
        ...

    def clear(self, tier: str, *, force: bool) -> tuple[int, int]:
        """Removes every object that no lease holds from "l1", "l2" or "all": (objects, bytes). Pinned ones stay unless
        `force` is given. LMCacheError when a tier does not answer in time."""
        ...

    @property
    def operations(self) -> CacheOperations:
        """There when `ready`."""
        ...
