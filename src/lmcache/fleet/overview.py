"""The fleet at a glance, for the page of a server: what its coordinator says of all servers."""

from __future__ import annotations

import threading

import msgspec

from lmcache.clock import Clock
from lmcache.errors import LMCacheError
from lmcache.fleet.membership import Coordinator, MemberSettings
from lmcache.http.fleet_messages import FleetOverview

_ASK_SECONDS = 3.0
_KEPT_SECONDS = 2.0  # from one question to the next


class OverviewCache:
    """Thread-safe. However many look at the page, the coordinator is asked once in a while, with the server's token."""

    def __init__(self, settings: MemberSettings, clock: Clock) -> None:
        self._url = settings.url
        self._instance_id = settings.instance_id
        self._coordinator = Coordinator(settings)
        self._clock = clock
        self._lock = threading.Lock()
        self._latest = FleetOverview([], 0.0)
        self._problem = ""
        self._told_at: float | None = None
        self._asked_at = float("-inf")

    def get(self, *, joined: bool) -> FleetOverview:
        """What the coordinator said last, and why it says nothing now. Takes a few seconds at most."""
        with self._lock:
            if self._clock.monotonic() - self._asked_at >= _KEPT_SECONDS:
                self._ask()
            age_seconds = self._clock.monotonic() - self._told_at if self._told_at is not None else 0.0
            return msgspec.structs.replace(
                self._latest,
                coordinator=self._url,
                instance_id=self._instance_id,
                joined=joined,
                problem=self._problem,
                age_seconds=round(age_seconds, 3),
            )

    def _ask(self) -> None:
        try:
            self._latest = self._coordinator.read(FleetOverview, "GET", "/fleet", seconds=_ASK_SECONDS)
            self._problem, self._told_at = "", self._clock.monotonic()
        except LMCacheError as error:
            self._problem = str(error)
        self._asked_at = self._clock.monotonic()
