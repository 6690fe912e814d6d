"""A server joins a fleet: its membership and its reporter, started and ended together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmcache.clock import Clock
from lmcache.core.object_changes import ChangeSource
from lmcache.fleet.event_log import Heard
from lmcache.fleet.membership import Member, MemberSettings, Membership
from lmcache.fleet.overview import OverviewCache
from lmcache.fleet.reporting import EventReporting
from lmcache.http.fleet_messages import FleetOverview
from lmcache.telemetry.metrics import FleetMemberMetrics


class FleetMember:
    """Two threads that nothing else waits for. With no `sources` nothing is reported."""

    def __init__(
        self,
        settings: MemberSettings,
        sources: Sequence[ChangeSource],
        metrics: FleetMemberMetrics,
        clock: Clock,
        on_members: Callable[[Sequence[Member]], None] = lambda members: None,
    ) -> None:
        """`on_members` is called by the thread of the membership with all servers, this one included, whenever others
        may be there."""
        self._reporter = EventReporting(settings, sources, metrics, clock) if sources else None
        self._membership = Membership(settings, metrics, clock, self._joined, self._took, self._heard)
        self._overview = OverviewCache(settings, clock)
        self._on_members = on_members
        self._members: Sequence[Member] = ()

    @property
    def members(self) -> Sequence[Member]:
        """The servers that the coordinator named last."""
        return self._members

    def start(self) -> None:
        if self._reporter is not None:
            self._reporter.start()
        self._membership.start()

    def stop(self) -> None:
        """Takes a second at most, to take leave."""
        if self._reporter is not None:
            self._reporter.stop()
        self._membership.stop()

    def status(self) -> dict[str, object]:
        return {
            "joined": self._membership.joined,
            "members": len(self._members),
            "incarnation": self._reporter.incarnation if self._reporter is not None else 0,
        }

    def overview(self) -> FleetOverview:
        """All servers, as the coordinator has them. Takes a few seconds where it does not answer."""
        return self._overview.get(joined=self._membership.joined)

    def _joined(self, incarnation: int) -> None:
        if self._reporter is not None:
            self._reporter.joined(incarnation)

    def _heard(self, heard: Heard) -> None:
        if self._reporter is not None:
            self._reporter.heard(heard)

    def _took(self, members: Sequence[Member]) -> None:
        self._members = members
        self._on_members(members)
