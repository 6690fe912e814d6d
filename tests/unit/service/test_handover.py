"""A decode engine's lookup waits for what a prefill engine is still storing at the same server."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from lmcache.core import limits
from lmcache.core.hint import Hint
from lmcache.errors import RemoteError
from lmcache.protocol import messages as m
from lmcache.service.handover_waits import LOOK_SECONDS
from lmcache.tiering.prefetch import PrefetchResult
from lmcache.transport.deferred import Deferred
from unit.service.support import CHUNK_TOKENS, LAYOUT, SERVER_EPOCH, Service, a_service, chunks

PROMPT = chunks(1, 2, 3)
WAIT_SECONDS = 10.0


@pytest.fixture
def service() -> Iterator[Service]:
    with a_service() as service:
        yield service


@pytest.fixture
def tiered() -> Iterator[Service]:
    with a_service(with_l2=True) as service:
        yield service


def both(service: Service, **options: Any) -> None:
    for instance in ("prefill", "decode"):
        service.register(instance, **options)


def source(tokens: int = 3 * CHUNK_TOKENS, wait_seconds: float = WAIT_SECONDS, **fields: Any) -> m.Source:
    values: dict[str, Any] = {"instance_id": "prefill", "peer_address": "", "server_epoch": SERVER_EPOCH}
    return m.Source(tokens=tokens, wait_seconds=wait_seconds, **{**values, **fields})


class Asked:
    """A lookup of the decode engine."""

    def __init__(self, service: Service, tokens: bytes = PROMPT, request: str = "d", **options: Any) -> None:
        self.service = service
        self.answers: list[Any] = []
        reply = service.ask(request, tokens, instance="decode", source=options.pop("source", source()), **options)
        if isinstance(reply, Deferred):
            reply.bind(self.answers.append)
        else:
            self.answers.append(reply)

    def after(self, seconds: float) -> Any:
        """The answer that is there after that time; None for none."""
        self.service.clock.advance(seconds)
        self.service.loop.run()
        self.service.loop.run()
        return self.answers[0] if self.answers else None

    def look(self) -> Any:
        return self.after(LOOK_SECONDS)


def ends(service: Service) -> dict[str, float]:
    return {
        end: count
        for end in ("stored", "gone", "late")
        if (count := service.sample("handover_waits_total", outcome=end))
    }


def test_it_waits_for_the_commit(service: Service) -> None:
    both(service)
    reserved = service.reserve(PROMPT, instance="prefill")
    asked = Asked(service)
    assert asked.after(5.0) is None
    service.commit(reserved.reservation, instance="prefill")
    assert asked.look().chunks == 3
    assert ends(service) == {"stored": 1}
    assert service.sample("handover_wait_seconds_count") == 1
    assert not service.timers()


def test_what_is_there_already_is_not_waited_for(service: Service) -> None:
    both(service)
    service.store(PROMPT, instance="prefill")
    assert service.lookup("d", PROMPT, instance="decode", source=source()).chunks == 3
    assert ends(service) == {}


def test_it_waits_for_a_store_that_was_ordered_and_has_not_begun(service: Service) -> None:
    both(service)
    asked = Asked(service)
    assert asked.after(limits.HANDOVER_START_SECONDS / 2) is None
    reserved = service.reserve(PROMPT, instance="prefill")
    assert asked.after(5.0) is None
    service.commit(reserved.reservation, instance="prefill")
    assert asked.look().chunks == 3


def test_the_stores_of_several_steps_follow_each_other(service: Service) -> None:
    both(service)
    asked = Asked(service)
    for number in (1, 2, 3):
        assert asked.after(limits.HANDOVER_START_SECONDS * 0.9) is None
        reserved = service.reserve(chunks(*range(1, number + 1)), instance="prefill")
        assert asked.after(1.0) is None
        service.commit(reserved.reservation, instance="prefill")
        answer = asked.look()
    assert answer.chunks == 3


def test_a_store_that_was_ordered_and_does_not_come_costs_little(service: Service) -> None:
    both(service)
    service.store(chunks(1), instance="prefill")
    asked = Asked(service)
    answer = asked.after(limits.HANDOVER_START_SECONDS)
    assert (answer.chunks, answer.miss_reason) == (1, "not_stored")
    assert ends(service) == {"gone": 1}


def test_a_store_behind_others_of_its_engine_is_waited_for(service: Service) -> None:
    """An engine copies one after the other, and reserves room when its turn has come."""
    both(service)
    asked = Asked(service)
    for other in (chunks(7, 8, 9), chunks(4, 5, 6)):
        earlier = service.reserve(other, instance="prefill")
        assert asked.after(limits.HANDOVER_START_SECONDS * 1.5) is None
        service.commit(earlier.reservation, instance="prefill")
    reserved = service.reserve(PROMPT, instance="prefill")
    assert asked.after(1.0) is None
    service.commit(reserved.reservation, instance="prefill")
    assert asked.look().chunks == 3


def test_a_store_of_another_prompt_is_not_waited_for_longer_than_allowed(service: Service) -> None:
    both(service)
    earlier = service.reserve(chunks(7, 8, 9), instance="prefill")
    asked = Asked(service)
    assert asked.after(WAIT_SECONDS - 0.1) is None
    assert asked.after(0.2).chunks == 0
    assert ends(service) == {"late": 1}
    service.commit(earlier.reservation, instance="prefill")


def test_an_abort_ends_it(service: Service) -> None:
    both(service)
    reserved = service.reserve(PROMPT, instance="prefill")
    asked = Asked(service)
    assert asked.look() is None
    assert service.commit(reserved.reservation, bytes(3), instance="prefill") == 0
    assert asked.look().chunks == 0
    assert ends(service) == {"gone": 1}


def test_a_part_that_was_committed_hits(service: Service) -> None:
    both(service)
    reserved = service.reserve(PROMPT, instance="prefill")
    asked = Asked(service)
    assert asked.look() is None
    service.commit(reserved.reservation, b"\1\1\0", instance="prefill")
    assert asked.look() is None
    assert asked.after(limits.HANDOVER_START_SECONDS).chunks == 2


def test_the_death_of_the_prefill_engine_ends_it(service: Service) -> None:
    service.register("decode")
    owner = service.register("prefill")
    worker = service.register_worker("prefill", 0)
    service.reserve(PROMPT, instance="prefill")
    asked = Asked(service)
    assert asked.look() is None
    service.liveness.sweep()  # sees the locks
    service.locks.alive -= {owner, worker}
    service.liveness.sweep()
    assert asked.look().chunks == 0
    assert ends(service) == {"gone": 1}


@pytest.mark.parametrize("named", ["prefill", "never there"])
def test_a_prefill_engine_that_has_gone_is_not_waited_for(named: str, service: Service) -> None:
    service.register("decode")
    reply = service.lookup("d", PROMPT, instance="decode", source=source(instance_id=named))
    assert (reply.chunks, ends(service)) == (0, {})


@pytest.mark.parametrize("other", ["layout", "number of ranks", "rank without a worker"])
def test_an_engine_that_stores_in_other_namespaces_is_not_waited_for(other: str, service: Service) -> None:
    """Also while it stores something else, which would put the end off."""
    ranks = 2 if other == "rank without a worker" else 1
    service.register("decode", ranks=ranks)
    service.register(
        "prefill", ranks=2 if other == "number of ranks" else ranks, layout="cd" * 16 if other == "layout" else LAYOUT
    )
    if other == "rank without a worker":
        service.liveness.unregister(m.Unregister("prefill", 1))
    busy = service.reserve(chunks(7, 8, 9), instance="prefill")
    assert Asked(service).answers[0].chunks == 0
    assert ends(service) == {}
    service.commit(busy.reservation, instance="prefill")


def test_its_time_is_limited(service: Service) -> None:
    both(service)
    reserved = service.reserve(PROMPT, instance="prefill")
    first, second = Asked(service), Asked(service, request="e", deadline_seconds=2.0)
    assert second.after(1.9) is None
    assert second.after(0.2).miss_reason == "being_stored"
    assert first.after(7.0) is None
    assert first.after(1.0).miss_reason == "being_stored"
    assert ends(service) == {"late": 2}
    service.commit(reserved.reservation, instance="prefill")


@pytest.mark.parametrize("options", [{"source": source(wait_seconds=0.0)}, {"source": None}, {"deadline_seconds": 0.0}])
def test_nobody_waits_who_does_not_ask_for_it(options: Any, service: Service) -> None:
    both(service)
    reserved = service.reserve(PROMPT, instance="prefill")
    assert Asked(service, **options).answers[0].chunks == 0
    service.commit(reserved.reservation, instance="prefill")


def test_chunks_that_were_not_announced_are_not_waited_for(service: Service) -> None:
    both(service)
    reserved = service.reserve(PROMPT, instance="prefill")
    asked = Asked(service, chunks(1, 2, 3, 4), source=source(tokens=2 * CHUNK_TOKENS))
    service.commit(reserved.reservation, b"\1\1\0", instance="prefill")
    assert asked.look().chunks == 2
    assert ends(service) == {"stored": 1}


def test_every_rank_has_to_store(service: Service) -> None:
    both(service, ranks=2)
    first = service.reserve(PROMPT, instance="prefill")
    asked = Asked(service)
    assert asked.look() is None
    service.commit(first.reservation, instance="prefill")
    assert asked.after(limits.HANDOVER_START_SECONDS * 0.9) is None  # the other one has not even begun
    second = service.reserve(PROMPT, instance="prefill", worker=1)
    assert asked.after(5.0) is None
    service.commit(second.reservation, instance="prefill", worker=1)
    assert asked.look().chunks == 3


def test_of_a_window_the_end_is_waited_for(service: Service) -> None:
    """Of whose group chunks before the tail are not stored."""
    both(service, groups=2, tails=(0, CHUNK_TOKENS))
    hashes = service.hashes(PROMPT)
    wanted = b"\1\1\1" + b"\0\0\1"
    reserved = service.stores.reserve(m.Reserve("prefill", 0, "", hashes, wanted))
    asked = Asked(service, PROMPT + chunks(9)[:4])
    assert asked.after(5.0) is None
    service.commit(reserved.reservation, wanted, instance="prefill")
    assert asked.look().chunks == 3


def test_an_end_of_the_request_ends_it_and_nothing_stays(service: Service) -> None:
    both(service)
    service.store(chunks(1), instance="prefill")
    reserved = service.reserve(PROMPT, instance="prefill")
    asked = Asked(service)
    assert service.stat("leases") == 1  # of the chunk that was there
    service.end("d", instance="decode")
    assert asked.answers[0].code == m.ErrorCode.CANCELLED
    assert service.stat("leases") == 0
    again = Asked(service)
    service.liveness.unregister(m.Unregister("decode"))
    assert again.answers[0].code == m.ErrorCode.CANCELLED
    service.commit(reserved.reservation, instance="prefill")
    assert again.look().code == m.ErrorCode.CANCELLED
    assert (ends(service), service.stat("leases")) == ({}, 0)


def test_one_that_ends_while_its_answer_is_made_is_answered_once(service: Service) -> None:
    both(service)
    reserved = service.reserve(PROMPT, instance="prefill")
    asked = Asked(service)
    service.commit(reserved.reservation, instance="prefill")
    service.clock.advance(LOOK_SECONDS)
    (timer,) = service.timers()
    assert timer.action is not None
    timer.action()
    timer.cancel()
    service.end("d", instance="decode")
    service.loop.run()
    assert [answer.code for answer in asked.answers] == [m.ErrorCode.CANCELLED]
    assert service.stat("leases") == 0


def test_l2_gets_the_time_that_is_left(tiered: Service) -> None:
    both(tiered)
    reserved = tiered.reserve(PROMPT, instance="prefill")
    asked = Asked(tiered, chunks(1, 2, 3, 4), deadline_seconds=8.0)
    assert asked.after(5.0) is None
    tiered.commit(reserved.reservation, instance="prefill")
    assert asked.look() is None
    (request, on_done), *more = tiered.storage.asked
    assert (request.first_chunk, request.hint, more) == (3, None, [])
    assert request.deadline_seconds == pytest.approx(3.0, abs=0.1)
    on_done(PrefetchResult())
    tiered.loop.run()
    assert asked.answers[0].chunks == 3


def test_another_server_is_asked_by_its_address(tiered: Service) -> None:
    both(tiered)
    elsewhere = source(server_epoch=b"o" * 16, peer_address="10.0.0.7:9500", wait_seconds=100.0)
    Asked(tiered, source=elsewhere)
    Asked(tiered, request="e", source=source(server_epoch=b"o" * 16))
    Asked(tiered, chunks(1, 2, 3, 4), "f", source=elsewhere)  # of the last one nothing was announced
    hints = [request.hint for request, _ in tiered.storage.asked]
    whole = Hint("10.0.0.7:9500", b"o" * 16, limits.MAX_HANDOVER_WAIT_SECONDS)
    assert hints == [whole, None, Hint("10.0.0.7:9500", b"o" * 16, 0.0)]


def test_the_prefix_that_was_there_stays_leased_until_it_is_leased_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody who needs room may take it in between."""
    both(service)
    service.store(chunks(1), instance="prefill")
    reserved = service.reserve(PROMPT, instance="prefill")
    asked = Asked(service)
    service.commit(reserved.reservation, instance="prefill")
    leases: list[int] = []
    acquire = service.l1.acquire

    def noting(*args: Any) -> Any:
        leases.append(service.stat("leases"))
        return acquire(*args)

    monkeypatch.setattr(service.l1, "acquire", noting)
    assert asked.look().chunks == 3
    assert (leases, service.stat("leases")) == ([1], 1)


def test_a_fault_after_the_wait_is_answered(tiered: Service, caplog: pytest.LogCaptureFixture) -> None:
    both(tiered)
    reserved = tiered.reserve(PROMPT, instance="prefill")
    asked = Asked(tiered, chunks(1, 2, 3, 4))
    tiered.storage.fault = RuntimeError("a defect")
    tiered.commit(reserved.reservation, instance="prefill")
    assert asked.look().code == m.ErrorCode.INTERNAL
    assert "a defect" in caplog.text
    assert tiered.stat("leases") == 0 and not tiered.timers()


def test_a_fault_of_one_wait_ends_no_other(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    both(service)
    service.register("third")

    class Faulty(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            if name == "third":
                raise RuntimeError("a defect")
            return super().get(name, default)

    reserved = service.reserve(PROMPT, instance="prefill")
    waiting = Asked(service)
    faulty = Asked(service, chunks(7, 8), "e", source=source(instance_id="third"))
    assert faulty.look() is None
    monkeypatch.setattr(service.registry, "instances", Faulty(service.registry.instances))
    assert faulty.look().chunks == 0
    assert "a defect" in caplog.text
    service.commit(reserved.reservation, instance="prefill")
    assert waiting.look().chunks == 3
    assert ends(service) == {"stored": 1, "gone": 1}


def test_so_many_wait_at_once(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    both(service)
    monkeypatch.setattr(limits, "MAX_HANDOVER_WAITS", 2)
    reserved = service.reserve(PROMPT, instance="prefill")
    asked = [Asked(service, request=f"d{number}") for number in range(3)]
    assert [len(each.answers) for each in asked] == [0, 0, 1]
    service.commit(reserved.reservation, instance="prefill")
    asked[0].look()
    assert [each.answers[0].chunks for each in asked] == [3, 3, 0]


@pytest.mark.parametrize(
    "wrong", [source(wait_seconds=math.nan), source(wait_seconds=-1.0), source(tokens=-1), source(tokens=1 << 60)]
)
def test_a_source_that_cannot_be_is_refused(wrong: m.Source, service: Service) -> None:
    both(service)
    with pytest.raises(RemoteError) as refused:
        service.ask("d", PROMPT, instance="decode", source=wrong)
    assert refused.value.code == m.ErrorCode.BAD_REQUEST
    assert not service.registry.instances["decode"].sessions
