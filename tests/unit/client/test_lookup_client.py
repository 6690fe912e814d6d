"""What a session leaves at a server."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache.client.engine_environment import EngineEnvironment
from lmcache.client.lookup_client import LookupClient, PartialChunk, Progress, RequestSession
from lmcache.protocol.messages import AppendReply, LookupReply, Source
from manual_clock import ManualClock
from unit.integration.vllm.fakes import FakeClient, FakePending, hello


class ReplacedClient(FakeClient):
    """Whose server is replaced by another one just before a lookup is sent."""

    def submit(self, method: str, message: Any, timeout_seconds: float) -> FakePending:
        if method == "lookup":
            self.hello = hello(b"epoch-two-epoch-")
        return super().submit(method, message, timeout_seconds)


def test_a_lookup_that_another_server_got_leaves_no_session_there() -> None:
    clock = ManualClock()
    client = ReplacedClient(clock)
    lookups = LookupClient(client, "i", EngineEnvironment(clock))  # type: ignore[arg-type]
    session = RequestSession("a", "", b"", bytes(4 * 256))
    assert not lookups.lookup(session)
    assert [message.request_id for message in client.messages("end_session")] == ["a"]
    lookups.close()


def a_session(tokens: int, unit: int = 16) -> tuple[FakeClient, LookupClient, RequestSession]:
    clock = ManualClock()
    client = FakeClient(clock)
    lookups = LookupClient(client, "i", EngineEnvironment(clock))  # type: ignore[arg-type]
    return client, lookups, RequestSession("a", "", b"", bytes(4 * tokens), partial_unit_tokens=unit)


@pytest.mark.parametrize(
    ("tokens", "unit", "partial"),
    [(600, 16, 80), (600, 128, 0), (600, 0, 0), (40, 16, 32), (512, 16, 0), (767, 1, 255)],
)
def test_whole_units_behind_the_last_full_chunk_are_named(tokens: int, unit: int, partial: int) -> None:
    client, lookups, session = a_session(tokens, unit)
    assert lookups.lookup(session)
    assert lookups.append(session)
    assert [message.partial_tokens for _, message, _ in client.sent] == [partial, partial]
    lookups.close()


@pytest.mark.parametrize(("stored", "partial"), [(512, 0), (704, 192), (700, 176), (720, 208), (1000, 208), (100, 0)])
def test_of_what_is_handed_over_only_what_is_stored_is_named(stored: int, partial: int) -> None:
    _, lookups, session = a_session(720)
    session.source = Source("p", "", bytes(16), stored)
    assert session.partial_tokens(256) == partial
    lookups.close()


@pytest.mark.parametrize(
    ("chunks", "hashes", "partial_tokens", "hit_tokens", "full_chunks"),
    [
        (0, 3, 80, 0, 0),
        (2, 3, 80, 512, 2),
        (3, 3, 80, 592, 2),
        (2, 2, 0, 512, 2),  # a server that knows no partial chunks
        (4, 3, 80, 0, 2),  # answers that contradict themselves
        (3, 2, 0, 0, 2),
        (3, 3, 96, 0, 2),
        (3, 3, 81, 0, 2),
        (1, 0, 80, 0, 0),
    ],
)
def test_what_an_answer_hits(chunks: int, hashes: int, partial_tokens: int, hit_tokens: int, full_chunks: int) -> None:
    client, lookups, session = a_session(600)
    assert lookups.lookup(session)
    packed = b"".join(bytes([number]) * 32 for number in range(hashes))
    reply = LookupReply(chunks, chunks, 7, packed, bytes(8 * chunks), partial_tokens=partial_tokens)
    client.pendings("lookup")[0].outcome = reply
    assert lookups.take_answer(session) is Progress.ANSWERED
    assert (session.hit_tokens, session.full_hit_chunks) == (hit_tokens, full_chunks)
    assert session.partial == (PartialChunk(bytes([2]) * 32, 80) if (hashes, partial_tokens) == (3, 80) else None)
    lookups.close()


def test_a_partial_chunk_gives_way_to_the_chunk_that_it_began() -> None:
    client, lookups, session = a_session(600)
    assert lookups.lookup(session)
    client.pendings("lookup")[0].outcome = LookupReply(0, 0, 0, bytes(64) + b"p" * 32, b"", partial_tokens=80)
    assert lookups.take_answer(session) is Progress.ANSWERED
    assert session.partial == PartialChunk(b"p" * 32, 80)
    session.tokens += bytes(4 * 168)
    session.partial_unit_tokens = 0
    assert lookups.append(session)
    client.pendings("append")[0].outcome = AppendReply(2, b"f" * 32)
    assert lookups.take_hashes(session) is Progress.ANSWERED
    assert (session.hashes.packed, session.partial) == (bytes(64) + b"f" * 32, None)
    lookups.close()


def test_a_name_of_fewer_tokens_than_the_request_has_by_now_is_dropped() -> None:
    client, lookups, session = a_session(600)
    assert lookups.append(session)
    session.tokens += bytes(4 * 16)
    client.pendings("append")[0].outcome = AppendReply(0, bytes(64) + b"p" * 32, 80)
    assert lookups.take_hashes(session) is Progress.ANSWERED
    assert (len(session.hashes), session.partial) == (2, None)
    lookups.close()
