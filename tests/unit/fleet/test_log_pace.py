from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lmcache.core.limits import MAX_FLEET_RESYNCS, MAX_LOGGED_EVENT_REQUESTS, MAX_TOLD_LOG_REQUESTS
from lmcache.fleet.event_log import Heard, LogPace
from lmcache.fleet.fleet import Fleet
from manual_clock import ManualClock


def ahead(requests: int = MAX_TOLD_LOG_REQUESTS, clock: ManualClock | None = None) -> LogPace:
    """A server that has appended so many requests of two batches each, of incarnation 5."""
    pace = LogPace(clock or ManualClock())
    for number in range(1, 1 + requests):
        pace.appended(5, 2 * number)
    return pace


def test_a_server_goes_on_as_far_as_the_coordinator_has_read() -> None:
    assert not ahead(MAX_TOLD_LOG_REQUESTS - 1).is_ahead
    pace = ahead(10)
    for incarnation, seq, most, is_ahead in (
        (0, 0, 10, True),
        (0, 0, 11, False),
        (4, 99, 10, True),  # an earlier incarnation
        (5, 1, 10, True),  # not the whole request
        (5, 2, 10, False),
        (5, 2, 9, True),
        (5, 19, 1, True),
        (5, 20, 1, False),
    ):
        pace.heard(Heard(incarnation, seq=seq, log_requests=most))
        assert pace.is_ahead == is_ahead, (incarnation, seq, most)
    pace = ahead(10)
    pace.heard(Heard(6, seq=0, log_requests=1))
    assert not pace.is_ahead


def test_a_coordinator_that_does_not_say_what_it_has_read_is_not_waited_for() -> None:
    pace = ahead(10 * MAX_LOGGED_EVENT_REQUESTS)
    pace.heard(Heard(5))
    assert not pace.is_ahead


def test_what_is_lost_does_not_keep_it_for_ever() -> None:
    clock = ManualClock()
    pace = ahead(10, clock)
    pace.heard(Heard(5, seq=2, log_requests=3))
    clock.advance(4.0)
    assert pace.is_ahead and not pace.is_stalled  # something was read
    clock.advance(4.0)
    assert not pace.is_stalled
    clock.advance(2.0)
    assert pace.is_ahead and pace.is_stalled
    pace.appended(5, 22)
    assert pace.is_ahead and not pace.is_stalled


def test_a_log_keeps_what_is_unread_of_as_many_servers_as_the_guide_says() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "how-to" / "tell_the_coordinator_by_a_log.md").read_text()
    (limit,) = map(int, re.findall(r"more than (\d+) servers", guide))
    for servers in (1, 2, 10, 300, limit):
        assert most_unread(servers) <= MAX_LOGGED_EVENT_REQUESTS, servers
    assert most_unread(limit + 1) > MAX_LOGGED_EVENT_REQUESTS


def most_unread(servers: int) -> int:
    """While as many as may do tell everything."""
    turns = SimpleNamespace(has=lambda instance_id: False)
    fleet: Any = SimpleNamespace(log_reader=object(), intake=SimpleNamespace(turns=turns), instances=range(servers))
    return servers * Fleet.log_requests(fleet, "a") + MAX_FLEET_RESYNCS * MAX_TOLD_LOG_REQUESTS
