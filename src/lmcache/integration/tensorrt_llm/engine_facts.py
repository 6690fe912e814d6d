"""What a TensorRT-LLM engine is, as its arguments and its KV pool say, and the sentence where it runs uncached."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache.device.cpu import PagedGroup, describe_group
from lmcache.errors import LayoutRefused
from lmcache.integration.engine.weight_files import weights_sample

if TYPE_CHECKING:
    import torch

_PLAIN_KV_TYPES = ("auto", "float16", "fp16", "bfloat16", "bf16", "fp8")
_POOL_DIMENSIONS = 4  # blocks, layers, keys and values or a latent, elements
_FOLDER_FORMAT = "auto"  # of `load_format`: weights are those of the model's folder
_CONFIGS = ("config.json", "hf_quant_config.json")
_STATE_KEYS = re.compile(r"mamba|ssm|linear_attn|linear_num|hybrid_override|layers_block_type|index_topk")


@dataclass(frozen=True)
class EngineFacts:
    """`ranks`: that hold different KV; all ranks of an MLA engine hold the same."""

    model_name: str
    block_tokens: int
    ranks: int
    group: PagedGroup

    def kv_rank(self, rank: int) -> int:
        return rank if self.ranks > 1 else 0


def describe_engine(llm_args: Any, version: str, pool: torch.Tensor) -> EngineFacts:
    """`pool`: [blocks, layers, 2 or 1, elements]. LayoutRefused where its KV cannot be cached exactly."""
    config = _model_config(llm_args)
    _refuse_settings(llm_args)
    _refuse_model(config, _max_tokens(llm_args))
    if pool.dim() != _POOL_DIMENSIONS or not pool.is_contiguous():
        raise LayoutRefused(
            f"The KV pool has shape {tuple(pool.shape)}; blocks, layers, keys and values, elements in that order are "
            "what this version can restore."
        )
    if pool.element_size() == 1 and not pool.dtype.is_floating_point and _kv_type(llm_args) != "fp8":
        raise LayoutRefused(f"The KV pool is of {pool.dtype}, whose scales lie elsewhere; use fp8 or auto.")
    is_latent = pool.shape[2] == 1
    block_tokens = _block_tokens(llm_args)
    group = describe_group(
        [("pool", pool)],
        engine=_identity(llm_args, version, config),
        block_tokens=block_tokens,
        num_blocks=pool.shape[0],
        device_type=pool.device.type,
    )
    ranks = 1 if is_latent else int(getattr(llm_args, "tensor_parallel_size", 1))
    return EngineFacts(str(llm_args.model), block_tokens, ranks, group)


def _block_tokens(llm_args: Any) -> int:
    tokens = getattr(llm_args.kv_cache_config, "tokens_per_block", None)
    if not isinstance(tokens, int) or tokens < 1:
        raise LayoutRefused("This version of TensorRT-LLM does not say how many tokens a KV block has.")
    return tokens


def _max_tokens(llm_args: Any) -> int | None:
    return getattr(llm_args, "max_seq_len", None)


def _kv_type(llm_args: Any) -> str:
    return str(getattr(llm_args.kv_cache_config, "dtype", "auto")).lower()


def _model_config(llm_args: Any) -> dict[str, Any]:
    path = Path(str(llm_args.model)) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LayoutRefused(
            f"It is not known which weights {llm_args.model} has, because {path} cannot be read; give the model as a "
            "local folder."
        ) from error
    if not isinstance(config, dict):
        raise LayoutRefused(f"{path} is not the configuration of a model.")
    return config


def _refuse_settings(llm_args: Any) -> None:
    for setting in ("pipeline_parallel_size", "context_parallel_size", "max_beam_width"):
        value = getattr(llm_args, setting, None)
        if value not in (None, 1):
            raise LayoutRefused(f"{setting} is {value}; only 1 is supported with this connector.")
    for setting, fix in (
        ("enable_attention_dp", "every rank has requests of its own; turn it off"),
        ("speculative_config", "KV of drafts depends on more than the tokens; leave it out"),
        ("sparse_attention_config", "its index is kept beside the KV; leave it out"),
    ):
        if getattr(llm_args, setting, None):
            raise LayoutRefused(f"{setting} is set: {fix}.")
    load_format = getattr(llm_args, "load_format", _FOLDER_FORMAT)
    name = str(getattr(load_format, "name", load_format)).lower()
    if name != _FOLDER_FORMAT:
        raise LayoutRefused(f"load_format is {name}, so it is not known which weights these are; use auto.")
    cache = llm_args.kv_cache_config
    if getattr(cache, "host_cache_size", None):
        raise LayoutRefused(
            "host_cache_size is set: then a block's number does not say where it lies in the GPU's pool; leave it out, "
            "this server is that cache."
        )
    if _kv_type(llm_args) not in _PLAIN_KV_TYPES:
        raise LayoutRefused(f"The KV cache type {_kv_type(llm_args)} keeps scales elsewhere; use auto or fp8.")
    _refuse_windows(getattr(cache, "max_attention_window", None), _max_tokens(llm_args))


def _refuse_windows(windows: Any, max_tokens: int | None) -> None:
    if windows and (max_tokens is None or min(windows) < max_tokens):
        raise LayoutRefused(
            f"max_attention_window is {windows}: blocks before a window are given to other requests; leave it out."
        )


def _refuse_model(config: Mapping[str, Any], max_tokens: int | None) -> None:
    for part in (config, config.get("text_config") or {}):
        window = part.get("sliding_window") if part.get("use_sliding_window", True) else None
        if window is not None and (max_tokens is None or window < max_tokens):
            raise LayoutRefused(
                f"This model attends to windows of {window} tokens, and blocks before them are given to other requests."
            )
        states = [key for key in part if _STATE_KEYS.search(key) and part[key]]
        if states:
            raise LayoutRefused(f"This model keeps more than attention KV ({states[0]}), which cannot be restored.")


def _identity(llm_args: Any, version: str, config: Mapping[str, Any]) -> str:
    """What gives the bytes of a block their meaning: the whole version, kernels, KV type, weights, configuration."""
    folder = Path(str(llm_args.model))
    settings = {
        "configs": [(folder / name).read_text() if (folder / name).is_file() else "" for name in _CONFIGS],
        "dtype": str(getattr(llm_args, "dtype", "auto")),
        "quantization": str(getattr(llm_args, "quant_config", None)),
        "weights": weights_sample(folder),
    }
    # These scale positions by the configured length, so the same weights give other keys at another length.
    if re.search("longrope|dynamic", json.dumps(config)):
        settings["max_seq_len"] = str(_max_tokens(llm_args))
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    backend = str(getattr(llm_args, "attn_backend", ""))
    return " ".join(("tensorrt_llm", version, backend, _kv_type(llm_args), digest))
