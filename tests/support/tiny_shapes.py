"""Small models with seeded random weights, one for each shape of KV that a Llama does not have, and LoRA adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lmcache.testing.tiny_models import common_settings, save_model


def make_gemma3(folder: Path, *, seed: int = 0) -> Path:
    """A Gemma 3 of six layers, two with full attention and four that see 512 tokens: several KV cache groups."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    return save_model(
        folder,
        lambda: Gemma3ForCausalLM(
            Gemma3TextConfig(
                hidden_size=256,
                intermediate_size=512,
                num_hidden_layers=len(kinds),
                num_attention_heads=4,
                num_key_value_heads=1,
                head_dim=64,
                query_pre_attn_scalar=64,
                sliding_window=512,
                layer_types=kinds,
                **common_settings(),
            )
        ),
        seed=seed,
        embedding_deviation=0.02,  # tied: with more, a token would predict itself
    )


def make_qwen3(folder: Path, *, seed: int = 0) -> Path:
    """A Qwen3 of four layers with normalized queries and keys: 4 KiB of KV a token."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return save_model(
        folder,
        lambda: Qwen3ForCausalLM(
            Qwen3Config(
                hidden_size=256,
                intermediate_size=512,
                num_hidden_layers=4,
                num_attention_heads=8,
                num_key_value_heads=4,
                head_dim=64,
                tie_word_embeddings=False,
                **common_settings(),
            )
        ),
        seed=seed,
    )


def expert_settings() -> dict[str, Any]:
    """Of models with experts, beside their layers and the heads of their keys and values."""
    return {
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_attention_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        **common_settings(),
    }


def latent_settings() -> dict[str, Any]:
    """Of DeepSeek's models, whose KV is a latent vector of 576 values a token and layer (MLA)."""
    return {
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        **expert_settings(),
    }


def make_deepseek_v2(folder: Path, *, seed: int = 0) -> Path:
    """A DeepSeek-V2 of three layers, one without experts: a latent vector of 576 values a token and layer (MLA)."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    return save_model(
        folder,
        lambda: DeepseekV2ForCausalLM(
            DeepseekV2Config(
                num_hidden_layers=3,
                first_k_dense_replace=1,
                **latent_settings(),
            )
        ),
        seed=seed,
    )


def make_lora(folder: Path, base: Path, *, seed: int) -> Path:
    """An adapter of rank 8 on queries and values of a model that `make_llama` wrote; strong enough to change tokens."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig.from_pretrained(base)
    source = torch.Generator().manual_seed(seed)
    rank, tensors = 8, {}
    for layer in range(config.num_hidden_layers):
        for name, heads in (("q_proj", config.num_attention_heads), ("v_proj", config.num_key_value_heads)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            shapes = {"lora_A": (rank, config.hidden_size), "lora_B": (heads * config.head_dim, rank)}
            for part, shape in shapes.items():
                tensors[f"{at}.{part}.weight"] = 0.3 * torch.randn(shape, generator=source).to(torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
