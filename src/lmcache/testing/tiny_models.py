"""Small models with seeded random weights and a real tokenizer, made on the spot without a network.

They write nonsense, but every byte of their KV cache is a function of the seed and the prompt, which is all that a
cache has to be exact about. Needs the torch, transformers and tokenizers of the engine.
"""

from __future__ import annotations

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
