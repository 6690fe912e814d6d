"""The same tokens with another image have other KV: they never share, and each image finds its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import Stack
from lmcache.testing.tiny_models import sample_text
from support.tiny_images import IMAGE_TOKENS, image_url, make_idefics3

pytestmark = [pytest.mark.engine, pytest.mark.slow]

IMAGES = [{"type": "image_url", "image_url": {"url": image_url(seed)}} for seed in (1, 2)]


@pytest.fixture(scope="module")
def idefics3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vllm")
    return make_idefics3(tmp_path_factory.mktemp("models") / "idefics3")


@dataclass(frozen=True)
class Answer:
    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    cached_tokens: int


def ask(stack: Stack, *parts: dict[str, Any]) -> Answer:
    body = {
        "model": stack.engine.model,
        "messages": [{"role": "user", "content": list(parts)}],
        "max_tokens": 16,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    status, answer = stack.engine.ask(stack.engine.port, "POST", "/v1/chat/completions", body, 120.0)
    assert status == 200, answer
    details = answer["usage"]["prompt_tokens_details"] or {}
    return Answer(
        tuple(answer["prompt_token_ids"]),
        tuple(answer["choices"][0]["token_ids"]),
        int(details.get("cached_tokens") or 0),
    )


def text_of(tokens: int, model: Path, *, seed: int) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = sample_text(2 * tokens, seed=seed)
    end = next(end for end in range(tokens, len(text)) if len(tokenizer(text[:end]).input_ids) == tokens)
    return {"type": "text", "text": text[:end]}


def test_images_do_not_share(idefics3: Path, start_stack: Callable[..., Stack]) -> None:
    stack = start_stack(idefics3)
    stack.rpc("kv_watch")
    # One lies across the end of a chunk, the other has chunks before it that do not depend on it.
    across, late = ((text_of(before, idefics3, seed=before), text_of(480, idefics3, seed=1)) for before in (250, 600))
    prompts = [(first, image, second) for first, second in (across, late) for image in IMAGES]
    cold = []
    for prompt, objects in zip(prompts, (2, 4, 8, 10), strict=True):
        cold.append(ask(stack, *prompt))
        stack.wait_stored(objects, in_l2=True)
    assert [answer.cached_tokens for answer in cold] == [0, 0, 0, 512]
    assert [len(answer.prompt) for answer in cold] == [250 + IMAGE_TOKENS + 480] * 2 + [600 + IMAGE_TOKENS + 480] * 2
    assert cold[0].prompt == cold[1].prompt != cold[2].prompt == cold[3].prompt
    assert len({answer.token_ids for answer in cold}) == 4
    digests: dict[str, str] = {}

    def same_again(where: str) -> None:
        for prompt, before in zip(prompts, cold, strict=True):
            again = ask(stack, *prompt)
            hit = len(before.prompt) // 256 * 256
            assert (again.token_ids, again.cached_tokens) == (before.token_ids, hit), where
        (seen,) = stack.rpc("kv_seen")
        digests.update(seen["stored"])
        assert len(seen["loaded"]) == 10
        assert all(digests[chunk] == digest for chunk, digest in seen["loaded"].items()), where
        stack.wait_clean()

    same_again("from L1")
    stack.server.clear("l1")
    same_again("from L2")
    stack.restart_engine()
    stack.rpc("kv_watch")
    same_again("after a restart of the engine")
    (adapter,) = stack.server.status()["l2"]["adapters"]
    assert adapter["objects"] == 10


def test_images_that_the_engine_only_counts_are_not_cached(idefics3: Path, start_stack: Callable[..., Stack]) -> None:
    """Without its own caches vLLM calls the first image after every start the same."""
    stack = start_stack(idefics3, l2=False, engine_flags=["--mm-processor-cache-gb", "0"])
    text = text_of(500, idefics3, seed=1)
    first = ask(stack, IMAGES[0], text)
    stack.restart_engine()
    second = ask(stack, IMAGES[1], text)
    assert first.prompt == second.prompt
    assert first.token_ids != second.token_ids
    assert second.cached_tokens == ask(stack, IMAGES[1], text).cached_tokens == 0
    assert stack.server.status()["l1"]["objects"] == 0
    assert ask(stack, text).cached_tokens == 0
    stack.wait_stored(1)
    assert ask(stack, text).cached_tokens == 256
    assert stack.engine.log().count("Requests with images or other media run uncached") == 1
