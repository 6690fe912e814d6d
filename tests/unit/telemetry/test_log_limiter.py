from __future__ import annotations

from lmcache.telemetry.log_limiter import LogLimiter
from manual_clock import ManualClock


def test_each_kind_is_due_once_until_it_is_reset() -> None:
    limiter = LogLimiter()
    assert [limiter.due("full"), limiter.due(5), limiter.due("full"), limiter.due(5)] == [True, True, False, False]
    limiter.reset()
    assert limiter.due("full") and not limiter.due("full")


def test_with_an_interval_each_kind_is_due_again_after_it() -> None:
    clock = ManualClock()
    limiter = LogLimiter(10.0, clock)
    assert limiter.due() and not limiter.due()
    clock.advance(9.9)
    assert not limiter.due()
    assert limiter.due("another")
    clock.advance(0.1)
    assert limiter.due() and not limiter.due() and not limiter.due("another")
