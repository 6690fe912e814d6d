from typing import Any

import pytest

from lmcache.core import limits
from lmcache.core.chunking import ChunkHasher
from lmcache.errors import RemoteError
from lmcache.protocol.messages import Append
from lmcache.protocol.tokens import pack_tokens
from lmcache.service.token_chain import TokenChain

HASHER = ChunkHasher("blake3", 4)
TOKENS = list(range(100, 119))  # four full chunks and three more


def extend(chain: Any, first_token: int, tokens: Any, extras: Any) -> Any:
    """The first chunk whose hash is new."""
    growth = chain.plan(first_token, tokens, extras)
    chain.grow(growth)
    assert (chain.chunks, chain.token_count, chain.size_bytes) == (growth.chunks, growth.token_count, growth.size_bytes)
    return growth.first_chunk


def chain_of(tokens: Any, identity: Any = b"") -> Any:
    chain = TokenChain(HASHER, "", identity)
    extend(chain, 0, pack_tokens(tokens), [])
    return chain


def whole(tokens: Any, identity: Any = b"", extras: Any = None) -> Any:
    return HASHER.extend(HASHER.root(identity), pack_tokens(tokens), extras or {})


@pytest.mark.parametrize("cuts", [[19], [1] * 19, [4, 4, 4, 4, 3], [3, 5, 1, 10], [17, 2], [0, 19, 0]])
def test_tokens_may_come_in_any_pieces(cuts: Any) -> None:
    chain = TokenChain(HASHER, "", b"lora")
    position = 0
    for count in cuts:
        chunks_before = chain.chunks
        assert extend(chain, position, pack_tokens(TOKENS[position : position + count]), []) == chunks_before
        position += count
    assert (chain.token_count, chain.chunks) == (19, 4)
    assert bytes(chain.hashes) == whole(TOKENS, b"lora")


@pytest.mark.parametrize("back_to", [4, 8, 12, 16, 17, 18, 19])
def test_going_back_replaces_what_was_behind(back_to: Any) -> None:
    chain = chain_of(TOKENS)
    later = [7, 7, 7, 7, 7, 7]
    first_chunk = extend(chain, back_to, pack_tokens(later), [])
    assert first_chunk == back_to // 4
    assert bytes(chain.hashes) == whole(TOKENS[:back_to] + later)
    assert chain.token_count == back_to + 6


@pytest.mark.parametrize("position", [1, 5, 15, 20, 1000, -1, -4])
def test_a_position_that_cannot_be_continued_is_refused(position: int) -> None:
    chain = chain_of(TOKENS)
    with pytest.raises(RemoteError) as refusal:
        extend(chain, position, pack_tokens([1]), [])
    assert refusal.value.code == "unknown_session"
    assert bytes(chain.hashes) == whole(TOKENS)
    assert chain.token_count == 19


def test_identity_and_extras_change_the_hashes_from_their_chunk_on() -> None:
    image = bytes(range(32))
    chain = TokenChain(HASHER, "", b"")
    extend(chain, 0, pack_tokens(TOKENS[:6]), [(1, image)])
    extend(chain, 6, pack_tokens(TOKENS[6:]), [])
    assert bytes(chain.hashes) == whole(TOKENS, extras={1: image})
    assert chain.hashes[:32] == whole(TOKENS)[:32]
    assert chain.hashes[32:64] != whole(TOKENS)[32:64]
    assert chain_of(TOKENS, b"lora").hashes[:32] != whole(TOKENS)[:32]


def test_an_extra_may_be_repeated_but_not_come_late_or_change() -> None:
    image = bytes(range(32))
    chain = TokenChain(HASHER, "", b"")
    extend(chain, 0, pack_tokens(TOKENS[:10]), [(1, image)])
    extend(chain, 10, b"", [(1, image)])
    for late in [(0, image), (1, bytes(32))]:
        with pytest.raises(RemoteError, match="hashed without this extra"):
            extend(chain, 10, b"", [late])


def test_the_extra_of_a_chunk_that_is_cut_short_stays() -> None:
    image = bytes(range(32))
    chain = TokenChain(HASHER, "", b"")
    extend(chain, 0, pack_tokens(TOKENS[:6]), [(1, image), (4, image)])
    extend(chain, 5, pack_tokens(TOKENS[5:]), [])
    assert bytes(chain.hashes) == whole(TOKENS, extras={1: image})
    extend(chain, 4, pack_tokens(TOKENS[4:]), [])
    assert bytes(chain.hashes) == whole(TOKENS)


@pytest.mark.parametrize("extra", [(-1, bytes(32)), (0, bytes(31)), (0, b"")])
def test_a_wrong_extra_is_refused(extra: Any) -> None:
    with pytest.raises(RemoteError) as refusal:
        extend(TokenChain(HASHER, "", b""), 0, b"", [extra])
    assert refusal.value.code == "bad_request"


def test_half_a_token_is_refused() -> None:
    with pytest.raises(RemoteError, match="not whole uint32"):
        extend(TokenChain(HASHER, "", b""), 0, b"12345", [])


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_TOKENS_PER_SESSION", 20)
    monkeypatch.setattr(limits, "MAX_EXTRAS_PER_SESSION", 2)
    chain = chain_of(TOKENS)
    extend(chain, 19, pack_tokens([1]), [])
    for position in (20, 2**40):
        with pytest.raises(RemoteError) as refusal:
            extend(chain, position, pack_tokens([1]), [])
        assert refusal.value.code == "too_large"
    with pytest.raises(RemoteError) as refusal:
        extend(chain, 20, b"", [(9, bytes(32)), (10, bytes(32)), (11, bytes(32))])
    assert refusal.value.code == "too_many"
    with pytest.raises(RemoteError) as refusal:
        TokenChain(HASHER, "", bytes(limits.MAX_IDENTITY_BYTES + 1))
    assert refusal.value.code == "too_large"


def test_salt_and_identity_stay() -> None:
    chain = TokenChain(HASHER, "salt", b"lora")
    assert chain.continues(Append("i", "r", "salt", 4, b"", b"lora"))
    assert not chain.continues(Append("i", "r", "other", 0, b"", b""))
    for other in (Append("i", "r", "other", 4, b"", b"lora"), Append("i", "r", "salt", 4, b"", b"")):
        with pytest.raises(RemoteError, match="cannot change"):
            chain.continues(other)
