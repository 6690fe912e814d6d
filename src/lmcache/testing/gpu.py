"""Whether tests and benchmarks that need a GPU can run here."""

from __future__ import annotations

from lmcache import _native
from lmcache.device.cuda import DRIVER


def why_no_gpu() -> str:
    """A sentence that says what is missing; "" where there is an NVIDIA GPU that torch can use too."""
    try:
        _native.CudaDevice(DRIVER, 0)
    except RuntimeError as error:
        return f"This needs an NVIDIA GPU: {error}."
    import torch

    return "" if torch.cuda.is_available() else "This needs a build of torch for CUDA."
