"""`fp8` and `cachegen`: KV in bfloat16 in fewer bytes, for engines that accept what comes back."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from lmcache import _native
from lmcache.serde.base import SerdeConfig, Stage

# What engines ask for, and what frames say. Another format is another name: neither is read as the other.
FP8_NAMES = {"float8_e4m3fn": "fp8", "float8_e5m2": "fp8-e5m2"}
CACHEGEN_NAMES = {32: "cachegen", 16: "cachegen-16"}
_FORMATS = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}


class Fp8Config(SerdeConfig, frozen=True, kw_only=True):
    """Lossy: bfloat16 as 8-bit floating point, with a scale for each 256 elements, 51% of the bytes. First in a list.
    For engines with `lmcache.mp.lossy_serde` (docs/how-to/connect_vllm.md): no other stores or finds anything there."""

    fp8_dtype: Annotated[
        Literal["float8_e4m3fn", "float8_e5m2"],
        Meta(
            description="float8_e4m3fn: errors up to 1/16 of a value, and the name for engines is fp8; "
            "float8_e5m2: up to 1/8, for KV of a wider range, and the name is fp8-e5m2"
        ),
    ] = "float8_e4m3fn"


def build_fp8(config: Fp8Config, where: str) -> Stage:
    return Stage(FP8_NAMES[config.fp8_dtype], _native.fp8_stage(_FORMATS[config.fp8_dtype]))


class CachegenConfig(SerdeConfig, frozen=True, kw_only=True):
    """Lossy: bfloat16 as steps of the largest of each 256 elements, entropy-coded, about 29% or 22% of the bytes. First
    in a list. For backends below about 0.5 GB/s. For engines with `lmcache.mp.lossy_serde`, as `fp8`."""

    bins: Annotated[
        Literal[16, 32],
        Meta(
            description="32: errors up to 1/30 of the largest of 256, and the name for engines is cachegen; "
            "16: up to 1/14, and the name is cachegen-16"
        ),
    ] = 32


def build_cachegen(config: CachegenConfig, where: str) -> Stage:
    return Stage(CACHEGEN_NAMES[config.bins], _native.cachegen_stage(config.bins))
