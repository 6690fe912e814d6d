"""What tests of peers share."""

from __future__ import annotations

import pytest

from lmcache.core import limits


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still is no peer that does."""
    monkeypatch.setattr(limits, "PEER_LOAD_FLOOR_SECONDS", 30.0)
    monkeypatch.setattr(limits, "PEER_IDLE_SECONDS", 30.0)
