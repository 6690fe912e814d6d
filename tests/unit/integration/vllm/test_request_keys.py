"""What of a request enters its key beside its tokens, and which requests have none."""

from __future__ import annotations

from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from lmcache.core.chunking import ChunkHasher
from lmcache.protocol.tokens import beginning_identity, pack_tokens
from unit.integration.vllm.fakes import answer, request, step
from unit.integration.vllm.test_scheduler_side import Engine, blocks_of


def test_media_and_adapters_enter_the_question(tmp_path: Path) -> None:
    engine = Engine()
    (tmp_path / "adapter_model.safetensors").write_bytes(b"adapter")
    image = SimpleNamespace(identifier="image-1", mm_position=SimpleNamespace(offset=200, length=100))
    lora = SimpleNamespace(lora_name="l", lora_path=str(tmp_path), lora_int_id=1)
    engine.side.on_new_request(request("a", 600, mm_features=[image], lora_request=lora))
    engine.side.on_new_request(request("b", 600, mm_features=[image]))
    moved = SimpleNamespace(identifier="image-1", mm_position=SimpleNamespace(offset=201, length=100))
    engine.side.on_new_request(request("c", 600, mm_features=[moved]))
    a, b, c = engine.client.messages("lookup")
    assert a.identity and not b.identity
    assert [chunk for chunk, _ in b.extras] == [0, 1]
    assert a.extras == b.extras
    assert dict(b.extras)[0] != dict(c.extras)[0]


def test_a_request_with_media_that_have_no_names_is_not_asked_for() -> None:
    engine = Engine(media_have_names=False)
    image = SimpleNamespace(identifier="renderer0-mm-1-image-0", mm_position=SimpleNamespace(offset=200, length=100))
    engine.side.on_new_request(asked := request("a", 600, mm_features=[image]))
    assert engine.side.matched_tokens(asked, 0) == (0, False)
    engine.side.on_new_request(request("b", 600))
    assert [message.request_id for message in engine.client.messages("lookup")] == ["b"]


def test_with_a_head_the_first_token_seeds_the_name_and_the_others_are_hashed() -> None:
    engine = Engine(lookahead_tokens=1)
    engine.side.on_new_request(request("a", 600))
    (lookup,) = engine.client.messages("lookup")
    assert lookup.identity == msgspec.msgpack.encode(beginning_identity(pack_tokens([0])))
    assert array("I", lookup.tokens).tolist() == list(range(1, 600))


def test_prompts_that_part_where_a_chunk_ends_share_it_only_without_a_head() -> None:
    """The KV that a head has of the last token depends on the next one."""
    hasher = ChunkHasher("blake3", 256)
    same = list(range(512))

    def shared(lookahead_tokens: int, one: list[int], two: list[int]) -> int:
        names = []
        for tokens in (one, two):
            engine = Engine(lookahead_tokens=lookahead_tokens)
            engine.side.on_new_request(request("a", len(tokens), prompt_token_ids=tokens))
            (lookup,) = engine.client.messages("lookup")
            packed = hasher.extend(hasher.root(lookup.identity), lookup.tokens)
            names.append([packed[at : at + 32] for at in range(0, len(packed), 32)])
        return sum(a == b for a, b in zip(*names, strict=True))

    assert shared(0, [*same, 7, 8, 9, 10], [*same, 1, 8, 9, 10]) == 2
    assert shared(1, [*same, 7, 8, 9, 10], [*same, 1, 8, 9, 10]) == 1
    assert shared(1, [*same, 7, 8, 9, 10], [*same, 7, 1, 9, 10]) == 2
    assert shared(2, [*same, 7, 8, 9, 10], [*same, 7, 1, 9, 10]) == 1
    assert shared(1, [0, *same], [1, *same]) == 0


def test_with_a_head_a_chunk_has_a_name_when_the_token_behind_it_is_known() -> None:
    for prompt_tokens, chunks in ((512, 1), (513, 2)):
        engine = Engine(lookahead_tokens=1)
        engine.side.on_new_request(asked := request("a", prompt_tokens))
        engine.settle(answer(0, prompt_tokens - 1))
        assert engine.side.matched_tokens(asked, 0) == (0, False)
        engine.tables["a"] = ([1, 2, 3, 4, 5],)
        engine.side.after_allocation(asked, engine.tables["a"], 0)
        (order,) = engine.side.step_metadata(step(new=[("a", 0, prompt_tokens)])).stores
        assert blocks_of(order.blocks[0]) == [1, 2, 3, 4][: 2 * chunks]


def test_with_a_head_a_hit_of_the_whole_prompt_leaves_the_last_token_to_compute() -> None:
    engine = Engine(lookahead_tokens=1)
    engine.side.on_new_request(asked := request("a", 513))
    engine.settle(answer(2, 512))
    assert engine.side.matched_tokens(asked, 128) == (384, True)
    engine.side.after_allocation(asked, ([1, 2, 3, 4],), 384)
    (load,) = engine.side.step_metadata(step()).loads
    assert (load.groups[0].first_chunk, blocks_of(load.groups[0].blocks)) == (0, [-1, 2, 3, 4])


def test_with_a_head_an_image_counts_from_where_the_hashed_tokens_begin() -> None:
    def image(offset: int, length: int = 100) -> Any:
        return SimpleNamespace(identifier="image", mm_position=SimpleNamespace(offset=offset, length=length))

    def extras(offset: int, length: int = 100) -> tuple[list[int], bytes]:
        engine = Engine(lookahead_tokens=1)
        engine.side.on_new_request(request("a", 600, mm_features=[image(offset, length)]))
        (lookup,) = engine.client.messages("lookup")
        return [chunk for chunk, _ in lookup.extras], lookup.identity

    plain = extras(300)[1]
    assert extras(256) == ([0, 1], plain)  # its first placeholder is the token behind the first chunk
    assert extras(257) == ([1], plain)
    assert extras(156)[0] == [0]
    chunks, seed = extras(0)
    assert chunks == [0] and seed != plain
    chunks, seed = extras(0, 1)
    assert chunks == [] and seed != plain
