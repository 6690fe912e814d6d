"""Chunks that decoding fills: named by the server, stored as they become full, and at the request's end."""

from __future__ import annotations

from array import array
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache.client.content_extras import content_extras
from lmcache.client.engine_environment import EngineEnvironment
from lmcache.errors import ConfigError, RemoteError, ServerUnavailable
from lmcache.integration.engine.connector_metadata import WorkerReport
from lmcache.integration.vllm.groups import CacheGroup
from lmcache.integration.vllm.identity import content_spans, is_cacheable
from lmcache.integration.vllm.scheduler_options import SchedulerOptions
from lmcache.integration.vllm.scheduler_side import SchedulerSide
from lmcache.integration.vllm.settings import ConnectorSettings
from lmcache.protocol.messages import AppendReply
from manual_clock import ManualClock
from unit.integration.vllm.fakes import FakeBlockPool, FakeClient, answer, hello, output, request, step

CHUNK = 256
GROUP = CacheGroup(128, ("layer0",))


class Chat:
    """One request that decodes; blocks are numbered from 1 in the order of their tokens."""

    def __init__(self, prompt_tokens: int, lookahead_tokens: int = 0, **fields: Any) -> None:
        self.clock = ManualClock()
        self.client = FakeClient(self.clock)
        self.pool = FakeBlockPool(100)
        self.side = SchedulerSide(
            self.client,  # type: ignore[arg-type]
            "i",
            SchedulerOptions(groups=(GROUP,), ranks=1, workers=1, save_decode=True, lookahead_tokens=lookahead_tokens),
            environment=EngineEnvironment(self.clock),
        )
        self.request = request("a", prompt_tokens, **fields)
        self.request.all_token_ids = list(range(prompt_tokens))
        self.request.num_tokens = prompt_tokens
        self.request.num_computed_tokens = 0
        self.side.bind(self.pool, lambda name: (list(range(1, 21)),))
        self.side.on_new_request(self.request)
        if prompt_tokens >= CHUNK:
            self.client.pendings("lookup")[0].outcome = answer(0, prompt_tokens)
        assert self.side.matched_tokens(self.request, 0) == (0, False)
        self.side.after_allocation(self.request, ([],), 0)

    def compute(self, upto: int) -> Any:
        """Runs a step after which `upto` tokens have KV, and samples one when all known have it."""
        before = self.request.num_computed_tokens
        orders = self.side.step_metadata(step(running=[("a", before, upto - before)]))
        self.request.num_computed_tokens = upto
        if upto == self.request.num_tokens:
            self.request.all_token_ids.append(7)
            self.request.num_tokens += 1
        return orders

    def decode(self, upto: int) -> list[Any]:
        stores: list[Any] = []
        while self.request.num_computed_tokens < upto:
            stores += self.compute(self.request.num_computed_tokens + 1).stores
        return stores

    def name_chunks(self, first: int, count: int) -> None:
        """Answers the latest append."""
        hashes = b"".join(bytes([index]) * 32 for index in range(first, first + count))
        self.client.pendings("append")[-1].outcome = AppendReply(first, hashes)

    def end(self) -> None:
        self.side.request_finished(self.request, (list(range(1, 21)),))


def blocks(order: Any) -> list[int]:
    return array("q", order.blocks[0]).tolist()


def test_a_chunk_that_decoding_fills_is_named_and_stored() -> None:
    chat = Chat(300)
    assert [blocks(order) for order in chat.compute(300).stores] == [[1, 2]]
    assert chat.decode(511) == []
    assert chat.client.messages("append") == []
    assert chat.decode(512) == []  # asks for its name
    (append,) = chat.client.messages("append")
    assert (append.first_token, len(append.tokens)) == (300, 4 * 212)
    assert chat.decode(513) == []
    chat.name_chunks(1, 1)
    (order,) = chat.decode(514)
    assert (blocks(order), order.hashes) == ([3, 4], bytes([1]) * 32)
    assert chat.decode(600) == []


def test_with_a_head_a_chunk_is_named_when_the_tokens_behind_it_are_accepted() -> None:
    chat = Chat(300, lookahead_tokens=1)
    assert [blocks(order) for order in chat.compute(300).stores] == [[1, 2]]
    assert chat.decode(512) == []  # the token behind the second chunk is sampled in this step
    assert chat.client.messages("append") == []
    assert chat.decode(513) == []
    (append,) = chat.client.messages("append")
    assert (append.first_token, len(append.tokens)) == (299, 4 * 213)
    chat.name_chunks(1, 1)
    (order,) = chat.decode(514)
    assert (blocks(order), order.hashes) == ([3, 4], bytes([1]) * 32)


@pytest.mark.parametrize(("lookahead_tokens", "computed"), [(1, 512), (3, 514)])
def test_with_a_head_the_tail_needs_the_tokens_behind_it(lookahead_tokens: int, computed: int) -> None:
    for upto, kept in ((computed - 1, set()), (computed, {3, 4})):
        chat = Chat(300, lookahead_tokens=lookahead_tokens)
        (order,) = chat.compute(300).stores
        chat.side.step_ended(output(report=WorkerReport(Counter([order.job]))))
        chat.decode(upto)
        chat.end()
        assert chat.pool.pinned() == kept


def test_the_tail_is_pinned_named_and_stored_after_the_end() -> None:
    chat = Chat(300)
    (order,) = chat.compute(300).stores
    chat.side.step_ended(output(report=WorkerReport(Counter([order.job]))))
    chat.decode(512)
    chat.end()
    assert chat.pool.pinned() == {3, 4}
    assert [name for name, _, _ in chat.client.sent][-2:] == ["append", "end_session"]
    assert chat.side.step_metadata(step()).stores == []
    assert chat.side.has_pins
    chat.name_chunks(1, 1)
    (order,) = chat.side.step_metadata(step()).stores
    assert (blocks(order), order.hashes) == ([3, 4], bytes([1]) * 32)
    chat.side.step_ended(output(report=WorkerReport(Counter([order.job]))))
    assert chat.pool.pinned() == set()


@pytest.mark.parametrize("fault", [ServerUnavailable("gone"), RemoteError("unknown_session", "no")])
def test_a_tail_that_cannot_be_named_is_let_go(fault: Exception) -> None:
    chat = Chat(300)
    (order,) = chat.compute(300).stores
    chat.side.step_ended(output(report=WorkerReport(Counter([order.job]))))
    chat.decode(512)
    chat.end()
    chat.client.pendings("append")[-1].outcome = fault
    assert chat.side.step_metadata(step()).stores == []
    assert chat.pool.pinned() == set()
    assert not chat.side.has_pins


def test_a_tail_of_a_previous_server_is_let_go() -> None:
    chat = Chat(300)
    chat.compute(300)
    chat.decode(512)
    chat.end()
    chat.name_chunks(1, 1)
    chat.client.hello = hello(b"epoch-two-epoch-")
    assert chat.side.step_metadata(step()).stores == []
    assert chat.pool.pinned() == {1, 2}  # what the worker was ordered to store before


def test_a_prompt_shorter_than_a_chunk_grows_into_one() -> None:
    chat = Chat(40)
    assert chat.client.sent == []
    chat.compute(40)
    chat.decode(256)
    (append,) = chat.client.messages("append")
    assert (append.first_token, len(append.tokens)) == (0, 4 * 256)
    chat.name_chunks(0, 1)
    (order,) = chat.decode(257)
    assert blocks(order) == [1, 2]


def test_tokens_that_are_not_known_yet_are_not_stored() -> None:
    """Drafts may be rejected, and an overlapped step is scheduled before the last token is there."""
    chat = Chat(300)
    chat.compute(300)
    chat.decode(510)
    orders = chat.side.step_metadata(step(running=[("a", 510, 5)]))  # one token and four drafts
    assert orders.stores == [] and chat.client.messages("append") == []


def test_a_request_that_is_preempted_while_it_decodes_finds_what_it_decoded() -> None:
    chat = Chat(300)
    chat.compute(300)
    chat.decode(513)
    chat.name_chunks(1, 1)
    chat.decode(520)
    assert chat.side.matched_tokens(chat.request, 0) == (None, False)
    again = chat.client.messages("lookup")[1]
    assert (again.first_token, len(again.tokens)) == (512, 4 * (521 - 512))
    chat.client.pendings("lookup")[1].outcome = answer(2, 521)
    assert chat.side.matched_tokens(chat.request, 0) == (512, True)


def image(name: str, offset: int, length: int = 20) -> Any:
    return SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=length))


def go_on(chat: Chat, tokens: int, images: list[Any]) -> None:
    """A session gets more input: it takes the place of the token that was sampled last."""
    chat.request.all_token_ids[chat.request.num_computed_tokens :] = [9] * tokens
    chat.request.num_tokens = len(chat.request.all_token_ids)
    chat.request.mm_features.extend(images)


def test_images_that_a_session_gets_later_are_part_of_the_names() -> None:
    chat = Chat(300, resumable=True, mm_features=[image("first", 250)])
    chat.compute(300)
    go_on(chat, 300, [image("second", 310), image("third", 505)])
    chat.compute(600)
    (append,) = chat.client.messages("append")
    assert append.first_token == 300
    assert append.tokens == array("I", [9] * 300).tobytes()
    assert append.extras == content_extras(content_spans(chat.request.mm_features), CHUNK)[1:]
    assert [chunk for chunk, _ in append.extras] == [1, 2]
    assert (
        content_extras(content_spans(chat.request.mm_features[:1]), CHUNK)[1] != append.extras[0]
    )  # with what was there before


def test_a_session_whose_tokens_were_replaced_goes_on_uncached() -> None:
    chat = Chat(300, resumable=True)
    chat.compute(300)
    chat.request.all_token_ids[:] = [9] * 300
    chat.request.num_tokens = 300
    assert chat.side.matched_tokens(chat.request, 0) == (0, False)
    assert chat.client.sent[-1][0] == "end_session"
    chat.side.after_allocation(chat.request, ([],), 0)
    assert chat.compute(300).stores == []


class CountedTokens(list[int]):
    """Counts how often tokens are taken out of it."""

    taken = 0

    def __getitem__(self, key: Any) -> Any:
        self.taken += 1
        return super().__getitem__(key)


def test_while_a_session_waits_its_tokens_are_compared_once() -> None:
    chat = Chat(300, resumable=True)
    tokens = chat.request.all_token_ids = CountedTokens(chat.request.all_token_ids)
    for _ in range(5):
        assert chat.side.matched_tokens(chat.request, 0) in ((0, False), (None, False))
    assert tokens.taken == 1
    chat.side.after_allocation(chat.request, ([],), 0)  # a step may change them
    chat.side.matched_tokens(chat.request, 0)
    assert tokens.taken == 2


@pytest.mark.parametrize("change", ["arrival_time", "num_prompt_tokens", "num_tokens"])
def test_tokens_that_an_input_replaced_are_noticed_whatever_it_changed(change: str) -> None:
    chat = Chat(300, resumable=True)
    assert chat.side.matched_tokens(chat.request, 0) in ((0, False), (None, False))
    chat.request.all_token_ids[:] = [9] * 301
    setattr(chat.request, change, getattr(chat.request, change) + 1)
    assert chat.side.matched_tokens(chat.request, 0) == (0, False)
    assert chat.client.sent[-1][0] == "end_session"


def test_a_session_may_get_images_without_names() -> None:
    without_names = {"media_have_names": False}
    assert is_cacheable(request("a", 300), **without_names)
    assert not is_cacheable(request("a", 300, resumable=True), **without_names)
    assert is_cacheable(request("a", 300, resumable=True))


def test_without_the_setting_nothing_is_appended() -> None:
    assert not ConnectorSettings.read({}).save_decode_cache
    assert ConnectorSettings.read({"lmcache.mp.save_decode_cache": "true"}).save_decode_cache
    with pytest.raises(ConfigError, match=r"save_decode_cache is 7; it must be true or false"):
        ConnectorSettings.read({"lmcache.mp.save_decode_cache": 7})
