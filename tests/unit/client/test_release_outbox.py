"""What the server must hear of, although nobody waits for its answer."""

from __future__ import annotations

import pytest

from lmcache.client.engine_environment import EngineEnvironment
from lmcache.client.release_outbox import ReleaseOutbox
from lmcache.errors import ServerUnavailable
from lmcache.protocol.messages import Empty, EndSession, Release
from manual_clock import ManualClock
from unit.integration.vllm.fakes import FakeClient, hello


def test_notices_that_were_lost_are_sent_again_to_the_same_server_epoch() -> None:
    clock = ManualClock()
    client = FakeClient(clock)
    outbox = ReleaseOutbox(client, EngineEnvironment(clock))  # type: ignore[arg-type]
    present = client.hello
    client.answers["end_session"] = lambda _: ServerUnavailable("away")
    outbox.send("end_session", EndSession("i", "a"))
    assert outbox.retry() == 1
    client.answers["end_session"] = lambda _: Empty()
    assert outbox.retry() == 1  # sent
    assert outbox.retry() == 0  # and confirmed
    assert [m.request_id for m in client.messages("end_session")][-1] == "a"

    client.answers["release"] = lambda _: ServerUnavailable("away")
    outbox.send("release", Release("i", 5))
    client.hello = hello(b"epoch-two-epoch-")
    assert outbox.retry() == 0  # the new server has no such lease
    client.hello = present
    outbox.close()


def test_a_fault_of_one_notice_loses_none(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    client = FakeClient(clock)
    client.answers["release"] = lambda _: ServerUnavailable("away")
    outbox = ReleaseOutbox(client, EngineEnvironment(clock))  # type: ignore[arg-type]
    for lease in (1, 2, 3):
        outbox.send("release", Release("i", lease))

    def no_memory(message: Release) -> Empty:
        if message.lease >= 2:
            raise MemoryError
        return Empty()

    client.answers["release"] = no_memory
    assert outbox.retry() == 3 and outbox.retry() == 2
    assert caplog.text.count("release was not sent") == 1  # not a line for each, each second
    clock.advance(60.0)
    assert outbox.retry() == 2
    assert caplog.text.count("release was not sent") == 2
    client.answers["release"] = lambda _: Empty()
    while outbox.retry():
        pass
    assert {message.lease for message in client.messages("release")[-2:]} == {2, 3}
    outbox.close()


def test_the_end_of_an_unanswered_request_is_repeated_later() -> None:
    clock = ManualClock()
    client = FakeClient(clock)
    client.answers["end_session"] = lambda _: Empty()
    outbox = ReleaseOutbox(client, EngineEnvironment(clock))  # type: ignore[arg-type]
    outbox.send("end_session", EndSession("i", "a"), twice=True)
    assert outbox.retry() == 1
    clock.advance(60.0)
    assert outbox.retry() == 1
    assert outbox.retry() == 0
    assert len(client.messages("end_session")) == 2
    outbox.close()
