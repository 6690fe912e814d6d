"""`zstd` and `exponent`: KV in 16-bit floating point without loss."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from lmcache import _native
from lmcache.errors import ResourceError
from lmcache.serde.base import SerdeConfig, SmallestSaving, Stage


class ZstdConfig(SerdeConfig, frozen=True, kw_only=True):
    """Lossless: the exponents of bfloat16 through zstd. For backends below about 0.5 GB/s."""

    level: Annotated[
        int, Meta(ge=0, le=19, description="0: entropy coding alone, fastest and smallest for most KV; else as of zstd")
    ] = 0
    smallest_saving: SmallestSaving = 0.1


class ExponentConfig(SerdeConfig, frozen=True, kw_only=True):
    """Lossless: short codes for the commonest exponents of bfloat16. For backends below about 3 GB/s."""

    smallest_saving: SmallestSaving = 0.1


def build_zstd(config: ZstdConfig, where: str) -> Stage:
    if refusal := _native.zstd_refusal():
        raise ResourceError(f'{where}: "zstd" needs libzstd of the machine ({refusal}); install libzstd1 or libzstd.')
    return Stage("zstd", _native.zstd_stage(config.level, config.smallest_saving))


def build_exponent(config: ExponentConfig, where: str) -> Stage:
    return Stage("exponent", _native.exponent_stage(config.smallest_saving))
