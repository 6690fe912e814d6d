"""Small models with seeded random weights and a real tokenizer, made on the spot without a network.

They write nonsense, but every byte of their KV cache is a function of the seed and the prompt, which is all that a
cache has to be exact about. Needs the torch, transformers and tokenizers of the engine.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_SYLLABLES = ("ka", "ro", "mi", "ten", "sul", "va", "dor", "ne", "pi", "lan", "gus", "tra", "mel", "fo", "rin", "os")


@dataclass(frozen=True)
class LlamaShape:
    """The default is 33.6 M parameters in bfloat16 with 8 KiB of KV a token: a chunk of 256 tokens is 2 MiB."""

    hidden_size: int = 512
    intermediate_size: int = 1536
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 64
    max_position_embeddings: int = 65_536
    vocab_size: int = 8192


def make_llama(folder: Path, shape: LlamaShape | None = None, *, seed: int = 0) -> Path:
    """Writes a Llama with random weights and its tokenizer into `folder` (made if absent): a few seconds."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = shape or LlamaShape()
    return save_model(
        folder,
        lambda: LlamaForCausalLM(
            LlamaConfig(
                **asdict(shape),
                tie_word_embeddings=False,
                bos_token_id=0,
                eos_token_id=1,
                pad_token_id=1,
                dtype=torch.bfloat16,
            )
        ),
        vocabulary_size=shape.vocab_size,
        seed=seed,
    )


def describe_llama(folder: Path, shape: LlamaShape) -> Path:
    """Writes configuration and tokenizer alone, for engines that make up the weights (`--load-format dummy`)."""
    from transformers import LlamaConfig

    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        **asdict(shape),
        architectures=["LlamaForCausalLM"],
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    _save_tokenizer(folder, min(shape.vocab_size, 8192), seed=0)
    return folder


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


def make_deepseek_v2(folder: Path, *, seed: int = 0) -> Path:
    """A DeepSeek-V2 of three layers, one without experts: a latent vector of 576 values a token and layer (MLA)."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    return save_model(
        folder,
        lambda: DeepseekV2ForCausalLM(
            DeepseekV2Config(
                hidden_size=256,
                intermediate_size=512,
                moe_intermediate_size=128,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=4,
                kv_lora_rank=512,
                q_lora_rank=None,
                qk_nope_head_dim=128,
                qk_rope_head_dim=64,
                v_head_dim=128,
                n_routed_experts=4,
                n_shared_experts=1,
                num_experts_per_tok=2,
                n_group=1,
                topk_group=1,
                first_k_dense_replace=1,
                **common_settings(),
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


def common_settings() -> dict[str, Any]:
    """What all configurations but those of `LlamaShape` share."""
    import torch

    return {
        "vocab_size": 8192,
        "max_position_embeddings": 65_536,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "dtype": torch.bfloat16,
    }


def save_model(
    folder: Path, build: Any, *, vocabulary_size: int = 8192, seed: int = 0, embedding_deviation: float = 0.2
) -> Path:
    """Writes what `build` makes, with seeded weights, and a tokenizer."""
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    model = build().to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                # Wide enough that the next token depends on the whole prompt and greedy choices are far from ties.
                parameter.normal_(0.0, embedding_deviation if "embed" in name or "lm_head" in name else 0.06)
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    _save_tokenizer(folder, vocabulary_size, seed)
    return folder


def _save_tokenizer(folder: Path, vocabulary_size: int, seed: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([sample_text(20_000, seed=seed)], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


def sample_text(words: int, *, seed: int = 0) -> str:
    """Made-up prose: the same seed gives the same text."""
    source = random.Random(seed)
    vocabulary = ["".join(source.choices(_SYLLABLES, k=source.randint(1, 4))) for _ in range(2000)]
    return " ".join(source.choices(vocabulary, k=words))


def sample_tokens(count: int, *, seed: int = 0, vocabulary_size: int = 8192) -> list[int]:
    """Token ids for a prompt of exactly `count` tokens, special tokens left out."""
    source = random.Random(seed)
    return [source.randrange(2, vocabulary_size) for _ in range(count)]


if __name__ == "__main__":
    print(make_llama(Path(sys.argv[1])))
