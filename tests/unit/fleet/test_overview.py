"""What a server's page is told of the fleet: asked for once in a while, and kept where the coordinator is away."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lmcache.errors import ServerUnavailable
from lmcache.fleet import membership
from lmcache.fleet.membership import MemberSettings
from lmcache.fleet.overview import OverviewCache
from lmcache.http.fleet_messages import FleetOverview, FleetServer
from manual_clock import ManualClock

SERVER = FleetServer("b", "http://127.0.0.1:1", 5.0, 1.0, 1, 2, 3, 4, "everything", [])


class Answers:
    """A coordinator that is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self.is_away = False
        monkeypatch.setattr(membership, "request", self._request)

    def _request(self, url: str, method: str, path: str, body: Any, **_: Any) -> Any:
        assert (method, path) == ("GET", "/fleet")
        self.asked += 1
        if self.is_away:
            raise ServerUnavailable("nothing answers")
        return msgspec.to_builtins(FleetOverview([SERVER], 30.0))


def test_it_is_asked_for_once_in_a_while_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, clock = Answers(monkeypatch), ManualClock()
    cache = OverviewCache(MemberSettings("http://c:9300", "a", 8080, 5555), clock)
    first = cache.get(joined=True)
    assert (first.servers, first.instance_timeout_seconds, first.problem) == ([SERVER], 30.0, "")
    assert (first.coordinator, first.instance_id, first.joined) == ("http://c:9300", "a", True)
    clock.advance(1.0)
    assert cache.get(joined=True).age_seconds == 1.0
    assert answers.asked == 1
    answers.is_away = True
    clock.advance(4.0)
    for _ in range(3):
        later = cache.get(joined=False)
        assert (later.servers, later.problem, later.age_seconds) == ([SERVER], "nothing answers", 5.0)
    assert answers.asked == 2, "a coordinator that is away is not asked more often"
    answers.is_away = False
    clock.advance(2.0)
    assert cache.get(joined=True).problem == ""
