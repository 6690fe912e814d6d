"""A request that finds another one computing its prefix waits for it, and only as long as that brings something."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from lmcache.client.engine_environment import EngineEnvironment
from lmcache.integration.engine.connector_metadata import WorkerReport
from lmcache.integration.engine.inflight_prefixes import PATIENCE_SECONDS
from lmcache.integration.vllm.groups import CacheGroup
from lmcache.integration.vllm.scheduler_options import SchedulerOptions
from lmcache.integration.vllm.scheduler_side import SchedulerSide
from manual_clock import ManualClock
from unit.integration.vllm.fakes import FakeBlockPool, FakeClient, answer, hello, output, request, step

PROMPT = 1024  # 4 chunks of 2 blocks


class Burst:
    """The first request computes, the second one comes when nothing is stored yet."""

    def __init__(self, *, workers: int = 1, second_salt: str | None = None, blocks: int = 400) -> None:
        self.clock = ManualClock()
        self.client = FakeClient(self.clock)
        self.side = SchedulerSide(
            self.client,  # type: ignore[arg-type]
            "i",
            SchedulerOptions(groups=(CacheGroup(128, ("layer0",)),), ranks=1, workers=workers),
            environment=EngineEnvironment(self.clock),
        )
        self.side.bind(FakeBlockPool(blocks), lambda request_id: (list(range(1, 9)),))
        self.in_l1 = 0
        self.client.answers["lookup"] = lambda message: answer(self.in_l1, PROMPT)
        self.first, self.second = request("first", PROMPT), request("second", PROMPT, cache_salt=second_salt)
        self.side.on_new_request(self.first)
        self.side.on_new_request(self.second)
        assert self.side.matched_tokens(self.first, 0) == (0, False)
        self.side.after_allocation(self.first, ([1, 2, 3, 4, 5, 6, 7, 8],), 0)

    def run(self, computed: int, tokens: int) -> list[int]:
        """A step of the first request; the jobs of its stores."""
        orders = self.side.step_metadata(step(new=[("first", computed, tokens)]))
        self.clock.advance(0.01)
        return [order.job for order in orders.stores]

    def stored(self, jobs: list[int], in_l1: int, reports: int = 1) -> None:
        self.in_l1 = in_l1
        counted = Counter(dict.fromkeys(jobs, reports))
        self.side.step_ended(output(report=WorkerReport(counted, {}, counted)))

    def asked(self) -> tuple[int | None, bool]:
        return self.side.matched_tokens(self.second, 0)

    def lookups(self) -> int:
        return len(self.client.messages("lookup"))


def test_it_waits_until_the_whole_common_prefix_is_stored() -> None:
    burst = Burst()
    assert burst.asked() == (None, False)
    jobs = burst.run(0, 512)
    burst.stored(jobs, 2)
    assert burst.asked() == (None, False)  # two chunks are there, two more are being computed
    jobs = burst.run(512, 512)
    assert burst.asked() == (None, False)  # computed, not stored
    assert burst.lookups() == 2
    burst.stored(jobs, 4)
    burst.side.request_finished(burst.first, ((),))
    assert burst.asked() == (1024, True)
    assert burst.lookups() == 3


def test_all_ranks_have_to_have_stored() -> None:
    burst = Burst(workers=2)
    jobs = burst.run(0, 1024)
    burst.stored(jobs, 0)
    assert burst.asked() == (None, False)
    burst.stored(jobs, 4)
    assert burst.asked() == (1024, True)


def test_what_the_engine_holds_itself_is_not_waited_for() -> None:
    burst = Burst()
    assert burst.side.matched_tokens(burst.second, 1024) == (0, False)
    assert burst.side.matched_tokens(burst.second, 768) == (None, False)


def test_other_salts_and_other_tokens_wait_for_nobody() -> None:
    assert Burst(second_salt="tenant").asked() == (0, False)
    burst = Burst()
    burst.client.answers["lookup"] = lambda message: _others()
    burst.side.on_new_request(third := request("third", PROMPT))
    assert burst.side.matched_tokens(third, 0) == (0, False)


def _others() -> Any:
    reply = answer(0, PROMPT)
    reply.hashes = bytes(255 - byte for byte in reply.hashes)
    return reply


@pytest.mark.parametrize("end", ["aborted", "preempted", "silent", "server gone"])
def test_one_that_does_not_go_on_is_not_waited_for(end: str) -> None:
    burst = Burst()
    burst.stored(burst.run(0, 256), 1)
    assert burst.asked() == (None, False)
    if end == "aborted":
        burst.side.request_finished(burst.first, ((),))
    elif end == "preempted":
        burst.side.matched_tokens(burst.first, 0)
    elif end == "silent":
        burst.clock.advance(PATIENCE_SECONDS + 0.1)
    else:
        burst.client.hello = hello(b"epoch-two-epoch-")
        burst.in_l1 = 0
    assert burst.asked() == ((0, False) if end == "server gone" else (256, True))


def test_a_store_that_brings_nothing_is_asked_about_once() -> None:
    burst = Burst()
    burst.stored(burst.run(0, 1024), 0)
    assert burst.asked() == (0, False)
    assert burst.lookups() == 3
    assert burst.asked() == (0, False)
    assert burst.lookups() == 3


def test_what_is_stored_in_later_steps_is_waited_for_but_not_for_ever() -> None:
    burst = Burst(blocks=10)  # half of which may be pinned: two chunks
    jobs = burst.run(0, 1024)
    burst.stored(jobs, 2)
    assert burst.asked() == (None, False)
    burst.clock.advance(PATIENCE_SECONDS - 0.1)
    jobs = burst.run(1024, 1)
    burst.clock.advance(PATIENCE_SECONDS - 0.1)
    assert burst.asked() == (None, False)
    burst.run(1025, 1)
    burst.clock.advance(0.2)
    assert burst.asked() == (512, True)
    burst.clock.advance(0.1)
    burst.stored(jobs, 4)
    assert burst.asked() == (1024, True)


def test_the_next_one_of_a_burst_takes_over_when_the_first_is_aborted() -> None:
    burst = Burst()
    burst.side.on_new_request(third := request("third", PROMPT))
    assert burst.asked() == burst.side.matched_tokens(third, 0) == (None, False)
    burst.side.request_finished(burst.first, ((),))
    assert burst.asked() == (0, False)
    burst.side.after_allocation(burst.second, ([1, 2, 3, 4, 5, 6, 7, 8],), 0)
    assert burst.side.matched_tokens(third, 0) == (None, False)
