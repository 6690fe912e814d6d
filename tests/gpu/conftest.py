"""Tests on a real NVIDIA GPU; skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest

from lmcache.testing.gpu import why_no_gpu


@pytest.fixture(scope="session", autouse=True)
def needs_gpu() -> None:
    pytest.importorskip("torch")
    missing = why_no_gpu()
    if missing:
        pytest.skip(missing)
