"""Which engines are cached, and the sentence for those that are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmcache.errors import LayoutRefused
from lmcache.integration.vllm.groups import cacheable_groups


def spec(kind: str, **fields: Any) -> Any:
    """An object of a class of that name, by which vLLM's specs are distinguished."""
    return type(kind, (SimpleNamespace,), {})(**{"block_size": 16, **fields})


def config(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        "cache_config": SimpleNamespace(calculate_kv_scales=False),
        "speculative_config": None,
        "model_config": SimpleNamespace(enable_sleep_mode=False, model="/", revision=None, hf_config=None),
        "load_config": SimpleNamespace(load_format="auto"),
    }
    return SimpleNamespace(**{**values, **changes})


def groups(*specs: Any, **fields: Any) -> Any:
    values = {"enable_kv_transfer": True, "host_resident": False, **fields}
    return SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=kv_spec, layer_names=[f"layer{index}"], **values)
            for index, kv_spec in enumerate(specs)
        ]
    )


def state_spec(**fields: Any) -> Any:
    values = {
        "shapes": ((3, 64), (8, 64)),
        "dtypes": ("bfloat16", "float32"),
        "mamba_type": "gdn",
        "mamba_cache_mode": "align",
        "num_speculative_blocks": 0,
        "num_prefill_checkpoint_blocks": 0,
    }
    return spec("MambaSpec", **{**values, **fields})


MIXED = spec(
    "UniformTypeKVCacheSpecs",
    kv_cache_specs={"a": spec("SlidingWindowSpec", sliding_window=512), "b": spec("FullAttentionSpec")},
)


@pytest.mark.parametrize(
    ("kv_spec", "tail_tokens"),
    [
        (spec("FullAttentionSpec"), 0),
        (spec("FullAttentionSpec", sliding_window=512, kv_quant_mode=1), 0),
        (spec("MLAAttentionSpec", model_version=None, tokens_per_state=1), 0),
        (spec("SlidingWindowSpec", sliding_window=512), 511),
        (spec("ChunkedLocalAttentionSpec", attention_chunk_size=512), 511),
        (spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": spec("FullAttentionSpec")}), 0),
        (MIXED, 0),
    ],
)
def test_plain_attention_is_cached(kv_spec: Any, tail_tokens: int) -> None:
    (group,) = cacheable_groups(config(), groups(kv_spec))
    assert (group.block_tokens, group.layer_names, group.tail_tokens) == (16, ("layer0",), tail_tokens)
    assert not group.is_state


def test_a_state_at_block_boundaries_is_cached() -> None:
    full, state = cacheable_groups(config(), groups(spec("FullAttentionSpec"), state_spec()))
    assert (full.is_state, state.is_state, state.tail_tokens) == (False, True, 1)
    (other,) = cacheable_groups(config(), groups(state_spec(shapes=((3, 128), (8, 64)))))
    assert other.state != state.state


@pytest.mark.parametrize(
    ("kv_spec", "words"),
    [
        (state_spec(mamba_cache_mode="none"), "--enable-prefix-caching"),
        (state_spec(mamba_cache_mode="all"), "not 'align'"),
        (state_spec(num_speculative_blocks=3), "without speculation"),
        (state_spec(num_prefill_checkpoint_blocks=1), "without speculation"),
        (spec("CrossAttentionSpec"), "CrossAttentionSpec"),
        (spec("EncoderOnlyAttentionSpec"), "EncoderOnlyAttentionSpec"),
        (spec("SinkFullAttentionSpec"), "SinkFullAttentionSpec"),
        (spec("SlidingWindowMLASpec"), "SlidingWindowMLASpec"),
        (spec("SomethingNewSpec"), "SomethingNewSpec"),
        (
            spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": state_spec(), "b": spec("FullAttentionSpec")}),
            "together with attention",
        ),
        (spec("FullAttentionSpec", non_causal=True), "attends to later tokens"),
        (spec("MLAAttentionSpec", model_version="deepseek_v4"), "compressed KV"),
        (spec("MLAAttentionSpec", tokens_per_state=4), "compressed KV"),
        (spec("SlidingWindowSpec", prefix_replay_tokens=128), "rebuilds a part of its KV"),
        (spec("FullAttentionSpec", kv_quant_mode=2), "keeps scales beside the values"),
    ],
)
def test_what_cannot_be_proved_is_refused_with_a_sentence(kv_spec: Any, words: str) -> None:
    with pytest.raises(LayoutRefused, match=words) as refused:
        cacheable_groups(config(), groups(spec("FullAttentionSpec"), kv_spec))
    assert str(refused.value).endswith(".")


@pytest.mark.parametrize(
    ("settings", "fields", "words"),
    [
        ({"parallel_config": SimpleNamespace(decode_context_parallel_size=2)}, {}, "decode_context_parallel_size"),
        ({"parallel_config": SimpleNamespace(prefill_context_parallel_size=2)}, {}, "prefill_context_parallel_size"),
        (
            {"parallel_config": SimpleNamespace(distributed_executor_backend="external_launcher", world_size=2)},
            {},
            "external_launcher",
        ),
        ({"load_config": SimpleNamespace(load_format="tensorizer")}, {}, "load_format tensorizer"),
        ({"cache_config": SimpleNamespace(calculate_kv_scales=True)}, {}, "calculate_kv_scales"),
        ({"model_config": SimpleNamespace(enable_sleep_mode=True)}, {}, "Sleep mode"),
        ({"speculative_config": SimpleNamespace(method="dflash")}, {}, "Speculation by 'dflash'"),
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
