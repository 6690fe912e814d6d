"""What must be equal, beside shapes and tokens, before two engines may share KV bytes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lmcache.client.content_extras import ContentSpan
from lmcache.integration.vllm.weights import weights_identity
from lmcache.protocol.tokens import beginning_identity, pack_tokens

# What an engine makes of an image depends on these too; vLLM's name of the image does not.
_MEDIA_SETTINGS = (
    *("mm_processor_kwargs", "media_io_kwargs", "mm_encoder_attn_dtype"),
    *("video_pruning_rate", "video_pruning_method"),
)
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def engine_identity(
    model: str,
    version: str,
    layers: Mapping[str, Any],
    layer_names: tuple[str, ...],
    *,
    on_gpu: bool = False,
    state: str = "",
) -> str:
    """Names whatever gives the bytes of these layers' blocks their meaning: part of the layout fingerprint. `model` is
    what `model_identity` returned.

    The attention kernels of a CPU engine pack K and V per instruction set, so that belongs here, as does the whole
    version, with what it says of the build: any other may pack differently. Those of a GPU engine write the same bytes
    whatever the host's CPU is.
    `state`: the tensors of a recurrent state, where these layers keep one.
    """
    kernels = sorted({_kernel(layers[name], on_gpu, state) for name in layer_names if name in layers})
    return " ".join(("vllm", version, *kernels, model))


def _kernel(layer: Any, on_gpu: bool, state: str) -> str:
    import torch

    if state:
        return ":".join((type(layer).__name__, torch.backends.cpu.get_cpu_capability(), state))

    implementation = type(getattr(layer, "impl", layer)).__name__
    if on_gpu:
        return ":".join((implementation, "cuda", str(layer.kv_cache_dtype)))
    isa = getattr(layer, "isa", "")
    return ":".join((implementation, isa, torch.backends.cpu.get_cpu_capability(), str(layer.kv_cache_dtype)))


def model_identity(vllm_config: Any) -> str:
    """16 hex digits over what decides KV values beyond the model's name: weights, revision, rope, quantization. Reads
    the weight files: to be called once."""
    model = vllm_config.model_config
    settings = {
        "config": model.hf_config.to_dict(),
        "revision": model.revision,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "weights": weights_identity(vllm_config),
    }
    # These scale positions by the configured length, so the same weights give other keys at another length.
    if re.search(r"longrope|dynamic", json.dumps([settings["config"], settings["weights"]], default=str)):
        settings["max_model_len"] = model.max_model_len
    media = getattr(model, "multimodal_config", None)
    if media is not None:
        settings["media"] = [str(getattr(media, name, None)) for name in _MEDIA_SETTINGS]
        settings["processors"] = _processors(Path(model.model))
    canonical = json.dumps(settings, sort_keys=True, default=str).encode()
    return hashlib.sha256(canonical).hexdigest()[:16]


def _processors(folder: Path) -> str:
    """How a local folder's media are made ready for the model."""
    digest = hashlib.sha256()
    for path in (folder / name for name in _PROCESSOR_FILES):
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)}".encode() + content)
    return digest.hexdigest()


def names_media(vllm_config: Any) -> bool:
    """Whether vLLM names images, audio ... by what they are. With both of its caches off it counts them instead, from
    the start of each process on: the same name is then another image after a restart, or in another engine."""
    media = getattr(vllm_config.model_config, "multimodal_config", None)
    return media is None or media.mm_processor_cache_gb > 0 or bool(vllm_config.cache_config.enable_prefix_caching)


def request_identity(
    request: Any, adapter_content: str = "", generation: bytes = b"", *, lookahead_tokens: int = 0
) -> bytes:
    """Bytes that seed a request's first chunk hash; empty for a plain request to the weights that the engine started
    with. `adapter_content` names what its LoRA adapter is, `generation` weights that came after the first. With
    `lookahead_tokens` its first tokens are here, and not among those that are hashed."""
    lora = request.lora_request
    parts: tuple[Any, ...] = ("lora", lora.lora_name, lora.lora_path, adapter_content) if lora is not None else ()
    if generation:
        parts += ("weights", generation)
    if lookahead_tokens:
        parts += beginning_identity(pack_tokens(request.prompt_token_ids[:lookahead_tokens]))
        first = [span for span in content_spans(request.mm_features) if span.offset < lookahead_tokens]
        if first:
            parts += ("contents", first)
    return msgspec.msgpack.encode(parts) if parts else b""


def content_spans(features: Sequence[Any], first_token: int = 0) -> tuple[ContentSpan, ...]:
    """What vLLM's multimodal features say of a request's images, audio ... Offsets count from `first_token`, and are
    negative for what begins before it."""
    if not features:
        return ()
    return tuple(
        ContentSpan(feature.identifier, feature.mm_position.offset - first_token, feature.mm_position.length)
        for feature in features
    )


def is_cacheable(request: Any, *, media_have_names: bool = True) -> bool:
    """Whether the key of a request would say everything about its KV: not so when embeddings are passed in. A session
    (`resumable`) may get its media later."""
    if (request.mm_features or request.resumable) and not media_have_names:
        return False
    return request.prompt_token_ids is not None and request.prompt_embeds is None
