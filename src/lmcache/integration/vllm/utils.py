"""The name that vLLM's own connector module imports from here."""

from __future__ import annotations

from typing import Any


def mla_enabled(model_config: Any) -> bool:
    """Whether the model keeps one latent vector a token (MLA), which every tensor-parallel rank holds alike."""
    return getattr(model_config, "use_mla", False) is True
