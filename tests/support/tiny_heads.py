"""Small models with a head that drafts tokens from the model's hidden states: EAGLE, MTP, Medusa.

A head of random weights would never be right. These do on the next token what the model's only layer does, so that
many of their drafts are accepted, and which ones depends on the KV that the head has.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lmcache.testing.tiny_models import LlamaShape, make_llama, save_model
from support.tiny_shapes import expert_settings, latent_settings

_MODEL = LlamaShape(num_hidden_layers=1)
_EMBEDDING_RMS = 0.2  # as `save_model` draws embeddings


def make_with_eagle(folder: Path) -> Path:
    """A Llama of one layer; `head` in its folder is that layer behind the embedding of the next token."""
    import torch

    model = make_llama(folder, _MODEL)
    weights = _weights(model)
    first = "model.layers.0."
    head = {name.removeprefix("model."): tensor for name, tensor in weights.items() if name.startswith(first)}
    del head["layers.0.input_layernorm.weight"]  # an EAGLE head has none: the weights behind it make up for its scale
    for part in ("q_proj", "k_proj", "v_proj"):
        head[f"layers.0.self_attn.{part}.weight"] = head[f"layers.0.self_attn.{part}.weight"] / _EMBEDDING_RMS
    size = _MODEL.hidden_size
    source = torch.Generator().manual_seed(7)
    hidden = 0.0005 * torch.randn(size, size, generator=source)
    head["fc.weight"] = torch.cat([torch.eye(size), hidden], dim=1).to(torch.bfloat16)
    config = json.loads((model / "config.json").read_text())
    _save(folder / "head", head, config)
    return folder


def make_with_eagle3(folder: Path) -> Path:
    """A Llama of one layer; `head` in its folder is that layer, which sees the embedding of the next token beside what
    the layer made of this one. Its result lacks the embedding that the layer adds, so embeddings are small here."""
    import torch

    model = make_llama(folder, _MODEL)
    weights = _weights(model)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] / 50
    config = json.loads((model / "config.json").read_text())
    _save(model, weights, config)
    first, size = "model.layers.0.", _MODEL.hidden_size
    head = {
        name.replace(first, "midlayer."): tensor.clone() for name, tensor in weights.items() if name.startswith(first)
    }
    source = torch.Generator().manual_seed(7)
    for part in ("q_proj", "k_proj", "v_proj"):
        name = f"midlayer.self_attn.{part}.weight"
        hidden = 0.0005 * torch.randn(head[name].shape, generator=source)
        head[name] = torch.cat([head[name], hidden.to(torch.bfloat16)], dim=1)
    head["midlayer.hidden_norm.weight"] = torch.ones(size, dtype=torch.bfloat16)
    head["fc.weight"] = (0.0001 * torch.randn(size, size, generator=source)).to(torch.bfloat16)
    head["norm.weight"] = weights["model.norm.weight"].clone()
    head["lm_head.weight"] = weights["lm_head.weight"].clone()
    _save(folder / "head", head, {**config, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]}})
    return folder


def make_with_medusa(folder: Path) -> Path:
    """The same Llama; `head` in its folder guesses two tokens from a hidden state and keeps no KV."""
    import torch

    model = make_llama(folder, _MODEL)
    size, heads = _MODEL.hidden_size, 2
    source = torch.Generator().manual_seed(7)
    head = {}
    for index in range(heads):
        for part in ("weight", "bias"):
            shape = (size, size) if part == "weight" else (size,)
            head[f"blocks.{index}.layers.0.{part}"] = 0.02 * torch.randn(shape, generator=source).to(torch.bfloat16)
        head[f"lm_heads.{index}.weight"] = _weights(model)["lm_head.weight"]
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": size,
        "vocab_size": _MODEL.vocab_size,
        "num_heads": heads,
        "num_hidden_layers": 1,
        "max_paths": 64,
        "topk": 10,
        "torch_dtype": "bfloat16",
    }
    _save(folder / "head", head, config)
    return folder


def make_glm_with_mtp(folder: Path) -> Path:
    """A GLM-4.5 of one layer, and a second that is its MTP head: the same behind the embedding of the next token."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    save_model(
        folder,
        lambda: Glm4MoeForCausalLM(
            Glm4MoeConfig(
                num_hidden_layers=1,
                num_key_value_heads=2,
                head_dim=64,
                first_k_dense_replace=0,  # vLLM wants experts in an MTP head
                num_nextn_predict_layers=1,
                tie_word_embeddings=False,
                **expert_settings(),
            )
        ),
    )
    return _add_mtp(folder)


def make_deepseek_with_mtp(folder: Path) -> Path:
    """A DeepSeek-V3 of one layer with latent KV (MLA), and its MTP head."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    save_model(
        folder,
        lambda: DeepseekV3ForCausalLM(
            DeepseekV3Config(
                num_hidden_layers=1,
                topk_method="noaux_tc",
                first_k_dense_replace=0,
                num_nextn_predict_layers=1,
                tie_word_embeddings=False,
                **latent_settings(),
            )
        ),
    )
    return _add_mtp(folder)


def _add_mtp(folder: Path) -> Path:
    """Behind the model's only layer the one that MTP checkpoints have there: the same, and what leads to it."""
    import torch

    weights = _weights(folder)
    size = weights["model.embed_tokens.weight"].shape[1]
    to = "model.layers.1."
    for name in [name for name in weights if name.startswith("model.layers.0.")]:
        weights[to + name.removeprefix("model.layers.0.")] = weights[name].clone()
    ones = torch.ones(size, dtype=torch.bfloat16)
    source = torch.Generator().manual_seed(7)
    hidden = 0.0005 * torch.randn(size, size, generator=source)
    weights |= {
        to + "enorm.weight": ones * _EMBEDDING_RMS,
        to + "hnorm.weight": ones.clone(),
        to + "eh_proj.weight": torch.cat([torch.eye(size), hidden], dim=1).to(torch.bfloat16),
        to + "embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        to + "shared_head.norm.weight": ones.clone(),
        to + "shared_head.head.weight": weights["lm_head.weight"].clone(),
    }
    _save(folder, weights, json.loads((folder / "config.json").read_text()))
    return folder


def _weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))


def _save(folder: Path, weights: dict[str, Any], config: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
