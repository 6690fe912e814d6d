"""What the server must be told of, although nobody waits for its answer."""

from __future__ import annotations

from lmcache.clock import ManualClock
from lmcache.errors import ServerUnavailable
from lmcache.integration.vllm.notices import Notices
from lmcache.protocol.messages import Empty, EndSession, Release
from unit.integration.vllm.fakes import FakeClient, hello


def test_notices_that_were_lost_are_sent_again_to_the_same_server_life() -> None:
    clock = ManualClock()
    client = FakeClient(clock)
    notices = Notices(client, clock)  # type: ignore[arg-type]
    present = client.hello
    client.answers["end_session"] = lambda _: ServerUnavailable("away")
    notices.send("end_session", EndSession("i", "a"))
    assert notices.look() == 1
    client.answers["end_session"] = lambda _: Empty()
    assert notices.look() == 1  # sent
    assert notices.look() == 0  # and confirmed
    assert [m.request_id for m in client.messages("end_session")][-1] == "a"

    client.answers["release"] = lambda _: ServerUnavailable("away")
    notices.send("release", Release("i", 5))
    client.hello = hello(b"boot-two-boot-tw")
    assert notices.look() == 0  # the new life has no such lease
    client.hello = present
    notices.close()


def test_the_end_of_an_unanswered_request_is_repeated_later() -> None:
    clock = ManualClock()
    client = FakeClient(clock)
    client.answers["end_session"] = lambda _: Empty()
    notices = Notices(client, clock)  # type: ignore[arg-type]
    notices.send("end_session", EndSession("i", "a"), twice=True)
    assert notices.look() == 1
    clock.advance(60.0)
    assert notices.look() == 1
    assert notices.look() == 0
    assert len(client.messages("end_session")) == 2
    notices.close()
