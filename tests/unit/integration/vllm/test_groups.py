"""Which engines are cached, and the sentence for those that are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmcache.errors import LayoutRefused
from lmcache.integration.vllm.groups import cacheable_groups


def spec(kind: str, **fields: Any) -> Any:
    """An object of a class of that name, by which vLLM's specs are told apart."""
    return type(kind, (SimpleNamespace,), {})(**{"block_size": 16, **fields})


def config(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        "cache_config": SimpleNamespace(calculate_kv_scales=False),
        "speculative_config": None,
        "model_config": SimpleNamespace(enable_sleep_mode=False),
    }
    return SimpleNamespace(**{**values, **changes})


def groups(*specs: Any, **fields: Any) -> Any:
    values = {"enable_kv_transfer": True, "host_resident": False, **fields}
    return SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=one, layer_names=[f"layer{index}"], **values)
            for index, one in enumerate(specs)
        ]
    )


@pytest.mark.parametrize(
    ("one", "keeps_all"),
    [
        (spec("FullAttentionSpec"), True),
        (spec("FullAttentionSpec", sliding_window=512, kv_quant_mode=1), True),
        (spec("MLAAttentionSpec", model_version=None, tokens_per_state=1), True),
        (spec("SlidingWindowSpec", sliding_window=512), False),
        (spec("ChunkedLocalAttentionSpec", attention_chunk_size=512), False),
        (spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": spec("FullAttentionSpec")}), True),
    ],
)
def test_plain_attention_is_cached(one: Any, keeps_all: bool) -> None:
    (group,) = cacheable_groups(config(), groups(one))
    assert (group.block_tokens, group.layer_names, group.keeps_all_blocks) == (16, ("layer0",), keeps_all)


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (spec("MambaSpec"), "MambaSpec state beside or instead of plain attention"),
        (spec("CrossAttentionSpec"), "CrossAttentionSpec"),
        (spec("EncoderOnlyAttentionSpec"), "EncoderOnlyAttentionSpec"),
        (spec("SinkFullAttentionSpec"), "SinkFullAttentionSpec"),
        (spec("SlidingWindowMLASpec"), "SlidingWindowMLASpec"),
        (spec("SomethingNewSpec"), "SomethingNewSpec"),
        (spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": spec("MambaSpec")}), "MambaSpec"),
        (spec("FullAttentionSpec", non_causal=True), "attends to later tokens"),
        (spec("MLAAttentionSpec", model_version="deepseek_v4"), "compressed KV"),
        (spec("MLAAttentionSpec", tokens_per_state=4), "compressed KV"),
        (spec("SlidingWindowSpec", prefix_replay_tokens=128), "rebuilds a part of its KV"),
        (spec("FullAttentionSpec", kv_quant_mode=2), "keeps scales beside the values"),
    ],
)
def test_what_cannot_be_proved_is_refused_with_a_sentence(one: Any, words: str) -> None:
    with pytest.raises(LayoutRefused, match=words) as refused:
        cacheable_groups(config(), groups(spec("FullAttentionSpec"), one))
    assert str(refused.value).endswith(".")


@pytest.mark.parametrize(
    ("settings", "fields", "words"),
    [
        ({"parallel_config": SimpleNamespace(decode_context_parallel_size=2)}, {}, "decode_context_parallel_size"),
        ({"parallel_config": SimpleNamespace(prefill_context_parallel_size=2)}, {}, "prefill_context_parallel_size"),
        ({"cache_config": SimpleNamespace(calculate_kv_scales=True)}, {}, "calculate_kv_scales"),
        ({"model_config": SimpleNamespace(enable_sleep_mode=True)}, {}, "Sleep mode"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, {}, "Speculation by 'eagle'"),
        ({}, {"enable_kv_transfer": False}, "keeps for itself"),
        ({}, {"host_resident": True}, "keeps for itself"),
    ],
)
def test_settings_that_change_what_a_block_means_are_refused(settings: Any, fields: Any, words: str) -> None:
    with pytest.raises(LayoutRefused, match=words):
        cacheable_groups(config(**settings), groups(spec("FullAttentionSpec"), **fields))


def test_a_model_without_kv_is_refused() -> None:
    with pytest.raises(LayoutRefused, match="no KV cache"):
        cacheable_groups(config(), groups())
