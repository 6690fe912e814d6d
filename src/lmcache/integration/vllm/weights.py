"""What an engine's weights are, as far as it can be known from outside: the folder or the commit that they came from.

Weights that are replaced in a running engine are the scheduler side's matter (`SchedulerSide.reset`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lmcache.errors import LayoutRefused
from lmcache.integration.engine.weight_files import weights_sample
from lmcache.integration.vllm.speculation import draft_config, lookahead_tokens

# Formats of which every loader reads files of the model's folder as they are. Which of them it picks depends on the
# format, so that is part of the identity.
_FOLDER_FORMATS = (
    *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt"),
    *("sharded_state", "runai_streamer", "runai_streamer_sharded"),
)
_MADE_UP_FORMAT = "dummy"
_OTHER_REPOSITORIES = ("audio_model_id", "text_model_id")  # parts of a model that vLLM loads from elsewhere, unpinned
_COMMIT = re.compile("[0-9a-f]{40}")


def refuse_unknown_weights(vllm_config: Any) -> None:
    """LayoutRefused where two engines that look alike may have other weights."""
    _refuse_source(vllm_config.model_config, vllm_config.load_config)
    draft = draft_config(vllm_config)
    if draft is not None:
        _refuse_source(draft, _draft_load(vllm_config))


def _refuse_source(model: Any, load: Any) -> None:
    load_format, source = load.load_format, _source(model)
    if load_format == _MADE_UP_FORMAT:
        if model.quantization is not None:
            raise LayoutRefused(
                "Made-up weights (load_format dummy) of a quantized model are not the same twice; load real weights, "
                "or leave the quantization out."
            )
        return
    if load_format not in _FOLDER_FORMATS:
        raise LayoutRefused(
            f"Weights of load_format {load_format} come from outside the model's folder or are cached beside it, so it "
            "is not known which they are; load them from a folder, with load_format auto."
        )
    for name in _OTHER_REPOSITORIES:
        if getattr(model.hf_config, name, None):
            raise LayoutRefused(
                f"This model loads weights of another repository ({name}), which may change and which nothing pins; "
                "use a model whose weights are all in its own folder or repository."
            )
    if not Path(source).is_dir() and not _commit(model):
        raise LayoutRefused(
            f"It is not known which weights {source} has: it is neither a local folder nor a commit of the Hugging "
            "Face hub; download it to a folder."
        )


def weights_identity(vllm_config: Any) -> dict[str, Any]:
    """Where the weights come from and a sample of them; of all engines that may share KV the same."""
    model = vllm_config.model_config
    settings = _of_model(model, vllm_config.load_config, vllm_config.parallel_config)
    draft = draft_config(vllm_config)
    if draft is not None:
        settings["draft"] = {
            **_of_model(draft, _draft_load(vllm_config), vllm_config.parallel_config),
            "method": vllm_config.speculative_config.method,
            "model": str(vllm_config.speculative_config.model),
            "lookahead": lookahead_tokens(vllm_config),
            "config": draft.hf_config.to_dict(),
            "dtype": str(draft.dtype),
            "quantization": str(draft.quantization),
        }
    return settings


def _draft_load(vllm_config: Any) -> Any:
    return getattr(vllm_config.speculative_config, "draft_load_config", None) or vllm_config.load_config


def _of_model(model: Any, load: Any, parallel: Any) -> dict[str, Any]:
    settings = {"format": load.load_format, "commit": _commit(model)}
    if load.load_format == _MADE_UP_FORMAT:
        # Each tensor of each worker is drawn by itself, on its device.
        settings["workers"] = [str(getattr(parallel, name, 1)) for name in _WORKER_SETTINGS]
        settings["device"] = _device_name()
        return settings
    extra = load.model_loader_extra_config
    settings["pattern"] = extra.get("pattern") if isinstance(extra, dict) else None
    folder = Path(_source(model))
    settings["sample"] = weights_sample(folder) if folder.is_dir() else ""
    return settings


_WORKER_SETTINGS = (
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel"),
    "enable_eplb",
)


def _device_name() -> str:
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu"


def _source(model: Any) -> str:
    """`model_weights`: the bucket or folder of the weights, where the model's own folder has the rest only."""
    return str(getattr(model, "model_weights", "") or model.model)


def _commit(model: Any) -> str:
    """The commit of the hub; empty when it is not known, or for a folder."""
    revision = model.revision
    resolved = getattr(revision, "resolved", None) or revision or ""
    if _COMMIT.fullmatch(str(resolved)):
        return str(resolved)
    config_elsewhere = getattr(model, "hf_config_path", None) not in (None, "", model.model)
    return "" if config_elsewhere else str(getattr(model.hf_config, "_commit_hash", None) or "")
