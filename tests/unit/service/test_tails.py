"""Object groups that need only the end of a hit: windows and recurrent states."""

from __future__ import annotations

import pytest

from lmcache.errors import RemoteError
from lmcache.protocol import messages as m
from lmcache.protocol.tokens import pack_tokens
from unit.service.support import CHUNK_TOKENS, NO_SLOT, Service, a_service, chunks, slots

ONE_MORE = pack_tokens([1])


def store(service: Service, tokens: bytes, written: list[int]) -> None:
    """`written`: of [group][chunk]."""
    reply = service.reserve(tokens)
    service.commit(reply.reservation, bytes(written))


def test_a_hit_ends_where_the_tail_is_whole() -> None:
    with a_service() as service:
        service.register(groups=2, tails=[0, 1])
        tokens = chunks(1, 2, 3, 4) + ONE_MORE
        store(service, tokens, [1, 1, 1, 1, 0, 1, 0, 0])  # a state only behind the second chunk
        reply = service.lookup("r", tokens)
        assert (reply.chunks, reply.miss_reason) == (2, "not_stored")
        full, state = slots(reply.slots)[:2], slots(reply.slots)[2:]
        assert NO_SLOT not in full
        assert state[0] == NO_SLOT != state[1]
        assert service.stat("leased_objects") == 3
        assert len(reply.hashes) == 4 * 32


def test_what_lies_before_a_window_may_be_gone() -> None:
    with a_service() as service:
        service.register(groups=2, tails=[0, CHUNK_TOKENS + 1])  # two chunks
        tokens = chunks(1, 2, 3, 4) + ONE_MORE
        store(service, tokens, [1, 1, 1, 1, 0, 1, 1, 0])
        assert service.lookup("r", tokens).chunks == 3
        short = chunks(1, 2) + ONE_MORE
        assert service.lookup("s", short).chunks == 0
        assert service.lookup("t", chunks(9) + ONE_MORE).chunks == 0


def test_the_last_token_is_never_part_of_a_hit() -> None:
    with a_service() as service:
        service.register(groups=2, tails=[0, 1])
        tokens = chunks(1, 2)
        store(service, tokens, [1, 1, 1, 1])
        reply = service.lookup("r", tokens)
        assert (reply.chunks, reply.miss_reason, len(reply.hashes)) == (1, "", 64)
        assert service.lookup("s", chunks(1)).miss_reason == "too_short"


def test_every_rank_needs_its_tail() -> None:
    with a_service() as service:
        service.register(ranks=2, groups=2, tails=[0, 1])
        tokens = chunks(1, 2) + ONE_MORE
        for worker, written in ((0, [1, 1, 1, 1]), (1, [1, 1, 1, 0])):
            reply = service.reserve(tokens, worker=worker)
            service.commit(reply.reservation, bytes(written), worker=worker)
        assert service.lookup("r", tokens).chunks == 1


def test_l2_is_asked_behind_the_hit_with_the_tails() -> None:
    with a_service(with_l2=True) as service:
        service.register(groups=2, tails=[0, CHUNK_TOKENS + 1])
        tokens = chunks(1, 2, 3)
        store(service, tokens, [1, 1, 1, 1, 0, 0])
        service.ask("r", tokens)
        ((request, _),) = service.storage.asked
        assert request.keys.namespaces.tail_chunks == (0, 2)
        assert (request.first_chunk, request.keys.chunks) == (1, 2)  # the third chunk has the last token


def test_slots_are_handed_out_where_they_are_wanted() -> None:
    with a_service() as service:
        service.register(groups=2, tails=[0, 1])
        hashes = service.hashes(chunks(1, 2))
        reply = service.stores.reserve(m.Reserve("engine", 0, "", hashes, bytes([1, 1, 0, 1])))
        assert [slot == NO_SLOT for slot in slots(reply.slots)] == [False, False, True, False]
        with pytest.raises(RemoteError, match="one byte for each"):
            service.stores.reserve(m.Reserve("engine", 0, "", hashes, bytes([1, 1])))


@pytest.mark.parametrize("tails", [[0], [0, -1], [0, 1, 2], [0, 1 << 40]])
def test_tails_that_make_no_sense_are_refused(tails: list[int]) -> None:
    with a_service() as service, pytest.raises(RemoteError, match="tail tokens"):
        service.register(groups=2, tails=tails)
