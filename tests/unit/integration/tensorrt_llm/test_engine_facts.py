"""What a TensorRT-LLM engine says of itself: what is cached, and the sentence for what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lmcache.errors import ConfigError, LayoutRefused  # noqa: E402
from lmcache.integration.tensorrt_llm.engine_facts import describe_engine  # noqa: E402
from lmcache.integration.tensorrt_llm.settings import TensorrtSettings  # noqa: E402
from process.tensorrt_engine import BLOCK_TOKENS, BLOCKS, HEADS, LAYERS, llm_args, pool  # noqa: E402


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": LAYERS}))
    return tmp_path


def configured(model: Path, **changes: Any) -> None:
    (model / "config.json").write_text(json.dumps({"num_hidden_layers": LAYERS, **changes}))


def test_a_block_is_one_run_of_the_pool(model: Path) -> None:
    facts = describe_engine(llm_args(model, ranks=4), "1.2.0rc1", pool())
    assert (facts.ranks, facts.kv_rank(3), facts.block_tokens) == (4, 3, BLOCK_TOKENS)
    [segment] = facts.group.segments
    block_bytes = LAYERS * 2 * BLOCK_TOKENS * HEADS * 2
    assert segment[1:] == (block_bytes, block_bytes, ()) and facts.group.num_blocks == BLOCKS
    latent = describe_engine(llm_args(model, ranks=4), "1.2.0rc1", pool(1))
    assert (latent.ranks, latent.kv_rank(3)) == (1, 0)


def test_what_decides_kv_values_is_in_the_identity(model: Path) -> None:
    def identity(version: str = "1.2.0", **changes: Any) -> str:
        return describe_engine(llm_args(model, **changes), version, pool()).group.engine

    same = identity()
    assert same == identity(max_seq_len=8192)
    others = [
        identity("1.3.0"),
        identity("1.2.1"),
        identity("1.2.0rc1"),
        identity(attn_backend="FLASHINFER"),
        identity(quant_config="FP8"),
        identity(kv_cache_config={"dtype": "fp8"}),
    ]
    (model / "model.safetensors").write_bytes(b"weights")
    others.append(identity())
    configured(model, rope_theta=1e6)
    others.append(identity())
    configured(model, rope_scaling={"rope_type": "longrope"})
    others += [identity(), identity(max_seq_len=8192)]
    assert len({same, *others}) == 1 + len(others)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"max_beam_width": 4}, "max_beam_width is 4"),
        ({"enable_attention_dp": True}, "enable_attention_dp is set"),
        ({"speculative_config": object()}, "speculative_config is set"),
        ({"sparse_attention_config": object()}, "sparse_attention_config is set"),
        ({"load_format": "dummy"}, "load_format is dummy"),
        ({"kv_cache_config": {"host_cache_size": 1 << 30}}, "host_cache_size is set"),
        ({"kv_cache_config": {"dtype": "nvfp4"}}, "nvfp4 keeps scales elsewhere"),
        ({"kv_cache_config": {"max_attention_window": [512, 4096]}}, "max_attention_window is"),
        ({"kv_cache_config": {"tokens_per_block": None}}, "does not say how many tokens"),
    ],
)
def test_settings_that_are_not_cached_exactly(model: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LayoutRefused, match=sentence):
        describe_engine(llm_args(model, **changes), "1.2.0", pool())


@pytest.mark.parametrize(
    "config, sentence",
    [
        ({"sliding_window": 512}, "windows of 512 tokens"),
        ({"text_config": {"sliding_window": 1024}}, "windows of 1024 tokens"),
        ({"mamba_d_state": 128}, "mamba_d_state"),
        ({"index_topk": 2048}, "index_topk"),
    ],
)
def test_models_that_are_not_cached_exactly(model: Path, config: dict[str, Any], sentence: str) -> None:
    configured(model, **config)
    with pytest.raises(LayoutRefused, match=sentence):
        describe_engine(llm_args(model), "1.2.0", pool())
    configured(model, sliding_window=512, use_sliding_window=False)
    describe_engine(llm_args(model), "1.2.0", pool())


def test_weights_and_pools_that_are_not_known(model: Path) -> None:
    for other in (pool()[:, 0], pool().transpose(0, 1)):
        with pytest.raises(LayoutRefused, match="The KV pool has shape"):
            describe_engine(llm_args(model), "1.2.0", other)
    with pytest.raises(LayoutRefused, match=r"The KV pool is of torch\.uint8"):
        describe_engine(llm_args(model), "1.2.0", pool().to(torch.uint8))
    with pytest.raises(LayoutRefused, match="give the model as a local folder"):
        describe_engine(llm_args(Path("someone/a-model")), "1.2.0", pool())


def test_where_the_server_is(model: Path) -> None:
    arguments = llm_args(model)
    assert TensorrtSettings.read(arguments, {}) == TensorrtSettings("tcp://localhost:5555", 0.1)
    environment = {"LMCACHE_SERVER_URL": "ipc:///run/lmcache.sock", "LMCACHE_LOOKUP_TIMEOUT_MS": "250"}
    assert TensorrtSettings.read(arguments, environment) == TensorrtSettings("ipc:///run/lmcache.sock", 0.25)
    arguments.kv_connector_config.server_url = "tcp://10.0.0.7:5556"
    assert TensorrtSettings.read(arguments, environment).url == "tcp://10.0.0.7:5556"
    for wrong in ("0", "soon", "20000"):
        with pytest.raises(ConfigError, match="LMCACHE_LOOKUP_TIMEOUT_MS is"):
            TensorrtSettings.read(arguments, {"LMCACHE_LOOKUP_TIMEOUT_MS": wrong})
