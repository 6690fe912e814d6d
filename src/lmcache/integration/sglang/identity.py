"""What must be equal, beside the page's tokens and its place in memory, before two engines may share its bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from lmcache.errors import LayoutRefused
from lmcache.integration.engine.weight_files import weights_sample

# Settings of SGLang that change what the weights make of tokens.
_SETTINGS = (
    *("dtype", "quantization", "kv_cache_dtype", "json_model_override_args", "rope_scaling", "tokenizer_path"),
    *("speculative_algorithm", "model_impl", "quantization_param_path", "torchao_config"),
)
_FOLDER_FORMATS = ("auto", "pt", "safetensors", "fastsafetensors", "gguf", "mistral", "sharded_state")
# Pools that are split over tensor-parallel ranks where the model's KV is not.
_ALWAYS_SPLIT = ("mamba",)


class PoolPlace(NamedTuple):
    """Which part of a page's KV a rank holds, among how many."""

    kv_ranks: int
    kv_rank: int


def pool_place(config: Any, pool_name: str) -> PoolPlace:
    """`config`: HiCacheStorageConfig. Replicas (tensor-parallel ranks of an MLA model) are one rank."""
    ranks, rank = int(config.pp_size), int(config.pp_rank)
    context_ranks = int(getattr(config, "attn_cp_size", 1) or 1)
    ranks, rank = ranks * context_ranks, rank * context_ranks + int(getattr(config, "attn_cp_rank", 0) or 0)
    if not config.is_mla_model or pool_name in _ALWAYS_SPLIT:
        ranks, rank = ranks * int(config.tp_size), rank * int(config.tp_size) + int(config.tp_rank)
    return PoolPlace(ranks, rank)


def engine_identity(version: str, weights: str) -> str:
    """The whole version: any other may lay pages out differently under the same names."""
    return " ".join(("sglang", version, weights))


def weights_identity(server_args: Any, weights_id: str, *, replaced: bool = False) -> str:
    """16 hex digits over what decides KV values beyond the model's name. Reads the weight files: to be called once.
    LayoutRefused where two engines that look alike may have other weights. `replaced`: they are not those that this
    engine started with."""
    settings: dict[str, Any] = {"id": weights_id}
    if server_args is not None:
        settings |= {name: str(getattr(server_args, name, None)) for name in _SETTINGS}
    if not weights_id:
        if server_args is None:
            raise LayoutRefused(_unknown("this version of SGLang does not tell which weights it has loaded"))
        if replaced:
            raise LayoutRefused(_unknown("they were replaced while it ran"))
        settings["weights"] = _sample(server_args, server_args.model_path, server_args.revision)
        draft = getattr(server_args, "speculative_draft_model_path", None)
        if draft:
            revision = getattr(server_args, "speculative_draft_model_revision", None)
            settings["draft"] = _sample(server_args, draft, revision)
    canonical = json.dumps(settings, sort_keys=True).encode()
    return hashlib.sha256(canonical).hexdigest()[:16]


def _sample(server_args: Any, source: str, revision: str | None) -> str:
    load_format = str(getattr(server_args, "load_format", "auto")).rpartition(".")[2].lower()
    if load_format not in _FOLDER_FORMATS:
        raise LayoutRefused(_unknown(f"weights of --load-format {load_format} do not come from the model's folder"))
    folder = Path(source)
    if not folder.is_dir():
        folder = _snapshot(source, revision)
    config = folder / "config.json"
    digest = hashlib.sha256(config.read_bytes() if config.is_file() else b"")
    digest.update(weights_sample(folder).encode())
    return digest.hexdigest()


def _snapshot(source: str, revision: str | None) -> Path:
    """Where the Hugging Face hub's files of a model lie on this machine."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        raise LayoutRefused(_unknown(f"{source} is no local folder")) from None
    found = try_to_load_from_cache(source, "config.json", revision=revision)
    if not isinstance(found, str):
        raise LayoutRefused(_unknown(f"{source} is neither a local folder nor in the cache of the Hugging Face hub"))
    return Path(found).parent


def _unknown(cause: str) -> str:
    return (
        f"It is not known which weights this engine has: {cause}. Download the model to a folder, or name the weights "
        "with lmcache.mp.weights_id."
    )
