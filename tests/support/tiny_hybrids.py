"""Small models whose layers do not all keep the KV of every token, or not KV of their own (see tiny_models)."""

from __future__ import annotations

from pathlib import Path

from lmcache.testing.tiny_models import common_settings, save_model

_SMALL = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


def make_qwen3_next(folder: Path, *, seed: int = 0) -> Path:
    """A Qwen3-Next of four layers, three of which keep a recurrent state instead of KV. vLLM gives it blocks of 640
    tokens, so that attention fills the page of a state; on two ranks, which halve the state, blocks of 384."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    return save_model(
        folder,
        lambda: Qwen3NextForCausalLM(
            Qwen3NextConfig(
                hidden_size=256,
                intermediate_size=512,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=1,
                head_dim=128,
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                linear_key_head_dim=128,
                linear_value_head_dim=128,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=128,
                shared_expert_intermediate_size=128,
                tie_word_embeddings=False,
                **common_settings(),
            )
        ),
        seed=seed,
    )


def make_gpt_oss(folder: Path, *, seed: int = 0) -> Path:
    """A gpt-oss of four layers: attention sinks, and every other layer sees 512 tokens."""
    from transformers import GptOssConfig, GptOssForCausalLM

    return save_model(
        folder,
        lambda: GptOssForCausalLM(
            GptOssConfig(
                **_SMALL,
                intermediate_size=256,
                num_hidden_layers=4,
                num_local_experts=4,
                num_experts_per_tok=2,
                sliding_window=512,
                **common_settings(),
            )
        ),
        seed=seed,
    )


def make_llama4(folder: Path, *, seed: int = 0) -> Path:
    """A Llama 4 of four layers, three of which attend within chunks of 512 tokens."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    return save_model(
        folder,
        lambda: Llama4ForCausalLM(
            Llama4TextConfig(
                **_SMALL,
                intermediate_size=256,
                intermediate_size_mlp=512,
                num_hidden_layers=4,
                num_local_experts=4,
                num_experts_per_tok=1,
                attention_chunk_size=512,
                tie_word_embeddings=False,
                **common_settings(),
            )
        ),
        seed=seed,
    )


def make_gemma3n(folder: Path, *, seed: int = 0) -> Path:
    """A Gemma 3n of six layers, of which the last two read the KV of earlier ones; embeddings are tied."""
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    kinds = ["sliding_attention", "full_attention"] * 3
    return save_model(
        folder,
        lambda: Gemma3nForCausalLM(
            Gemma3nTextConfig(
                **_SMALL,
                intermediate_size=512,
                num_hidden_layers=len(kinds),
                layer_types=kinds,
                sliding_window=512,
                num_kv_shared_layers=2,
                hidden_size_per_layer_input=32,
                vocab_size_per_layer_input=8192,
                laurel_rank=16,
                activation_sparsity_pattern=[0.0] * len(kinds),
                **common_settings(),
            )
        ),
        seed=seed,
        embedding_deviation=0.02,
    )
