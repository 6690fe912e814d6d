from __future__ import annotations

from lmcache.l2.circuit_breaker import CircuitBreaker
from manual_clock import ManualClock


def make() -> tuple[ManualClock, CircuitBreaker]:
    clock = ManualClock()
    return clock, CircuitBreaker(clock, failures=3, open_seconds=5, max_open_seconds=20)


def test_it_opens_after_some_failures_in_a_row() -> None:
    clock, breaker = make()
    assert not breaker.failed() and not breaker.failed()
    breaker.succeeded()
    assert [breaker.failed(), breaker.failed(), breaker.failed()] == [False, False, True]
    assert breaker.is_open and not breaker.admits()
    clock.advance(5)
    assert breaker.admits() and not breaker.admits()  # one trial
    assert breaker.succeeded() and breaker.admits()


def test_a_costly_failure_opens_it_at_once() -> None:
    _, breaker = make()
    assert breaker.failed(at_once=True)
    assert not breaker.admits()


def test_only_trials_make_it_stay_open_for_longer() -> None:
    clock, breaker = make()
    breaker.failed(at_once=True)
    for _ in range(10):
        assert not breaker.failed(at_once=True)  # operations that were under way
    assert breaker.open_seconds == 5
    for expected in (10, 20, 20):
        clock.advance(breaker.open_seconds)
        assert breaker.admits()
        assert not breaker.failed()
        assert breaker.open_seconds == expected
        assert not breaker.admits()
    clock.advance(20)
    assert breaker.admits() and breaker.succeeded()
    assert breaker.open_seconds == 5
