"""Small models whose layers do not all keep the KV of every token (see tiny_models)."""

from __future__ import annotations

from pathlib import Path

from lmcache.testing.tiny_models import common_settings, save_model


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
